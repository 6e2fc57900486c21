"""What clients say about the use of blocks, and what is done about it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvtier.chain.hits import Shape
from kvtier.chain.plan import NOWHERE
from kvtier.chain.tier_chain import TierChain
from kvtier.eviction.retention import NO_SESSION, SESSION_CHARS_MAX, is_session
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.requests import Requests, RequestState

PREFETCHES_MAX = 64
BLOCKS_MAX = 4096
"""The most that is looked for at once, in a few milliseconds."""
AWAITED_S = 60.0
"""So long what was prefetched for a session waits for its next request."""
BEGINS_S = 5.0
"""And so long an engine that is idle otherwise goes on to bring it up."""
_NAMED = "hint "


class _SessionPrefetch(msgspec.Struct, eq=False):
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
        requests: Requests,
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
        self._parser = HintParser()
        self.ignored: Mapping[str, int] = self._parser.ignored
        """How many hints were not understood, by why."""
        self._actions: dict[str, list[HintAction]] = {}
        self._early: dict[str, _SessionPrefetch] = {}

    def said(self, request: str, parameters: object, actions: Iterable[Action]) -> None:
        """This came with a request that was just added."""
        wanted = self._parser.parse(parameters, actions)
        if not wanted:
            return
        self._actions[request] = wanted
        for action in wanted:
            if isinstance(action, Prefetch) and action.session != NO_SESSION:
                self._prefetch(request, action.session)

    def any_of(self, request: str) -> bool:
        """Whether there is something to be done when this request ends."""
        return request in self._actions

    # -- prefetches for sessions ---------------------------------------------------------------

    def _prefetch(self, request: str, session: str) -> None:
        prefetches = self._chain.prefetches
        keys = self._chain.retention.blocks_of(session)[:BLOCKS_MAX] if prefetches.on else []
        if keys and (session in self._early or len(self._early) < PREFETCHES_MAX):
            self._end_early(session, served=True)
            self._early[session] = _SessionPrefetch(request, self._clock())
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
        wanted = self._actions.pop(request, None)
        if not wanted:
            return
        used: list[tuple[BlockKey, int]] = []
        state, (shapes, epoch) = self._requests.get(request), self._words()
        if state is not None and state.kept and not state.refused:
            state.arrange(shapes, ends, epoch)
            used = self._stored(self._used(state, shapes), prompt)
        retention = self._chain.retention
        for action in wanted:
            if isinstance(action, Retain):
                retention.retain(_between(used, action), action.session, action.seconds)
            elif isinstance(action, LetGo):
                retention.release(action.session, _between(used, action), all=False)
            elif isinstance(action, Release):
                own = [key for key, _ in used] if action.own else []
                retention.release(action.session, own, all=action.session != NO_SESSION)
            session = action.session
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
        self._actions.pop(request, None)

    def forget(self) -> None:
        """All tiers are empty, and what requests have wished for is void."""
        for session in list(self._early):
            self._end_early(session, served=False)
        self._actions.clear()


def _between(used: Sequence[tuple[BlockKey, int]], action: Retain | LetGo) -> list[BlockKey]:
    """The blocks of which the last token lies in a range."""
    return [
        key
        for key, end in used
        if end > action.start and (action.stop is None or end <= action.stop)
    ]


# What may be said with a request about the use of its blocks, and what of that is understood.
#
# Hints are actions with a type, a version and a payload, as routers send them (`kv_hints`). The
# same can be said in `kv_transfer_params`. Both are of others' making: whatever they hold, it ends
# in some of the three things here, or is ignored and counted.

logger = logging.getLogger(__name__)

ACTIONS_MAX = 64
DIRECTIVES_MAX = 128
UNKNOWN, MALFORMED = "unknown", "malformed"
_SAID_MAX = 64
_SHOWN = 64


class Action(NamedTuple):
    """One action of an envelope."""

    type: str
    version: str
    payload: Mapping[str, Any]


class Retain(NamedTuple):
    """Keep a request's blocks between two tokens, from its end on; all of them, without `stop`."""

    session: str
    seconds: float | None = None
    """None: until the session is over."""
    start: int = 0
    stop: int | None = None


class LetGo(NamedTuple):
    """A session needs a request's blocks between two tokens no more."""

    session: str
    start: int = 0
    stop: int | None = None


class Release(NamedTuple):
    """With this request a session is over; its own blocks may go, too, if it says so."""

    session: str
    own: bool = True


class Prefetch(NamedTuple):
    """What is retained for a session will be asked for soon; without one, this request's prompt,
    which is prefetched while it waits in any case."""

    session: str = NO_SESSION


HintAction = Retain | LetGo | Release | Prefetch


class _NotUnderstood(Exception):
    """With a reason for the log."""


# -- the payloads of actions ---------------------------------------------------------------------


class _Directive(msgspec.Struct, forbid_unknown_fields=True):
    priority: int
    start: int = 0
    end: int | None = None
    duration: float | None = None
    covers_output: bool = False


