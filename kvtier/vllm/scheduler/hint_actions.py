"""What may be said with a request about the use of its blocks, and what of that is understood.

Hints are actions with a type, a version and a payload, as routers send them (`kv_hints`). The same
can be said in `kv_transfer_params`. Both are of others' making: whatever they hold, it ends in some
of the three things here, or is ignored and counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvtier.core.retained.retained_blocks import NO_SESSION, SESSION_CHARS_MAX, is_session

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


Wish = Retain | LetGo | Release | Prefetch


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


def _retain(payload: Mapping[str, Any]) -> Iterable[Wish]:
    said = msgspec.convert(payload, _Retain, strict=True)
    session = _session(said.scope, said.session_id)
    if said.directives is None:
        if said.ttl_seconds is None or not said.include_current_request:
            raise _NotUnderstood("it says neither directives nor ttl_seconds for this request")
        return [Retain(session, _seconds(said.ttl_seconds))]
    if len(said.directives) > DIRECTIVES_MAX:
        raise _NotUnderstood(f"more than {DIRECTIVES_MAX} directives")
    return [_of_range(session, each) for each in said.directives]


def _of_range(session: str, said: _Directive) -> Wish:
    """A prefix is of use from its head on: what covers the output alone covers all before it."""
    start, stop = (0, None) if said.covers_output else (said.start, said.end)
    if start < 0 or not 0 <= said.priority <= 100 or (stop is not None and stop <= start):
        raise _NotUnderstood("a range of tokens begins at 0 or later; a priority is 0 to 100")
    if not said.priority:
        return LetGo(session, start, stop)
    return Retain(session, _seconds(said.duration), start, stop)


def _release(payload: Mapping[str, Any]) -> Iterable[Wish]:
    said = msgspec.convert(payload, _Session, strict=True)
    return [Release(_session(said.scope, said.session_id), said.include_current_request)]


def _prefetch(payload: Mapping[str, Any]) -> Iterable[Wish]:
    said = msgspec.convert(payload, _Session, strict=True)
    return [Prefetch(_session(said.scope, said.session_id))]


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[Wish]]] = {
    "kv.retain": _retain,
    "kv.prefetch": _prefetch,
    "kv.release": _release,
    "kv.evict": _release,
    "kv.deref": _release,
}
"""Of version 1, as vLLM's own drafts, Dynamo and SGLang have them."""
_VERSION = "1"


def _of_parameters(said: object) -> Iterable[Wish]:
    if not isinstance(said, Mapping):
        return []
    try:
        parameters = msgspec.convert(dict(said), _Parameters, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise _NotUnderstood(str(error)) from None
    session, seconds = _session(parameters.session), _seconds(parameters.retain_s)
    wishes: list[Wish] = []
    if parameters.prefetch:
        wishes.append(Prefetch(session))
    if parameters.release:
        wishes.append(Release(session))
    elif seconds is not None or session != NO_SESSION:
        wishes.append(Retain(session, seconds))
    return wishes


class Understanding:
    """Reads what is said; counts what it does not understand, and logs each kind of it once."""

    def __init__(self) -> None:
        self.ignored = {UNKNOWN: 0, MALFORMED: 0}
        self._said: set[str] = set()

    def wishes(self, parameters: object, actions: Iterable[Action]) -> list[Wish]:
        """All that is wished for with one request."""
        found: list[Wish] = []
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

    def _of(self, action: Action) -> Iterable[Wish]:
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
