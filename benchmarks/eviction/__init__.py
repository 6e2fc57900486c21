"""Eviction policies and write budgets on workloads and traces."""
