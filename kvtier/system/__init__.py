"""The seams to the operating system.

- `disk`: files; `memory`: how much there is, taking it, and NUMA nodes.
- `calls`: calls that may hang, and the end of what was opened together.
"""
