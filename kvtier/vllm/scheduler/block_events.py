"""Events that say what is in the blocks they tell of: the hashes of vLLM's own blocks, their tokens
and the block before, as vLLM tells of blocks on its device. By them a router knows which server
has most of a prompt.

What is in a block is known while a request has it, and a tier may store or drop it long after: so
it is kept until all is told, within a bound. This stands in for vLLM's own tracker, which would
keep it for ever: that knows blocks by vLLM's keys, and tiers know those of adapters, and whatever
came after a reset, by others.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec

from kvtier.types import GROUP_BYTES, BlockKey, group_of
from kvtier.vllm.guard import guarded
from kvtier.vllm.hooks import interfaces
from kvtier.vllm.hooks.interfaces import (
    BlockRemoved,
    BlockStored,
    extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
)

KnownAs = Callable[[bytes, str], BlockKey]
"""The key by which the tiers know what vLLM knows by this one, of this request."""

_BYTES_MAX = 256 << 20
_UNTOLD_MAX = 1 << 14
"""A few tiers' queues: so many blocks may be on their way up at once."""
_BYTES_EACH = 700
"""What a description takes beside its hashes and tokens."""


class _Place(NamedTuple):
    """Where a tier has its blocks, as events say it."""

    medium: str
    locality: str | None
    ownership: str | None


class _Description(msgspec.Struct, gc=False):
    hashes: list[Any] = []
    """As events name them: bytes, or numbers."""
    parent: Any = None
    tokens: array[int] = array("i")
    block_tokens: int = 0
    adapter: tuple[int, str] | tuple[None, None] = (None, None)
    extra_keys: list[Any] | None = None
    places: list[_Place] = []
    """Where it is said to be."""

    @property
    def size(self) -> int:
        """In memory, about."""
        hashes = sum(getsizeof(each) + 8 for each in self.hashes)
        return _BYTES_EACH + hashes + self.tokens.itemsize * len(self.tokens)


