"""Decisions without I/O: catalogues, plans, ledger, records. Imports neither torch nor vLLM."""
