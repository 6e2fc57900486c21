"""How fast tiers are, and what that is worth: bench, doctor and plan.

`tier_speeds.py` measures the tiers of a stack, `expectations.py` computes times to first token from
their speed, and `trace_sweep.py` runs a trace through several sizes of a stack.
"""