class DescribedEvents:
    """What stored blocks hold, and the tiers' events in these words.

    `kinds` are the cache groups' as events name them: what they are of, and their window.
    """

    def __init__(
        self,
        known_as: KnownAs,
        kinds: Mapping[int, tuple[str | None, int | None]],
        bytes_max: int = _BYTES_MAX,
    ) -> None:
        self._known_as = known_as
        self._kinds = kinds
        self._bytes_max = bytes_max
        self._bytes = 0
        self._told: dict[BlockKey, _Description] = {}
        """Of blocks that are said to be somewhere, those used last at the end."""
        # Ordered, because a plain dict finds its oldest entry by passing all that were deleted.
        self._untold: OrderedDict[BlockKey, _Description] = OrderedDict()
        """Of blocks that are on their way into a tier, or gone from all of them."""

    def __len__(self) -> int:
        return len(self._told)

    # -- what vLLM's scheduler tells of requests -----------------------------------------------

    @guarded(lambda: None)
    def record_store(self, request: Any, group: Any, chunk: int, key: bytes) -> None:
        """A request's chunk is about to be stored."""
        if group.sliding_window_size_in_chunks is not None:
            return  # from a window's blocks nobody can tell how much of a prompt is there
        known = self._known_as(key, request.request_id)
        if (description := self._told.pop(known, None)) is not None:
            self._told[known] = description
        else:
            self._keep_untold(known, self._untold.get(known) or _describe(request, group, chunk))

    record_lookup = record_store
    """It was found: a tier above may take it in now."""

    def record_partial_store(self, *_: Any) -> None:
        """Chunks are stored whole (`cache_groups.correct_groups`)."""

    record_partial_lookup = record_partial_store

    def reset(self) -> None:
        """What was told is taken back when the tiers say that it is gone."""

    def _keep_untold(self, key: BlockKey, description: _Description) -> None:
        self._untold.pop(key, None)
        self._untold[key] = description
        if len(self._untold) > _UNTOLD_MAX:
            self._untold.popitem(last=False)

    # -- what tiers tell -----------------------------------------------------------------------

    @guarded(list)
    def take_events(self, events: Iterable[Any]) -> list[Any]:
        """The tiers' events, as vLLM publishes them."""
        told: list[Any] = []
        for event in events:
            locality = event.locality.value if event.locality is not None else None
            place = _Place(event.medium.value, locality, event.ownership)
            tell = self._gone if event.removed else self._come
            told += [tell(key, place) for key in event.keys]
        while self._bytes > self._bytes_max:
            told += self._take_back_oldest()
        return told

    def _come(self, key: BlockKey, place: _Place) -> Any:
        description = self._told.get(key)
        if description is None:
            description = self._untold.pop(key, None)
            if description is None:  # of a window, say, or of another engine
                return self._stored(_Description(_names(key)), key, place)
            self._told[key] = description
            self._bytes += description.size
        description.places.append(place)
        return self._stored(description, key, place)

    def _gone(self, key: BlockKey, place: _Place) -> Any:
        description = self._told.get(key)
        if description is None or place not in description.places:
            return _removed(_names(key), key, place)
        description.places.remove(place)
        if not description.places:
            self._forget(key)
            self._keep_untold(key, description)  # a tier below tells after one above
        return _removed(description.hashes, key, place)

    def _take_back_oldest(self) -> list[Any]:
        """What was told of a block, while it is known what that was."""
        key = next(iter(self._told))
        description = self._forget(key)
        return [_removed(description.hashes, key, place) for place in description.places]

    def _forget(self, key: BlockKey) -> _Description:
        description = self._told.pop(key)
        self._bytes -= description.size
        return description

    def _stored(self, description: _Description, key: BlockKey, place: _Place) -> Any:
        group = group_of(key)
        kind, window = self._kinds.get(group, (None, None))
        adapter_id, adapter = description.adapter
        return BlockStored(
            block_hashes=description.hashes,
            parent_block_hash=description.parent,
            token_ids=description.tokens.tolist(),
            block_size=description.block_tokens,
            lora_id=adapter_id,
            lora_name=adapter,
            extra_keys=description.extra_keys,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **place._asdict(),
        )


def _removed(hashes: list[Any], key: BlockKey, place: _Place) -> Any:
    return BlockRemoved(block_hashes=hashes, group_idx=group_of(key), **place._asdict())


def _names(key: BlockKey) -> list[Any]:
    """What is known of a block without a description: the hash in its key."""
    return [maybe_convert_block_hash(key[:-GROUP_BYTES])]


def _describe(request: Any, group: Any, chunk: int) -> _Description:
    per_chunk, tokens = group.hashes_per_chunk, group.tokens_per_chunk
    first, start = chunk * per_chunk, chunk * tokens
    adapter = request.lora_request
    block = group.tokens_per_block
    hashes = request.block_hashes[first : first + per_chunk]
    blocks = resolve_block_hashes(hashes, tokens // per_chunk, block)
    return _Description(
        hashes=[maybe_convert_block_hash(each) for each in blocks],
        parent=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
        tokens=array("i", request.all_token_ids[start : start + tokens]),
        block_tokens=block,
        adapter=(None, None) if adapter is None else (adapter.adapter_id, adapter.name),
        extra_keys=extra_keys(request, start, start + tokens, block),
    )


_LOCALITY = {"nvme": interfaces.Locality.LOCAL, "object": interfaces.Locality.REMOTE}


def events_of(events: Iterable[Any]) -> list[Any]:
    """The chain's events in vLLM's words."""
    told = []
    for event in events:
        memory = event.medium in ("cpu", "memory")
        told.append(
            interfaces.OffloadingEvent(
                keys=list(event.keys),
                medium=interfaces.Medium.CPU if memory else interfaces.Medium.STORAGE,
                removed=event.kind.value == "removed",
                locality=_LOCALITY.get(event.medium),
                ownership=None if memory else event.medium,
            )
        )
    return told
