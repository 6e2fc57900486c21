"""Around a served engine, for the command line, the demo and the benchmarks.

- `prompts.py`: prompts from files, as the tokens that vLLM's server would make of them
- `server_process.py`: a `kvtier serve` in a process of its own
- `tiny_model.py`: a small model with random weights
"""
