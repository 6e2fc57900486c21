"""Events by which a router knows which server has most of a prompt: where blocks are, and what is
in them (the hashes of vLLM's own blocks, their tokens, the block before), in the words of vLLM's
own events of blocks on its device.

A tier stores or drops a block long after the request that knew its content: so the content is kept
until all is told, within a bound. This stands in for vLLM's own tracker, which would keep it for
ever: that one knows blocks by vLLM's keys, and tiers know those of adapters, and all that came
after a reset, by others.

Some routers count how often a block was announced, others do not. For both, a block is announced
once for a place, with the first tier there that has it, and taken back once, with the last one.
That holds for a block of several chunks, too, whose prompts part within a chunk.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec

from kvtier.guard import guarded
from kvtier.types import BlockKey, EventKind, TierEvent, group_of
from kvtier.vllm.hooks.interfaces import (
    BlockRemoved,
    BlockStored,
    extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
)

KnownAs = Callable[[bytes, str], BlockKey]
"""The key by which the tiers know what vLLM knows by this one, of this request."""
Holders = Callable[[BlockKey], Collection[int]]
"""The tiers that have a block now, by their numbers."""

_BYTES_MAX = 256 << 20
_UNTOLD_MAX = 1 << 14
"""A few tiers' queues: so many blocks may be on their way up at once."""
_FOUND_AT_ONCE = 64
"""Blocks that are looked for in all tiers in one step, in about as many times ten microseconds."""
_BYTES_EACH = 700
"""What a description takes beside its hashes and tokens."""
_BYTES_A_HASH = 110
"""With its entry among the announced ones."""


class EventPlace(NamedTuple):
    """Where blocks are, as events say it."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


def place_of(medium: str, *, by_tier: bool) -> EventPlace:
    """How events name a tier's place. All routers read the medium; with more than that (`by_tier`)
    Dynamo drops the event, and llm-d's recovery by snapshots refuses it."""
    if medium in ("cpu", "memory"):
        return EventPlace("CPU")
    if not by_tier:
        return EventPlace("STORAGE")
    return EventPlace("STORAGE", {"nvme": "LOCAL", "object": "REMOTE"}.get(medium), medium)


class _Description(msgspec.Struct, gc=False):
    hashes: list[Any] = []
    """As events name them: bytes, or numbers."""
    parent: Any = None
    tokens: array[int] = array("i")
    block_tokens: int = 0
    adapter: tuple[int, str] | tuple[None, None] = (None, None)
    extra_keys: list[Any] | None = None
    tiers: list[int] = []
    """Where it is said to be."""

    @property
    def size(self) -> int:
        """In memory, about."""
        hashes = sum(getsizeof(each) + _BYTES_A_HASH for each in self.hashes)
        return _BYTES_EACH + hashes + self.tokens.itemsize * len(self.tokens)


