"""Benchmarks of copies between host memory and a GPU."""
