"""vLLM's own tiering: what a secondary tier derives from, and answers with.

Apart from `interfaces.py`, because a vLLM in which this has moved can still serve with kvtier's
connector.
"""

from __future__ import annotations

from vllm.v1.kv_offload.tiering.base import JobResult, Medium, SecondaryTierManager

__all__ = ["JobResult", "Medium", "SecondaryTierManager"]
