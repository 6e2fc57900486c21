"""Requests and tiers' events for the part that makes them events of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvtier.types import BlockKey, EventKind, TierEvent

MEDIA = ("cpu", "nvme", "object")
CPU_TIER, NVME_TIER, OBJECT_TIER = range(3)


def chunk_of(number: int, window: int | None = None) -> tuple[Any, Any, int, bytes]:
    """A request, a cache group of it, its chunk 1, and the key of that."""
    hashes = [bytes([number, each]) * 16 for each in range(4)]
    request = SimpleNamespace(
        request_id="any",
        block_hashes=hashes,
        all_token_ids=list(range(number, number + 64)),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )
    group = SimpleNamespace(
        sliding_window_size_in_chunks=window,
        hashes_per_chunk=2,
        tokens_per_chunk=32,
        tokens_per_block=16,
    )
    return request, group, 1, hashes[-1] + bytes(4)


def told_of(
    keys: list[bytes], *, removed: bool = False, tier: int = NVME_TIER
) -> tuple[int, TierEvent]:
    """That a tier has these blocks now, or has them no more."""
    kind = EventKind.REMOVED if removed else EventKind.STORED
    return tier, TierEvent(kind, MEDIA[tier], tuple(BlockKey(key) for key in keys))


def events_with(
    room: int, *, by_tier: bool = False, holders: Callable[[bytes], list[int]] = lambda _: []
) -> Any:
    """Room for the content of so many chunks."""
    from kvtier.vllm.events import DescribedEvents, place_of

    return DescribedEvents(
        lambda key, _: BlockKey(key),
        holders,
        {0: ("full_attention", None)},
        [place_of(each, by_tier=by_tier) for each in MEDIA],
        bytes_max=1200 * room,
    )
