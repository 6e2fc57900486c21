"""Ordered tiers that behave as one.

- `tier_chain`: the door: lookup, load, store, poll. Read it first.
- `plan`: pure functions that decide what moves where.
- `lookup`: which tier can give each block, and what is reserved for a hit.
- `hits`: how much of a prompt is worth loading.
- `load`, `promotion`: the way up, for requests that the engine serves.
- `prefetch`: the way up before anybody asks.
- `store`: the way down, by write policy and admission, and the backlog of an earlier process.
- `misses`: what became of blocks that are not found.
- `ledger`: everything under way, and who waits for it.
- `isolated_tier`: keeps the mistakes of another package's tier away from the tiers beside it.
- `health`: which tiers and keys are left alone for a while after a failure.
- `stats`: what the chain counts.
"""
