"""What tiers of slabs share.

- `slab`: fixed slots behind a table, the catalogue over them, and what people do to them.
- `retained`: blocks that are evicted after all others, and the lists that keep them over a restart.
- `wear`: how much may be written to a medium that wears, and on which blocks that is best spent.
"""
