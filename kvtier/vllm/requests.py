"""The engine's requests: the phase that each is in, its keys, and what is known of its hit."""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier.chain.hits import Decision, Shape, Span, kept_within, last_stop, whole, windowed, woven
from kvtier.chain.queries import Query
from kvtier.types import GROUP_BYTES, BlockKey
from kvtier.vllm.identity.prompts import salted


class Phase(enum.StrEnum):
    """Where a request stands. One that has ended has no state any more."""

    QUEUED = "queued"
    """In the engine's queue, and not asked about yet."""
    LOOKED_UP = "looked up"
    """The engine has asked what of it can be loaded, and is about to schedule it."""
    NO_ROOM = "deferred for room"
    """Others hold the room that its load takes."""
    OTHERS_LOAD = "deferred for a load"
    """Blocks of its own are being copied, or loaded for another."""
    HANDOVER = "deferred for a hand-over"
    """What another engine has computed is not in a tier yet, or a tier has still to find out."""
    LOADING = "loading"
    COMPUTING = "computing"


class Event(enum.Enum):
    """What moves a request from phase to phase."""

    ASKED = "the engine asks what of it can be loaded"
    LACKS_ROOM = "it is told to ask again: its load lacks room"
    EXPECTED = "it is told to ask again: what another engine has computed may come"
    PUT_OFF = "vLLM will ask again in a later step"
    LOADS = "it has its blocks, and is loaded"
    COMPUTES = "it has its blocks, and is computed"


TRANSITIONS: Mapping[Event, Mapping[Phase, Phase]] = {
    Event.ASKED: dict.fromkeys(Phase, Phase.LOOKED_UP),
    Event.LACKS_ROOM: {Phase.LOOKED_UP: Phase.NO_ROOM},
    Event.EXPECTED: {Phase.LOOKED_UP: Phase.HANDOVER},
    Event.PUT_OFF: {Phase.LOOKED_UP: Phase.OTHERS_LOAD},
    Event.LOADS: dict.fromkeys(Phase, Phase.LOADING),
    Event.COMPUTES: dict.fromkeys(Phase, Phase.COMPUTING),
}
"""A request stays in its phase at an event that has no entry for it."""

WAITING = (Phase.QUEUED, Phase.LOOKED_UP, Phase.NO_ROOM)
"""The phases in which a request waits for the engine, be it for its time or for its blocks."""


class Column(NamedTuple):
    """A request's keys of one cache group, in the order of its tokens."""

    group: int
    asked: list[bytes]
    """As vLLM knows them."""
    known: list[BlockKey]
    """As the tiers know them."""


class RoomDeferral(NamedTuple):
    """The room that there was for a load when its request was told to wait for more."""

    asked: tuple[int, int]
    end: int
    """Where the hit would end that it waits for."""
    spare: Sequence[int]
    taken: Sequence[int]
    """What of it was reserved for the request all the same: nobody who asks later is to have it."""


class LoadDeferral(NamedTuple):
    """What a request asked for when vLLM put it off for a block that is loaded for another."""

    asked: tuple[int, int]
    key: bytes
    """The block, as vLLM knows it."""
    taken: Sequence[int]
    """The room that was reserved for the request."""


class QueryDeferral(NamedTuple):
    """Of a request about whose blocks media were asked, until they have answered, or until then."""

    until: float


class HandoverDeferral(msgspec.Struct):
    """Of a request whose prompt another engine has computed, until all of that is in a tier, or is
    not waited for any more."""

    since: float
    until: float = 0.0
    doubt: int = 0
    """It waits for one of so many parts of the time that computing takes; 0 until it begins."""
    lacking: BlockKey | None = None
    """The last block of those that it waits for: until that has come, no other is asked for."""
    wanted: Sequence[BlockKey] = ()
    query: Query | None = None
    """What media were asked last for these: it is for them to find out."""


Deferral = RoomDeferral | LoadDeferral | QueryDeferral | HandoverDeferral


