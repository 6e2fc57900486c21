"""Write budgets: how much may be written to a medium that wears, and which blocks are worth it.

- `token_bucket`: a long-run rate with bursts.
- `allowance`: what a tier may write now, as its keeper and the cascade share it.
- `dynamic_admission`: which blocks are written within it: those that will earn the most hits.
- `earned_hits`: what that is learned from: what became of blocks that were used as often, and came
  in prompts as long.

All of it is told the time by whoever calls.
"""
