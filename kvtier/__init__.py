"""kvtier keeps the KV cache that an LLM server computes: CPU memory, NVMe, object store.

The names below are loaded when first used, so that importing kvtier costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # true to type checkers; importing it would take longer than all else here

if TYPE_CHECKING:
    from kvtier.config import load as load_config
    from kvtier.stack import Stack
    from kvtier.types import BlockKey, Namespace, block_key

__version__ = "0.2.0.dev0"
__all__ = ["BlockKey", "Namespace", "Stack", "block_key", "load_config"]

_HOMES = {
    "BlockKey": ("kvtier.types", "BlockKey"),
    "Namespace": ("kvtier.types", "Namespace"),
    "Stack": ("kvtier.stack", "Stack"),
    "block_key": ("kvtier.types", "block_key"),
    "load_config": ("kvtier.config", "load"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
