"""The way up before anybody asks: blocks come into host memory ahead of time.

- `ahead_of_time`: all of it, as the chain sees it.
- `prefetches`: promotions that begin while their request waits in the engine's queue.
- `prefetch_share`: how much of host memory they may hold.
- `warm_up`: the hottest blocks of the tiers below, after a start.
"""
