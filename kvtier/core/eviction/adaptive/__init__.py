"""The default eviction policy, which learns when blocks of each kind are used again.

- `policy`: what requests tell, and what is made of it.
- `block_kinds`: the kinds of block that it tells apart.
- `history`: a sample of keys, watched beyond their eviction.
- `reuse_forecast`: how soon blocks of a kind are used again.
- `prefix_runs`: resident blocks of one prefix, which leave tail first.
- `eviction_queue`: the runs that go next.
"""
