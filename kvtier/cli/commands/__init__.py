"""One file a command, with the command's name; `kvtier.cli.app` imports the one that is called.

`contents/` shows, proves and removes what a stack holds, `copies/` copies blocks, and `setup/` has
to do with stack files, the machine and engines. A file has the command's options, its help and what
it prints. What several commands share is in the rooms beside this one: `console`, `inspection`,
`copying`, `measuring`.
"""
