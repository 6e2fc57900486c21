"""Decisions without I/O: interfaces, catalogues, plans, the ledger, costs, records.

Imports neither torch nor vLLM. The rooms:

- `interfaces`: what a backend implements (`backend`, `tier`, `handler`) and what a mover promises.
- `chain`: ordered tiers that behave as one; lookup, plan, promise, commit, and the writes downward.
- `costs`: whether a hit is worth loading.
- `eviction`: which blocks go when a tier is full.
- `wear`: how much may be written to a medium that wears, and which blocks that is best spent on.
- `slab`: fixed slots behind a table, which the CPU and the NVMe tier share.
- `settings`: the settings that every tier has, and sizes, durations and secrets in them.
- `records`: the format of a block, its compression, and the events of a tier.
- `system`: the seams to the operating system: files, NUMA nodes, calls that may hang.
"""
