"""The place of vLLM's tracker of events, and what events of blocks are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "event_kinds",
    "extra_keys",
    "maybe_convert_block_hash",
    "publishes_events",
    "resolve_block_hashes",
    "track_events",
]


def publishes_events(vllm_config: Any) -> bool:
    """Whether anybody may listen to events."""
    events = vllm_config.kv_events_config
    return bool(events is not None and events.enable_kv_cache_events)


def event_kinds(connector: Any) -> dict[int, tuple[str | None, int | None]]:
    """What cache groups are of, and their windows, as events name them."""
    groups = connector.connector_scheduler.config.kv_group_configs
    return {group.group_idx: tuple(group.kv_event_group_spec) for group in groups}


def track_events(connector: Any, tracker: Any) -> None:
    """Let events go by way of this, which is told what is stored and found, too."""
    connector.connector_scheduler._events_tracker = tracker


def extra_keys(request: Any, start: int, end: int, block: int) -> Any:
    """What beside its tokens is in the hash of each block in this range, as events say it."""
    return to_event_extra_keys(list(_extra_keys(request, start, end, block)))


def _extra_keys(request: Any, start: int, end: int, block: int) -> Iterator[Any]:
    medium = 0
    for at in range(start, end, block):
        keys, medium = generate_block_hash_extra_keys(request, at, at + block, medium)
        yield keys
