"""Retained blocks: what requests and people asked to keep, beside any eviction policy.

To retain is a wish. It takes nothing but a place in a list: a tier lets retained blocks go last,
within a budget of their own, and a reset takes all of it back.

- `retained_blocks`: which blocks of one tier are retained, by whom and until when; the budget.
- `retaining_policy`: an eviction policy that lets these go last, and released ones first.
- `kept_file`, `kept_list`: the list in a file, for the next process.
- `retention`: all tiers of a chain together.
"""
