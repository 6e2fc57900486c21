"""What others implement: the contracts between the chain, the tiers and the movers.

- `backend`: a kind of tier, found by its entry point; it opens the other two.
- `tier`: the catalogue of a medium, on the scheduler's thread, and its events.
- `handler`: the data side of a medium, in the mover.
- `write_budget`: what a tier may write now, where that is limited.
- `mover`: what carries transfers out between two handlers.
"""
