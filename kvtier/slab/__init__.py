"""Fixed slots behind a table, in files that the engines of a machine share: the tiers cpu and nvme.

- `layout`: the table as docs/reference/format.md states it: a header page, then 64 bytes an entry.
- `catalogue`: which slot holds which key, what is pinned, what is free, what goes next.
- `recovery`: which blocks a restart has found, hottest first.
- `numbering`: the slots of many slabs, numbered through; blocks that stand in two.
- `folder_tier`: the catalogue of a folder of slabs, which a keeper supplies with updates.
- `files`, `folder`: the names and locks of a folder; its owners and slabs.
- `shares`: new slabs, and how engines and idle models divide the room.
- `retention_list`: the file that names the retained blocks, for the next process.
- `watch`, `keeper`: what changed in the tables; the thread that does all file work of a tier.
- `inspect`, `folder_inspect`: the medium seen from outside, for the command line.
"""
