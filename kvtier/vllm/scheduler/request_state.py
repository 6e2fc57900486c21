"""What the scheduler's side knows of each of the engine's requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier.core.costs.chunk_spans import (
    Shape,
    Span,
    kept_within,
    last_stop,
    whole,
    windowed,
    woven,
)
from kvtier.core.costs.hit_decision import Decision
from kvtier.types import GROUP_BYTES, BlockKey
from kvtier.vllm.identity.prompts import salted


class Column(NamedTuple):
    """A request's keys of one cache group, in the order of its tokens."""

    group: int
    asked: list[bytes]
    """As vLLM knows them."""
    known: list[BlockKey]
    """As the tiers know them."""


class Shortage(NamedTuple):
    """The room that there was for a load when its request was told to wait for more."""

    asked: tuple[int, int]
    end: int
    """Where the hit would end that it waits for."""
    spare: Sequence[int]
    taken: Sequence[int]
    """What of it was promised to the request all the same: nobody who asks later is to have it."""


class Joined(NamedTuple):
    """What a request asked for when it was put off for a block that is loaded for another."""

    asked: tuple[int, int]
    key: bytes
    """The block, as vLLM knows it."""
    taken: Sequence[int]
    """The room that was promised to the request."""


class Expected(msgspec.Struct):
    """Of a request whose prompt another engine has computed, until all of that is in a tier, or is
    not waited for any more."""

    since: float
    until: float = 0.0
    lacking: BlockKey | None = None
    """The last block of those that it waits for: until that has come, no other is asked for."""


