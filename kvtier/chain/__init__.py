"""Ordered tiers that behave as one.

- `tier_chain`: the door: lookup, load, store, poll. Read it first.
- `context`: what all parts share: tiers, clock, cost model, and which tiers and keys are left alone
  for a while after a failure (`Health`).
- `plan`: pure functions that decide what moves where.
- `lookup`: which tier can give each block, and what is reserved for a hit.
- `queries`: asks media that alone know what they hold, ahead of a request's turn.
- `hits`: how much of a prompt is worth loading.
- `load`: the way up, for requests that the engine serves.
- `prefetch`: the way up before anybody asks.
- `store`: the way down, by write policy and admission, and the backlog of an earlier process.
- `admission`: which blocks are written within a budget.
- `misses`: what became of blocks that are not found.
- `ledger`: everything under way, and who waits for it.
- `isolated_tier`: keeps the mistakes of another package's tier away from the tiers beside it.
- `stats`: what the chain counts.
"""
