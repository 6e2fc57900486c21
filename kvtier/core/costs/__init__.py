"""Never slower than recomputing: what a load costs, and what it saves.

- `model`: the decision. docs/how_it_works/costs.md tells the reasoning.
- `link_rates`: how fast each link is, learned from its loads.
- `prefill_rate`: how fast the engine computes, learned from its steps.
- `load_runs`: the words for what a request could load.
- `hit_offers`: where a hit may end for models with several cache groups.
"""