class RequestState(msgspec.Struct):
    """What is known of one of the engine's requests."""

    salt: bytes = b""
    """Mixed into its keys, if not empty: what vLLM's own hash leaves out."""
    kept: bool = True
    """Whether its keys say all that its blocks depend on: else nothing of it is kept."""
    identified: bool = True
    """Whether the salt is known: until then nothing is found for it, nor kept of it."""
    refused: bool = False
    """It is offered nothing: its keys do not tell enough, or a load has failed."""
    touched: bool = False
    """The tiers know that its blocks were asked for: they count it once a request."""
    start: int = 0
    limit: int = sys.maxsize
    """The tokens between which the engine asks for a hit."""
    hits: set[bytes] | None = None
    """The answer to all questions of this step; None until the first."""
    junction: int = 0
    """The token at which this prompt goes on otherwise than one that was stored, if what a hit
    there would take is not kept."""
    columns: list[Column] = []
    ends: dict[BlockKey, tuple[int, bool]] = {}
    """Where the prompt stands after each of its blocks, and whether that is of a window; if it has
    several columns."""
    positions: int = -1
    """How many positions of keys `columns` was made of."""
    decision: Decision = msgspec.field(default_factory=Decision)
    waits: bool = False
    """It is told to ask again: host memory has no room for its load, and will have; or blocks that
    it had better load are on their way."""
    waits_since: float | None = None
    shortage: Shortage | None = None
    """Of room, where it waits for that."""
    spare: Sequence[int] = ()
    """The room that there was when it was looked up last."""
    joined: Joined | None = None
    """Where vLLM puts it off, though it is told of hits."""
    expected: Expected | None = None
    sources: Mapping[bytes, int] = {}
    """The tiers that the blocks of its load come from."""

    @property
    def asked(self) -> tuple[int, int]:
        """Between which tokens the engine asks for a hit."""
        return self.start, self.limit

    def identify(self, salt: bytes | None) -> None:
        """Its salt is known now; None if nobody knows it."""
        self.identified, self.positions = True, -1
        self.salt, self.refused = salt or b"", salt is None
        self.kept = self.kept and salt is not None

    def known_as(self, keys: Sequence[bytes], epoch: bytes) -> list[BlockKey]:
        """The keys as the tiers know them: with the request's salt and the epoch in them."""
        return salted(keys, epoch + self.salt)

    def arrange(self, shapes: Mapping[int, Shape], ends: Mapping[bytes, int], epoch: bytes) -> None:
        """Sort its keys by group. What ends within a chunk is not kept here."""
        if len(ends) == self.positions:
            return
        self.positions = len(ends)
        asked: dict[bytes, list[bytes]] = {}
        tokens = {}
        for group, shape in shapes.items():
            suffix = group.to_bytes(GROUP_BYTES, "big")
            asked[suffix], tokens[suffix] = [], shape.tokens
        for key, end in ends.items():
            suffix = key[-GROUP_BYTES:]
            mine = asked.get(suffix)
            if mine is not None and end == (len(mine) + 1) * tokens[suffix]:
                mine.append(key)
        self.columns = [
            Column(group, keys, self.known_as(keys, epoch))
            for group, keys in zip(shapes, asked.values(), strict=True)
        ]
        self.ends = {}
        if len(self.columns) > 1:
            for group, _, known in self.columns:
                tokens_each, window, _ = shapes[group]
                for at, key in enumerate(known, 1):
                    self.ends[key] = (at * tokens_each, window is not None)

    def spans(self, shapes: Mapping[int, Shape], sizes: Sequence[int]) -> list[Span]:
        """Its keys and how they are kept, group by group."""
        return [Span(shapes[group], known, sizes[group]) for group, _, known in self.columns]

    def is_prefix(self, shapes: Mapping[int, Shape]) -> bool:
        """Whether its blocks are of one kind, each of use where all before it are there."""
        return len(self.columns) == 1 and shapes[self.columns[0].group].window is None

    def uses(
        self,
        shapes: Mapping[int, Shape],
        sizes: Sequence[int],
        locate: Callable[[Sequence[BlockKey]], list[int]],
    ) -> list[BlockKey]:
        """What a prompt uses: of windows and states only what it finds, and what it will keep."""
        if self.is_prefix(shapes):
            return self.columns[0].known
        spans = self.spans(shapes, sizes)
        found = self.decision.stops[-1] if self.decision.stops else 0
        if not found and self.start:  # the engine itself has all there is of it
            lesser = windowed(spans)
            places = [locate(span.keys) for span in lesser]
            found = kept_within(lesser, places, self.start) if lesser else 0
        return woven(spans, {found, self.junction, whole(spans)} - {0})

    def end(self, shapes: Mapping[int, Shape]) -> int:
        """Where the last of its chunks ends."""
        return max(len(known) * shapes[group].tokens for group, _, known in self.columns)

    def furthest(self, shapes: Mapping[int, Shape]) -> tuple[dict[BlockKey, int], int]:
        """The keys of the longest hit that there could be, with the token at which each block
        begins, in the order of these; and the token at which the hit would end."""
        spans = [Span(shapes[group], known, 0) for group, _, known in self.columns]
        windows = [span.shape for span in spans if span.shape.window is not None]
        # The engine keeps windows so that the prompt's last token can be computed with them.
        limit = self.limit - (bool(windows) and not any(shape.recurrent for shape in windows))
        stop = last_stop(spans, limit)
        needed = sorted(
            (at * span.shape.tokens, span.keys[at])
            for span in spans
            for at in span.needed(self.start, stop)
        )
        return {key: begin for begin, key in needed}, stop

    def shared(self, shapes: Mapping[int, Shape], loading: Collection[bytes]) -> bytes | None:
        """A block of its hits that is being loaded for another. Of windows, of which a hit takes
        the ends alone, it need not be one of its load."""
        hits: Collection[bytes] = (self.hits if loading else None) or ()
        for group, asked, _ in self.columns if hits else ():
            tokens, window, _ = shapes[group]
            for key in asked[self.start // tokens :] if window is None else ():
                if key in loading and key in hits:
                    return key
        return None

    def hangs_on(
        self, shapes: Mapping[int, Shape], wanted: list[BlockKey], lower: Container[BlockKey]
    ) -> tuple[int, int]:
        """From which to which token is to be computed if nothing comes from lower tiers."""
        if not self.is_prefix(shapes):
            ends = (self.ends[key][0] for key in wanted if key in self.ends)
            return self.start, max(ends, default=self.start)
        tokens = shapes[self.columns[0].group].tokens
        first = self.start // tokens
        there = next((at for at, key in enumerate(wanted) if key in lower), 0)
        return (first + there) * tokens, (first + len(wanted)) * tokens

    def as_it_grows(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Blocks of several groups in the order of their tokens: tiers take them for one prefix."""
        last = (sys.maxsize, False)
        return sorted(keys, key=lambda key: self.ends.get(key, last)) if self.ends else keys