class RequestState(msgspec.Struct):
    """What is known of one of the engine's requests."""

    phase: Phase = Phase.QUEUED
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
    deferral: Deferral | None = None
    """Why it has to ask again, as it was told last."""
    deferred_since: float | None = None
    spare: Sequence[int] = ()
    """The room that there was when it was looked up last."""
    scarce: bool = False
    """When the engine asked about it last, it might have lacked the blocks for it."""
    short: bool = False
    """It was not scheduled at once, and that may have been why."""
    expected: HandoverDeferral | None = None
    """Another engine has computed its prompt, and not all of that is in a tier yet."""
    query: Query | None = None
    """What media that alone know what they hold were asked for it."""
    sources: Mapping[bytes, int] = {}
    """The tiers that the blocks of its load come from."""
    explained: bool = False
    """It was told once why not all of its prompt was found."""

    @property
    def asked(self) -> tuple[int, int]:
        """Between which tokens the engine asks for a hit."""
        return self.start, self.limit

    @property
    def looked_up(self) -> bool:
        """Whether the engine has asked for a hit at all."""
        return self.limit < sys.maxsize

    def identify(self, salt: bytes | None) -> None:
        """Its salt is known now; None if nobody knows it."""
        self.identified, self.positions = True, -1
        self.salt, self.refused = salt or b"", salt is None
        self.kept = self.kept and salt is not None

    @property
    def told_to_wait(self) -> bool:
        """Whether it is told to ask again, and not what there is."""
        return isinstance(self.deferral, RoomDeferral | QueryDeferral | HandoverDeferral)

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

    def stop(self, shapes: Mapping[int, Shape]) -> int:
        """The token at which the longest hit would end that there could be."""
        spans = [Span(shapes[group], known, 0) for group, _, known in self.columns]
        windows = [span.shape for span in spans if span.shape.window is not None]
        # The engine keeps windows so that the prompt's last token can be computed with them.
        limit = self.limit - (bool(windows) and not any(shape.recurrent for shape in windows))
        return last_stop(spans, limit)

    def is_windowed(self, key: BlockKey) -> bool:
        """Whether one of its blocks is of a group that keeps less than the whole prompt."""
        return key in self.ends and self.ends[key][1]

    def furthest(self, shapes: Mapping[int, Shape]) -> tuple[dict[BlockKey, int], int]:
        """The keys of the longest hit that there could be, with the token at which each block
        begins, in the order of these; and the token at which the hit would end."""
        spans = [Span(shapes[group], known, 0) for group, _, known in self.columns]
        stop = self.stop(shapes)
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


_REMEMBERED = 8


class Requests:
    """All requests of the engine, and how many of them are in each phase.

    vLLM asks about a request when it is about to schedule it. Those that a whole step leaves
    queued have come when the engine had more to compute than it could. Unless it was short of
    blocks: then it asks about a request, cannot schedule it, and asks again in the next step. A
    load holds blocks for as long as it takes, so it spares none of these. (Where there are blocks
    enough, something else stood in the way: what was left of a step was too little to begin with.)
    """

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._in_phase = dict.fromkeys(Phase, 0)
        self._short: deque[bool] = deque(maxlen=_REMEMBERED)
        """Of those scheduled last, whether the engine may have lacked the blocks for them."""
        self._short_now: set[str] = set()
        """Those that it may lack them for now."""
        self._left = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request: str) -> RequestState | None:
        """What is known of a request; None of one that was not added, or has ended."""
        return self._states.get(request)

    def of(self, request: str) -> RequestState:
        """What is known of a request. One that was not added, or has ended, is offered nothing, and
        nothing of it is kept: nobody knows its salt, and its end would never be told."""
        return self._states.get(request) or RequestState(kept=False, refused=True)

    def add(self, request: str, state: RequestState | None = None) -> None:
        """A request comes into the engine's queue."""
        self.remove(request)
        state = self._states[request] = state or RequestState()
        self._in_phase[state.phase] += 1

    def remove(self, request: str) -> None:
        """It has ended."""
        state = self._states.pop(request, None)
        if state is not None:
            self._in_phase[state.phase] -= 1
            self._short_now.discard(request)

    def on(self, event: Event, request: str) -> None:
        """This has happened to a request."""
        state = self._states.get(request)
        if state is not None:
            phase = TRANSITIONS[event].get(state.phase, state.phase)
            self._in_phase[state.phase] -= 1
            self._in_phase[phase] += 1
            state.phase = phase
            if phase is not Phase.LOOKED_UP:
                self._short_now.discard(request)

    def asked(self, request: str, scarce: bool = True) -> None:
        """The engine wants to schedule this one; `scarce` if it may lack the blocks."""
        state = self._states.get(request)
        if state is not None:
            again = state.phase is Phase.LOOKED_UP
            state.short = again and (state.short or state.scarce)
            state.scarce = scarce
            self.on(Event.ASKED, request)
            if state.short:
                self._short_now.add(request)

    def scheduled(self, request: str, *, loads: bool = False) -> None:
        """It has its blocks now."""
        state = self._states.get(request)
        if state is not None:
            if state.phase is Phase.LOOKED_UP:
                self._short.append(state.short)
            self.on(Event.LOADS if loads else Event.COMPUTES, request)

    def stepped(self) -> None:
        """All that the engine does in this step is settled."""
        self._left = self._in_phase[Phase.QUEUED]

    @property
    def anybody_waits(self) -> bool:
        """Whether anybody waits for the engine, be it for its time or for its blocks."""
        return any(self._in_phase[phase] for phase in WAITING)

    @property
    def short_of_room(self) -> bool:
        """Whether somebody is put off for want of room that others' loads hold."""
        return self._in_phase[Phase.NO_ROOM] > 0

    @property
    def behind(self) -> int:
        """How many wait for the engine's time behind the one that it asks about now."""
        if self._short_now or any(self._short):
            return 0
        return min(self._left, self._in_phase[Phase.QUEUED]) + self._in_phase[Phase.NO_ROOM]
