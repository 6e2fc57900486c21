"""Whether a hit is worth loading.

- `model`: the decision.
- `rates`: what links are measured at; `saved_rates`: the file that keeps them over a restart.
"""
