"""Fixed slots behind a table: the catalogue that the CPU and the NVMe tier share.

- `layout`: the table as docs/reference/format.md states it: a header page, then 64 bytes an entry.
- `tier`: the catalogue in memory: which slot holds which key, what is pinned, what is free.
- `recovered`: which blocks a restart has found, hottest first.
- `memory`: gives freed memory back to the system.
"""
