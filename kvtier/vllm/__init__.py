"""kvtier inside vLLM: `--kv-transfer-config` names this module and `KVTierConnector`.

Importing this package imports neither vLLM nor torch; asking for the connector imports both.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTierConnector":
        from kvtier.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module 'kvtier.vllm' has no attribute {name!r}")
