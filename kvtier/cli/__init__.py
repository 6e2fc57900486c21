"""The command line. `main.py` is the entry point, `app.py` finds the command, `signals.py` ends it.

`commands/` has one file a command. `console/` is how they speak, `inspection/` how they look at a
stack's tiers, `copying/` how they fill one, `measuring/` how they time them. `starter_stack.py` is
the text of a new stack file. No file here knows a kind of tier: what is done to a medium, its
inspector does (`kvtier.inspect`).
"""
