"""Fixed slots behind a table: what the CPU and the NVMe tier share.

- `layout`: the table as docs/reference/format.md states it: a header page, then 64 bytes an entry.
- `tier`: the catalogue in memory: which slot holds which key, what is pinned, what is free.
- `prompt_order`: which block comes before which in a prompt.
- `recovered`: which blocks a restart has found, hottest first.
- `pieces`: the order in which a device pins the slots.
- `neighbours`: which free slots the blocks of one store get.
- `slab_files`: reads a slab from outside.
- `inspection`: the inspector of a medium that consists of slabs.
- `memory`: gives freed memory back to the system.
"""
