"""Hours of kills, power cuts, damage and bad stores, in rounds that a seed repeats.

    make campaign HOURS=8 SEED=7       # MINUTES=10, ONLY=damage, ROUND=12, FOLDER=...

- `round`: what a scenario is given to play one round, and where it puts what it finds.
- `scenarios/`: the scenarios; `scenarios/__init__.py` lists them.
- `runner`: plays rounds in processes of their own, keeps the books in a file, and reports.
- `crash`: writers of one medium that are killed, and proofs of what they leave behind; a command of
  its own, too.
- `damage/`: specimens of what lies on each medium, and the ways to damage it.
- `power/`: crashes of the machine. `fuzz/`: hostile inputs, by a command of its own.
- `children`, `stacks`, `growth`, `serving_life`: what scenarios start, open, weigh and use.
"""
