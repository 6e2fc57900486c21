"""The workers' side: copies between a rank's KV tensors and the CPU tier's region.

- `rank_worker.py`: carries errands out for one rank, and reports
"""
