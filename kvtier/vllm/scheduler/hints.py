"""Does what hints ask for: keeps a request's blocks, lets a session's go, brings them up early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvtier.core.chain.plan import NOWHERE
from kvtier.core.chain.tier_chain import TierChain
from kvtier.core.costs.chunk_spans import Shape
from kvtier.core.retained.retained_blocks import NO_SESSION
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.scheduler.hint_actions import (
    Action,
    LetGo,
    Prefetch,
    Release,
    Retain,
    Understanding,
    Wish,
)
from kvtier.vllm.scheduler.request_state import RequestState

PREFETCHES_MAX = 64
BLOCKS_MAX = 4096
"""The most that is looked for at once, in a few milliseconds."""
AWAITED_S = 60.0
"""So long what was prefetched for a session waits for its next request."""
BEGINS_S = 5.0
"""And so long an engine that is idle otherwise goes on to bring it up."""
_NAMED = "hint "


class _Early(msgspec.Struct, eq=False):
    """A prefetch for a session."""

    request: str
    """The one that came with the hint: it does not use what is prefetched."""
    since: float


class Hints:
    """What requests have said, until they end; and prefetches for the sessions that they named."""

    def __init__(
        self,
        chain: TierChain,
        namespace: Namespace,
        requests: Mapping[str, RequestState],
        words: Callable[[], tuple[Mapping[int, Shape], bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests` are those that are there, and `words` the shapes of their cache groups and the
        epoch in their keys."""
        self._chain = chain
        self._group_bytes = namespace.group_bytes
        self._requests = requests
        self._words = words
        self._clock = clock
        self._understanding = Understanding()
        self._wishes: dict[str, list[Wish]] = {}
        self._early: dict[str, _Early] = {}

    @property
    def ignored(self) -> Mapping[str, int]:
        """How many hints were not understood, by why."""
        return self._understanding.ignored

    def said(self, request: str, parameters: object, actions: Iterable[Action]) -> None:
        """This came with a request that was just added."""
        wishes = self._understanding.wishes(parameters, actions)
        if not wishes:
            return
        self._wishes[request] = wishes
        for wish in wishes:
            if isinstance(wish, Prefetch) and wish.session != NO_SESSION:
                self._prefetch(request, wish.session)

    def any_of(self, request: str) -> bool:
        """Whether there is something to be done when this request ends."""
        return request in self._wishes

    # -- prefetches for sessions ---------------------------------------------------------------

    def _prefetch(self, request: str, session: str) -> None:
        prefetches = self._chain.prefetches
        keys = self._chain.retention.blocks_of(session)[:BLOCKS_MAX] if prefetches.on else []
        if keys and (session in self._early or len(self._early) < PREFETCHES_MAX):
            self._end_early(session, served=True)
            self._early[session] = _Early(request, self._clock())
            prefetches.want(_NAMED + session, keys)

    def _end_early(self, session: str, *, served: bool) -> None:
        if self._early.pop(session, None) is not None:
            self._chain.prefetches.end(_NAMED + session, served=served)

    def step(self) -> None:
        """Once a step: go on to bring up what sessions will ask for."""
        if not self._early:
            return
        now = self._clock()
        for session, early in list(self._early.items()):
            if now - early.since > AWAITED_S:
                self._end_early(session, served=False)
            elif not self._chain.prefetches.begin(_NAMED + session):
                return  # there is no room for others either

    @property
    def pending(self) -> bool:
        """Whether steps are needed although no request is scheduled."""
        if self._chain.retention.unwritten:
            return True
        if not (self._early and self._chain.prefetches.busy):
            return False
        return self._clock() - max(each.since for each in self._early.values()) < BEGINS_S

    # -- the end of a request --------------------------------------------------------------------

    def ended(self, request: str, ends: Mapping[bytes, int], prompt: int) -> None:
        """A request ends, and has these keys: what it wished for begins now. What was generated
        after so many tokens of its `prompt` counts as far as it was stored."""
        wishes = self._wishes.pop(request, None)
        if not wishes:
            return
        used: list[tuple[BlockKey, int]] = []
        state, (shapes, epoch) = self._requests.get(request), self._words()
        if state is not None and state.kept and not state.refused:
            state.arrange(shapes, ends, epoch)
            used = self._stored(self._used(state, shapes), prompt)
        retention = self._chain.retention
        for wish in wishes:
            if isinstance(wish, Retain):
                retention.retain(_between(used, wish), wish.session, wish.seconds)
            elif isinstance(wish, LetGo):
                retention.release(wish.session, _between(used, wish), all=False)
            elif isinstance(wish, Release):
                own = [key for key, _ in used] if wish.own else []
                retention.release(wish.session, own, all=wish.session != NO_SESSION)
            session = wish.session
            if session in self._early and self._early[session].request != request:
                self._end_early(session, served=True)

    def _used(self, state: RequestState, shapes: Mapping[int, Shape]) -> list[tuple[BlockKey, int]]:
        """A request's blocks with the token after each, in the order in which they are needed."""
        if not state.columns:
            return []
        keys = state.uses(shapes, self._group_bytes, self._chain.locate)
        if state.is_prefix(shapes):
            tokens = shapes[state.columns[0].group].tokens
            return [(key, (at + 1) * tokens) for at, key in enumerate(keys)]
        return [(key, state.ends[key][0]) for key in keys]

    def _stored(self, used: list[tuple[BlockKey, int]], prompt: int) -> list[tuple[BlockKey, int]]:
        """These without what is behind the prompt and in no tier."""
        behind = [key for key, end in used if end > prompt]
        places = dict(zip(behind, self._chain.locate(behind), strict=True))
        return [(key, end) for key, end in used if places.get(key) != NOWHERE]

    def gone(self, request: str) -> None:
        """It has ended, whatever became of it."""
        self._wishes.pop(request, None)

    def forget(self) -> None:
        """All tiers are empty, and what requests have wished for is void."""
        for session in list(self._early):
            self._end_early(session, served=False)
        self._wishes.clear()


def _between(used: Sequence[tuple[BlockKey, int]], wish: Retain | LetGo) -> list[BlockKey]:
    """The blocks of which the last token lies in a range."""
    return [
        key for key, end in used if end > wish.start and (wish.stop is None or end <= wish.stop)
    ]
