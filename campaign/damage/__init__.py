"""Specimens of what lies on each medium, and the ways to damage it.

- `specimens`: small media full of blocks, with earlier states and another namespace's files; and
  what opens them, and proves every block that is offered.
- `records`: what is done to one record; `files`: what is done to whole files and tables.
"""
