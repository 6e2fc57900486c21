"""Benchmarks of tiers, movers and copies between them, without an engine."""
