"""Around a served engine, for the command line, the demo and the benchmarks.

- `server_process.py`: a `kvtier serve` in a process of its own
- `tiny_model.py`: a small model with random weights
"""
