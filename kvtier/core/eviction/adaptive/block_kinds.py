"""The kinds of block that the adaptive policy tells apart: what a request shows of its future.

Each slot carries a mark of one byte. Below SHARED it says how often its conversation has come back
(its turn), from there on it says that several requests went different ways after this block, and
how many used it since.
"""

from __future__ import annotations

import msgspec

SHARED = 128
MARK_MAX = 255
TURN_MAX = SHARED - 1

_LENGTHS = 8
_FRESH = 0
_FORKED = _FRESH + _LENGTHS
_RETURNED = _FORKED + 1
_TURN_LEVELS = 6
_PAUSES = 3
"""So many lengths are told apart of the pause before a turn: up to 4 s, to 24 s, more."""
_SHORTEST_PAUSE_S = 4.0
_PAUSE_STEP = 6.0
_GREW = _RETURNED + _TURN_LEVELS * _PAUSES
_ADDED = _GREW + _PAUSES - _RETURNED
"""What a turn adds is of a kind of its own, so far behind that of what it came back to."""
RESTORED = _RETURNED + 2 * _ADDED
POOLED = RESTORED + 1
_SHARE_LEVELS = 7
KINDS = POOLED + _SHARE_LEVELS
SUPERSEDED = KINDS
"""What a conversation left behind when its next turn wrote its last block anew: worth nothing."""

GROUPS = (*[1] * _RETURNED, *[_PAUSES] * (2 * (_TURN_LEVELS + 1)), 1)
"""The kinds below POOLED in groups: turns that differ only in the pause before are together."""
HEADS = slice(_RETURNED, _RETURNED + _ADDED)
TAILS = slice(_RETURNED + _ADDED, _RETURNED + 2 * _ADDED)

NEAR_TAIL = 2
"""A request that goes on from one of the last blocks of another continues it. (Its very last block
is often partial, and written anew by the next turn.)"""
_GREW_BLOCKS = 4
_FEW_USES = 32


def fresh_kind(length: int) -> int:
    """The first request of a conversation, by its length in blocks: the long return less often."""
    bits = (length - 1).bit_length()
    return _FRESH + (bits if bits < _LENGTHS else _LENGTHS - 1)


def forked_kind(length: int, mark: int) -> int:
    """A first request that begins like others did: what few have shared so far is a document or a
    retry, what many share is everyone's system prompt and says nothing."""
    return _FORKED if mark - SHARED < _FEW_USES else fresh_kind(length)


def pause_level(seconds: float) -> int:
    """A pause on the scale by which kinds are told apart."""
    level, limit = 0, _SHORTEST_PAUSE_S
    while seconds > limit and level < _PAUSES - 1:
        level += 1
        limit *= _PAUSE_STEP
    return level


def pause_of(kind: int) -> int:
    """The pause before a turn of this kind, on that scale; the longest for kinds that are none."""
    return (kind - _RETURNED) % _PAUSES if _RETURNED <= kind < RESTORED else _PAUSES - 1


def turn_kind(turn: int, fresh: int, length: int, pause: int) -> int:
    """A conversation that has come back: the more often, the likelier again, but not after a turn
    that brought much that is new. How soon tells the pace of its user, or of its tools."""
    if not turn:
        return fresh_kind(length)
    if fresh > _GREW_BLOCKS:
        return _GREW + pause
    bits = turn.bit_length()
    level = (bits if bits < _TURN_LEVELS else _TURN_LEVELS) - 1
    return _RETURNED + level * _PAUSES + pause


def added_kind(kind: int) -> int:
    """The kind of what this request adds, where `kind` is that of the blocks it came back to."""
    return kind + _ADDED if came_back(kind) else kind


def came_back(kind: int) -> bool:
    """Whether blocks of this kind are those that a turn came back to, without what it added."""
    return _RETURNED <= kind < _RETURNED + _ADDED


def shared_kind(mark: int) -> int:
    """A block after which requests went different ways, by how many used it."""
    bits = (mark - SHARED + 1).bit_length()
    return POOLED + (bits if bits < _SHARE_LEVELS else _SHARE_LEVELS) - 1


class Seen(msgspec.Struct, frozen=True, gc=False):
    """The last block of a request that was seen before."""

    mark: int
    rest: int
    """How many blocks the request before had behind it."""
    again: bool
    """Seen in another request, not in an earlier part of this one."""
    pause: int
    """How long ago that was, as a level; in an earlier part of this request: its pause."""


class Story(msgspec.Struct, frozen=True, gc=False):
    """What a request is taken for."""

    turn: int
    kind: int
    forked: bool = False
    """It went another way than the request before it: what they share is of another kind."""


def conclude(seen: Seen | None, fresh: int, length: int) -> Story:
    """Tell a new conversation, the next turn of one and a fork apart; `fresh` blocks are new."""
    if seen is None:
        return Story(0, fresh_kind(length))
    if seen.mark >= SHARED:
        return Story(0, forked_kind(length, seen.mark))
    if not fresh or seen.rest <= NEAR_TAIL:
        turn = seen.mark + seen.again
        if turn > TURN_MAX:
            turn = TURN_MAX
        return Story(turn, turn_kind(turn, fresh, length, seen.pause))
    return Story(0, forked_kind(length, SHARED), forked=True)
