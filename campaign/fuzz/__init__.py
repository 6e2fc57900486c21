"""Hostile bytes for every parser of what comes from a disk, a store, a socket or a person.

    make fuzz INPUTS=1000000 SEED=1        # ONLY=manifest,names

- `harness`: new inputs out of a corpus, by a seed; what reaches new lines joins the corpus; no
  input may raise what is not typed, take a second or 64 MiB, or leave the folder.
- `media`, `answers`, `texts`: the parsers, each with its corpus.
"""
