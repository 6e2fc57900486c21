"""What a stack is worth, without running one: simulations, plots and figures for people.

- `simulate`, `trace_sample`, `forked_workers`: a request trace run through tiers of several sizes.
- `kv_shape`: how many bytes of KV cache a model has for each token.
- `human`, `svg`: numbers and plots for people.
"""
