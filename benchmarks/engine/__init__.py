"""Benchmarks on real engines, in turns."""