class _Retain(msgspec.Struct):
    """Two forms: ranges of tokens, or a time for all of the request."""

    scope: str | None = None
    session_id: str | None = None
    directives: list[_Directive] | None = None
    ttl_seconds: float | None = None
    include_current_request: bool = True


class _Session(msgspec.Struct):
    scope: str | None = None
    session_id: str | None = None
    include_current_request: bool = True


class _Parameters(msgspec.Struct):
    """What of `kv_transfer_params` is for us; the rest is for other connectors."""

    session: str | None = None
    retain_s: float | None = None
    release: bool = False
    prefetch: bool = False


def _session(*names: str | None) -> str:
    name = next((each for each in names if each is not None), NO_SESSION)
    if name != NO_SESSION and not is_session(name):
        raise _NotUnderstood(
            f"a session has 1 to {SESSION_CHARS_MAX} printable characters, and not kvtier: before"
        )
    return name


def _seconds(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise _NotUnderstood("a time is a number of seconds, 0 or more")
    return value


def _retain(payload: Mapping[str, Any]) -> Iterable[HintAction]:
    said = msgspec.convert(payload, _Retain, strict=True)
    session = _session(said.scope, said.session_id)
    if said.directives is None:
        if said.ttl_seconds is None or not said.include_current_request:
            raise _NotUnderstood("it says neither directives nor ttl_seconds for this request")
        return [Retain(session, _seconds(said.ttl_seconds))]
    if len(said.directives) > DIRECTIVES_MAX:
        raise _NotUnderstood(f"more than {DIRECTIVES_MAX} directives")
    return [_of_range(session, each) for each in said.directives]


def _of_range(session: str, said: _Directive) -> HintAction:
    """A prefix is of use from its head on: what covers the output alone covers all before it."""
    start, stop = (0, None) if said.covers_output else (said.start, said.end)
    if start < 0 or not 0 <= said.priority <= 100 or (stop is not None and stop <= start):
        raise _NotUnderstood("a range of tokens begins at 0 or later; a priority is 0 to 100")
    if not said.priority:
        return LetGo(session, start, stop)
    return Retain(session, _seconds(said.duration), start, stop)


def _release(payload: Mapping[str, Any]) -> Iterable[HintAction]:
    said = msgspec.convert(payload, _Session, strict=True)
    return [Release(_session(said.scope, said.session_id), said.include_current_request)]


def _prefetch(payload: Mapping[str, Any]) -> Iterable[HintAction]:
    said = msgspec.convert(payload, _Session, strict=True)
    return [Prefetch(_session(said.scope, said.session_id))]


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[HintAction]]] = {
    "kv.retain": _retain,
    "kv.prefetch": _prefetch,
    "kv.release": _release,
    "kv.evict": _release,
    "kv.deref": _release,
}
"""Of version 1, as vLLM's own drafts, Dynamo and SGLang have them."""
_VERSION = "1"


def _of_parameters(said: object) -> Iterable[HintAction]:
    if not isinstance(said, Mapping):
        return []
    try:
        parameters = msgspec.convert(dict(said), _Parameters, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise _NotUnderstood(str(error)) from None
    session, seconds = _session(parameters.session), _seconds(parameters.retain_s)
    wanted: list[HintAction] = []
    if parameters.prefetch:
        wanted.append(Prefetch(session))
    if parameters.release:
        wanted.append(Release(session))
    elif seconds is not None or session != NO_SESSION:
        wanted.append(Retain(session, seconds))
    return wanted


class HintParser:
    """Reads what is said; counts what it does not understand, and logs each kind of it once."""

    def __init__(self) -> None:
        self.ignored = {UNKNOWN: 0, MALFORMED: 0}
        self._said: set[str] = set()

    def parse(self, parameters: object, actions: Iterable[Action]) -> list[HintAction]:
        """All that is wished for with one request."""
        found: list[HintAction] = []
        try:
            found += _of_parameters(parameters)
        except _NotUnderstood as reason:
            self._ignore(MALFORMED, "kv_transfer_params", str(reason))
        for number, action in enumerate(actions):
            if number == ACTIONS_MAX:
                self._ignore(MALFORMED, "an envelope", f"more than {ACTIONS_MAX} actions")
                break
            found += self._of(action)
        return found

    def _of(self, action: Action) -> Iterable[HintAction]:
        read = _ACTIONS.get(action.type)
        name = f"{str(action.type)[:_SHOWN]} {str(action.version)[:_SHOWN]}"
        if read is None or str(action.version).partition(".")[0] != _VERSION:
            self._ignore(UNKNOWN, name, "no such action is known")
            return []
        try:
            return list(read(action.payload))
        except (_NotUnderstood, msgspec.ValidationError, TypeError) as reason:
            self._ignore(MALFORMED, name, str(reason))
            return []

    def _ignore(self, kind: str, what: str, reason: str) -> None:
        self.ignored[kind] += 1
        if what not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(what)
            logger.warning("a hint is ignored, and all others like it: %s: %s", what, reason[:200])