class DescribedEvents:
    """What stored blocks hold, and the tiers' events in these words.

    `kinds` are the cache groups' as events name them: what they are of, and their window. `places`
    are the tiers', by their numbers. What nobody can describe is not announced: blocks of windows,
    by which nobody can tell how much of a prompt is there; and those that an earlier engine has
    left, or another one has stored, until a request finds them.
    """

    def __init__(
        self,
        known_as: KnownAs,
        holders: Holders,
        kinds: Mapping[int, tuple[str | None, int | None]],
        places: Sequence[EventPlace],
        bytes_max: int = _BYTES_MAX,
    ) -> None:
        self._known_as, self._holders = known_as, holders
        self._kinds, self._places = kinds, places
        self._bytes_max = bytes_max
        self._bytes = 0
        self._told: dict[BlockKey, _Description] = {}
        """Of blocks that are said to be somewhere, those used last at the end."""
        # Ordered, because a plain dict finds its oldest entry by passing all that were deleted.
        self._untold: OrderedDict[BlockKey, _Description] = OrderedDict()
        """Of blocks that are on their way into a tier, or gone from all of them."""
        self._found: dict[BlockKey, None] = {}
        """Described blocks that tiers may have had before, to be looked for."""
        self._announced: dict[tuple[EventPlace, int], dict[Any, int]] = {}
        """In how many chunks each of vLLM's blocks is that was announced, by place and group."""
        self._taken_back: list[Any] = []
        """Events to be told before all others."""

    def __len__(self) -> int:
        return len(self._told)

    # -- what vLLM's scheduler tells of requests -----------------------------------------------

    @guarded(lambda: None)
    def record_store(self, request: Any, group: Any, chunk: int, key: bytes) -> None:
        """A request's chunk is about to be stored."""
        if group.sliding_window_size_in_chunks is not None:
            return
        known = self._known_as(key, request.request_id)
        if (description := self._told.pop(known, None)) is not None:
            self._told[known] = description
        else:
            self._keep_untold(known, self._untold.get(known) or _describe(request, group, chunk))
            self._found[known] = None

    record_lookup = record_store
    """It was found: a tier above may take it in now."""

    def record_partial_store(self, *_: Any) -> None:
        """Chunks are stored whole (`cache_groups.correct_groups`)."""

    record_partial_lookup = record_partial_store

    def reset(self) -> None:
        """What was told is taken back when the tiers say that it is gone."""

    @guarded(lambda: None)
    def announce_again(self) -> None:
        """vLLM told that its own cache is empty, which routers take for all tiers': tell them anew,
        some in each step."""
        for (place, group), hashes in self._announced.items():
            if hashes:
                self._taken_back.append(_removed(list(hashes), group, place))
        self._announced = {}
        for description in self._told.values():
            description.tiers = []
        self._found.update(dict.fromkeys(self._told))

    def _keep_untold(self, key: BlockKey, description: _Description) -> None:
        self._untold.pop(key, None)
        self._untold[key] = description
        if len(self._untold) > _UNTOLD_MAX:
            oldest, _ = self._untold.popitem(last=False)
            self._found.pop(oldest, None)

    # -- what tiers tell -----------------------------------------------------------------------

    @guarded(list)
    def take_events(self, events: Iterable[tuple[int, TierEvent]]) -> list[Any]:
        """The tiers' events, each with its tier's number, as vLLM publishes them."""
        told, self._taken_back = self._taken_back, []
        for tier, event in events:
            tell = self._left if event.kind is EventKind.REMOVED else self._entered
            for key in event.keys:
                told += tell(key, tier)
        for key in list(islice(self._found, _FOUND_AT_ONCE)):
            del self._found[key]
            told += self._look_for(key)
        while self._bytes > self._bytes_max:
            told += self._take_back_oldest()
        return told

    def _look_for(self, key: BlockKey) -> Iterator[Any]:
        if key in self._told or key in self._untold:
            for tier in self._holders(key):
                yield from self._entered(key, tier)
        if key in self._told and not self._told[key].tiers:
            self._keep_untold(key, self._forget(key))

    def _entered(self, key: BlockKey, tier: int) -> Iterator[Any]:
        """A tier has this block."""
        description = self._told.get(key)
        if description is None:
            description = self._untold.pop(key, None)
            if description is None:
                return
            self._told[key] = description
            self._bytes += description.size
        if tier in description.tiers:
            return
        seen = self._is_at(description, tier)
        description.tiers.append(tier)
        if not seen:
            yield from self._announce(key, description, self._places[tier])

    def _left(self, key: BlockKey, tier: int) -> Iterator[Any]:
        """A tier has this block no more."""
        description = self._told.get(key)
        if description is None or tier not in description.tiers:
            return
        description.tiers.remove(tier)
        if not self._is_at(description, tier):
            yield from self._take_back(key, description, self._places[tier])
        if not description.tiers:
            self._keep_untold(key, self._forget(key))  # a tier below tells after one above

    def _is_at(self, description: _Description, tier: int) -> bool:
        """Whether it is said to be in the place of this tier."""
        return any(self._places[each] == self._places[tier] for each in description.tiers)

    def _take_back_oldest(self) -> Iterator[Any]:
        """What was told of a block, while it is known what that was."""
        key = next(iter(self._told))
        description = self._forget(key)
        for place in dict.fromkeys(self._places[tier] for tier in description.tiers):
            yield from self._take_back(key, description, place)

    def _forget(self, key: BlockKey) -> _Description:
        description = self._told.pop(key)
        self._bytes -= description.size
        return description

    # -- what routers are told -----------------------------------------------------------------

    def _announce(
        self, key: BlockKey, description: _Description, place: EventPlace
    ) -> Iterator[Any]:
        """Tell of those blocks of a chunk of which nothing was told: the last ones, because each
        hash covers all that comes before it."""
        group = group_of(key)
        chunks = self._announced.setdefault((place, group), {})
        hashes, tokens = description.hashes, description.block_tokens
        known = sum(each in chunks for each in hashes)
        for each in hashes:
            chunks[each] = chunks.get(each, 0) + 1
        if known == len(hashes):
            return
        kind, window = self._kinds.get(group, (None, None))
        adapter_id, adapter = description.adapter
        extra = description.extra_keys
        yield BlockStored(
            block_hashes=hashes[known:],
            parent_block_hash=hashes[known - 1] if known else description.parent,
            token_ids=description.tokens[known * tokens :].tolist(),
            block_size=tokens,
            lora_id=adapter_id,
            lora_name=adapter,
            extra_keys=extra and extra[known:],
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **place._asdict(),
        )

    def _take_back(
        self, key: BlockKey, description: _Description, place: EventPlace
    ) -> Iterator[Any]:
        """Tell that those blocks of a chunk are gone that no other chunk has there."""
        group = group_of(key)
        chunks = self._announced.get((place, group), {})
        gone = []
        for each in description.hashes:
            chunks[each] -= 1
            if not chunks[each]:
                del chunks[each]
                gone.append(each)
        if gone:
            yield _removed(gone, group, place)


def _removed(hashes: list[Any], group: int, place: EventPlace) -> Any:
    return BlockRemoved(block_hashes=hashes, group_idx=group, **place._asdict())


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
