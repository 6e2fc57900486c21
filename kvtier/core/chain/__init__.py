"""Ordered tiers that behave as one.

- `tier_chain`: the door: lookup, load, store, poll. Read it first.
- `locator`: which tier can give each block.
- `plan`: pure functions that decide what moves where.
- `ledger`, `in_flight`: everything under way, and who waits for it.
- `unproved`: what has come up from a lower tier and nobody has proved yet, and who is to blame.
- `loads`: the way up, for requests that the engine serves.
- `ahead`: the way up before anybody asks.
- `writes`: the way down, by write policy and admission, and what is caught up on after a restart.
- `health`: which tiers and keys are left alone for a while after a failure.
- `isolated_tier`: keeps the mistakes of another package's tier away from the tiers beside it.
- `stats`: what the chain counts.
"""
