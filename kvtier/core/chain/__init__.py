"""Ordered tiers that behave as one.

- `tier_chain`: the door: lookup, load, store, poll. Read it first.
- `locator`: which tier can give each block.
- `plan`: pure functions that decide what moves where.
- `ledger`, `in_flight`: everything under way, and who waits for it.
- `unproved`: what has come up from a lower tier and nobody has proved yet, and who is to blame.
- `promises`: the room that a lookup has promised to a request.
- `load_starter`: begins the loads of a request's blocks that are not in host memory.
- `promotion`: the way up, from lower tiers into host memory.
- `writes`: the way down, by write policy and admission, and what is caught up on after a restart.
- `prefetches`, `prefetch_share`: promotions that begin while their request waits, and how many.
- `ahead_of_time`, `warm_up`: beside these, the hottest blocks come up after a start.
- `direct_reads`: loads past host memory, straight from files.
- `embedded_loads`: loads of callers that have no request, as the Python API has.
- `health`: which tiers and keys are left alone for a while after a failure.
- `isolated_tier`: keeps the mistakes of another package's tier away from the tiers beside it.
- `stats`: what the chain counts.
"""
