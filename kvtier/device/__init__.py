"""Copies between an engine's KV tensors and records in host memory. Knows core, never vLLM."""
