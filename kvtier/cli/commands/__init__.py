"""One file a command, with the command's name; `kvtier.cli.app` imports the one that is called.

A file has the command's options, its help and what it prints. What several commands share is in the
rooms beside this one: `console`, `inspection`, `copying`, `measuring`.
"""
