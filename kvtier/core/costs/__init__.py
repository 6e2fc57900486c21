"""Never slower than recomputing: what a load costs, and what it saves.

- `model`: the decision between loading and computing. docs/how_it_works/costs.md tells why.
- `cost_settings`: its settings, and what it assumes of a link until the first load.
- `load_estimates`: how long loads over each link would take.
- `probes`: loads made to learn whether a refused link is faster now.
- `link_rates`: how fast each link is, learned from its loads.
- `prefill_rate`: how fast the engine computes, learned from its steps.
- `kept_rates`: what one run tells the next of links and engine; `rates_file` reads and writes it.
- `load_runs`: the words for what a request could load.
- `chunk_spans`: which chunks each cache group needs for a hit.
- `hit_offers`: where a hit may end for models with several cache groups.
- `hit_decision`: how much of a request's hit is taken, decided once.
"""
