"""kvtier keeps the KV cache that an LLM server computes: CPU memory, NVMe, object store."""

__version__ = "0.1.0"
