"""Which blocks of a tier are retained: by which sessions, until when, and within which budget.

To retain is a request. It takes a place in a list (`RetainedBlocks`): a policy around any other
(`RetainingPolicy`) lets these blocks go last, and released ones first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvtier.eviction.policy import UNKNOWN, EvictionPolicy
from kvtier.types import BlockKey


class RefusedBlocks:
    """By session, until the same time for all that it was refused: so much need not be exact."""

    def __init__(self, blocks: int, sessions: int, clock: Callable[[], float]) -> None:
        """Knows at most so many of both; what comes then is not noted."""
        self._blocks_max = blocks
        self._sessions_max = sessions
        self._clock = clock
        self._sessions: dict[str, dict[BlockKey, None]] = {}
        self._ends: dict[str, float] = {}
        self._asked: Counter[BlockKey] = Counter()
        self._next_end = math.inf

    def __contains__(self, key: object) -> bool:
        return key in self._asked

    def __len__(self) -> int:
        return len(self._asked)

    def note(self, session: str, keys: Iterable[BlockKey], until: float) -> None:
        """A session was refused these, which it would need until then."""
        if session not in self._sessions and len(self._sessions) >= self._sessions_max:
            return
        mine = self._sessions.setdefault(session, {})
        for key in keys:
            if key not in mine:
                if key not in self._asked and len(self._asked) >= self._blocks_max:
                    break
                mine[key] = None
                self._asked[key] += 1
        if mine:
            self._ends[session] = until
            self._next_end = min(self._next_end, until)
        else:
            del self._sessions[session]

    def forget(self, session: str, keys: Iterable[BlockKey] | None = None) -> None:
        """A session has got these (None: whatever it was refused), or does not need them."""
        mine = self._sessions.get(session)
        if mine is None:
            return
        for key in list(mine) if keys is None else keys:
            if key in mine:
                del mine[key]
                self._asked[key] -= 1
                if not self._asked[key]:
                    del self._asked[key]
        if not mine:
            del self._sessions[session], self._ends[session]

    def expire(self) -> None:
        """Forget what nobody would retain any more."""
        now = self._clock()
        if now < self._next_end:
            return
        for session in [name for name, until in self._ends.items() if until <= now]:
            self.forget(session)
        self._next_end = min(self._ends.values(), default=math.inf)

    def clear(self) -> None:
        """Forget all."""
        self._sessions.clear()
        self._ends.clear()
        self._asked.clear()
        self._next_end = math.inf


BLOCKS_MAX = 1 << 16
"""No tier retains more, however large it is: the list of them is kept in memory and in a file."""
SESSIONS_MAX = 1024
SESSION_CHARS_MAX = 128
NO_SESSION = ""
"""Whose blocks are retained that no session was named for."""
PINNED = "kvtier:pin"
"""What `kvtier pin` names: no session of a client is called so (`is_session`)."""
_RESERVED = "kvtier:"
_LOOK_FOR_ABSENT_S = 10.0
_LOOKED_AT = 512
_ENDED_AT_ONCE = 512
"""One call looks at so many blocks that may be absent, and lets so many go that have ended, in less
than a millisecond each: an engine's step waits for it."""
_STALE_MAX = 4096

Sessions = Mapping[str, Mapping[BlockKey, float]]
"""By session its blocks, in the order in which they were retained, each with its end."""


def is_session(name: object) -> bool:
    """Whether a client may call a session this."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= SESSION_CHARS_MAX
        and name.isprintable()
        and not name.startswith(_RESERVED)
    )


class RetainedBlocks:
    """The list of one tier. A block is in it whether it is resident just now or not.

    Within the budget, sessions are equals: one that has less takes places from those that have
    most, until it has as many. What people have pinned keeps its places. Ends are in seconds
    since 1970, because the list outlives its process; what has ended leaves it in the next calls.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.budget = 0
        self._sessions: dict[str, dict[BlockKey, float]] = {}
        self._held: dict[BlockKey, int] = {}
        """By how many sessions each is retained."""
        self._ends: list[tuple[float, str, BlockKey]] = []
        """A heap; what was prolonged stands there with its first end until that has come."""
        self._ended: list[BlockKey] = []
        self._without_place = RefusedBlocks(BLOCKS_MAX, SESSIONS_MAX, clock)
        self._richest = NO_SESSION
        self._unlooked: Iterator[tuple[str, BlockKey]] = iter(())
        """What is left of a round of looking for blocks that are absent."""
        self._next_round = 0.0
        self.refused = self.released = 0
        self.changed = False
        """Since somebody took the list to write it down."""

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def wanted(self, key: BlockKey) -> bool:
        """Whether a session retains a block, or would if there were a place for it."""
        return key in self._held or key in self._without_place

    def allow(self, blocks: int) -> None:
        """Let so many be retained."""
        self.budget = max(0, min(blocks, BLOCKS_MAX))

    def retain(
        self,
        keys: Sequence[BlockKey],
        session: str,
        until: float,
        here: Callable[[BlockKey], bool],
    ) -> int:
        """Retain these blocks of a prefix, its head first, for a session; says how many of them
        there was no place for. `here` knows whether a block is in the tier, or on its way."""
        self.expire()
        mine = self._sessions.get(session)
        if mine is None:
            if not keys or not until > self._clock() or not self._has_place_for(session):
                return self._refuse(len(keys))
            mine = self._sessions[session] = {}
        if len(self._held) + len(keys) > self.budget:
            self._drop_absent(session, here)
        taken = 0
        for key in keys:
            known = mine.get(key)
            if known is None:
                if key not in self._held and not self._make_place(session):
                    break
                self._held[key] = self._held.get(key, 0) + 1
            if known is None or until > known:
                mine[key] = until
                self.changed = True
                if known is None and until != math.inf:
                    heapq.heappush(self._ends, (until, session, key))
            taken += 1
        self._without_place.forget(session, keys[:taken])
        self._without_place.note(session, keys[taken:], until)
        if not mine:
            self._sessions.pop(session, None)
        self._drop_stale_ends()
        return self._refuse(len(keys) - taken)

    def _has_place_for(self, session: str) -> bool:
        return self.budget > 0 and (session == PINNED or len(self._sessions) < SESSIONS_MAX)

    def _refuse(self, blocks: int) -> int:
        self.refused += blocks
        return blocks

    def _make_place(self, session: str) -> bool:
        """Have one place free, if it need be by taking it from another session."""
        while len(self._held) >= self.budget:
            other = self._richer_than(session)
            if other is None:
                return False
            self.refused += 1
            key, until = next(reversed(self._sessions[other].items()))
            self._let_go(other, key)
            self._without_place.note(other, [key], until)
            if not self._sessions[other]:
                del self._sessions[other]
        return True

    def _richer_than(self, session: str) -> str | None:
        """The session that had most when that was looked for, as long as it has more than this one
        would: there may be a thousand."""
        mine = 0 if session == PINNED else len(self._sessions[session]) + 1
        found = self._richest
        if found == session or len(self._sessions.get(found, ())) <= mine:
            others = (name for name in self._sessions if name not in (session, PINNED))
            found = max(others, key=lambda name: len(self._sessions[name]), default=PINNED)
        if found in (session, PINNED) or len(self._sessions[found]) <= mine:
            return None
        self._richest = found
        return found

    def _drop_absent(self, but: str, here: Callable[[BlockKey], bool]) -> None:
        """What others retain that is not in the tier leaves its place. Each call looks at some of
        them; another round over all begins now and then."""
        some = list(islice(self._unlooked, _LOOKED_AT))
        if not some and (now := self._clock()) >= self._next_round:
            self._next_round = now + _LOOK_FOR_ABSENT_S
            self._unlooked = self._all_but_pinned()
            some = list(islice(self._unlooked, _LOOKED_AT))
        for session, key in some:
            if session != but and key in self._sessions.get(session, ()) and not here(key):
                self._let_go(session, key)
                if not self._sessions[session]:
                    del self._sessions[session]

    def _all_but_pinned(self) -> Iterator[tuple[str, BlockKey]]:
        """What is retained, session by session, however that changes meanwhile."""
        for session in list(self._sessions):
            if session != PINNED:
                for key in list(self._sessions.get(session, ())):
                    yield session, key

    def _let_go(self, session: str, key: BlockKey) -> bool:
        """A session does not retain a block any more; whether nobody does now."""
        mine = self._sessions[session]
        del mine[key]
        self.changed = True
        if self._held[key] > 1:
            self._held[key] -= 1
            return False
        del self._held[key]
        self._ended.append(key)
        return True

    def release(self, session: str, keys: Sequence[BlockKey] | None = None) -> list[BlockKey]:
        """A session needs these no more (None: nothing). Answers with those that nobody wants."""
        self.expire()
        self._without_place.forget(session, keys)
        mine = self._sessions.get(session, {})
        gone = [key for key in (list(mine) if keys is None else keys) if key in mine]
        free = [key for key in gone if self._let_go(session, key)]
        if not mine:
            self._sessions.pop(session, None)
        self.released += len(free)
        return [key for key in free if key not in self._without_place]

    def expire(self) -> None:
        """Let go of what has ended, or of some of it if that is much."""
        self._without_place.expire()
        now = self._clock()
        for _ in range(_ENDED_AT_ONCE):
            if not self._ends or self._ends[0][0] > now:
                return
            _, session, key = heapq.heappop(self._ends)
            mine = self._sessions.get(session, {})
            until = mine.get(key)
            if until is None:  # it was released
                continue
            if until <= now:
                self._let_go(session, key)
                if not mine:
                    del self._sessions[session]
            elif until != math.inf:  # it was prolonged
                heapq.heappush(self._ends, (until, session, key))

    def _drop_stale_ends(self) -> None:
        if len(self._ends) > 2 * len(self._held) + _STALE_MAX:
            self._ends = [
                (until, session, key)
                for session, mine in self._sessions.items()
                for key, until in mine.items()
                if until != math.inf
            ]
            heapq.heapify(self._ends)

    def take_ended(self) -> list[BlockKey]:
        """Those that were retained, and are not any more."""
        ended, self._ended = self._ended, []
        return [key for key in ended if key not in self._held]

    def clear(self) -> None:
        """Nothing is retained."""
        self.changed |= bool(self._held)
        self._ended += self._held
        self._sessions.clear()
        self._held.clear()
        self._ends.clear()
        self._without_place.clear()

    def blocks_of(self, session: str) -> list[BlockKey]:
        """What a session retains, in the order in which it was retained."""
        return list(self._sessions.get(session, ()))

    def take_all(self) -> dict[str, dict[BlockKey, float]]:
        """The whole list but what is pinned (which has a file of its own), to be written down. Any
        thread may call it: each copy is one step under the GIL, and if the list changes between
        two, it will be written again."""
        self.changed = False
        names = [name for name in list(self._sessions) if name != PINNED]
        return {name: dict(self._sessions.get(name, {})) for name in names}

    def restore(self, sessions: Sessions) -> None:
        """Take in what an earlier process wrote down, as far as there are places."""
        now = self._clock()
        changed = self.changed
        for session, blocks in sessions.items():
            by_end: dict[float, list[BlockKey]] = {}
            for key, until in blocks.items():
                by_end.setdefault(until, []).append(key)
            for until, keys in by_end.items():
                if until > now:
                    self.retain(keys, session, until, lambda _: True)
        self.changed = changed

    def pin(self, blocks: Mapping[BlockKey, float]) -> None:
        """These are pinned now, and what was before is not."""
        before = self._sessions.get(PINNED, {})
        self.release(PINNED, [key for key in before if key not in blocks])
        self.restore({PINNED: blocks})


_ASKED_MAX = 1024
_SLOT_BYTES = 100
"""About so much takes a slot that stands here."""


class RetainingPolicy(EvictionPolicy):
    """The order of another policy, with exceptions."""

    def __init__(
        self,
        policy: EvictionPolicy,
        retained: Callable[[int], bool],
        anything: Callable[[], int],
    ) -> None:
        """`retained` tells it of a slot, `anything` whether it is so of any."""
        self._policy = policy
        self._retained = retained
        self._anything = anything
        self._aside: dict[int, None] = {}
        """Retained slots that the policy has named; not in the policy."""
        self._first: dict[int, None] = {}
        """Released slots, in the order in which they go; also in the policy."""
        self.slots = policy.slots

    @property
    def active(self) -> bool:
        """Whether there is any exception."""
        return bool(self._aside or self._first)

    def resize(self, slots: int) -> None:
        self._policy.resize(slots)
        self.slots = self._policy.slots

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        if self.active:
            self._forget(slots)
            after = UNKNOWN if after in self._aside else after
        self._policy.use(slots, keys, now, after, ahead)

    def _forget(self, slots: Sequence[int]) -> None:
        for known in (self._aside, self._first):
            if known:
                for slot in slots:
                    known.pop(slot, None)

    def release(self, slots: Sequence[int]) -> None:
        """These resident slots go before all others, the last one first."""
        self.give_back(slots)
        for slot in reversed(slots):
            if slot in self._policy:
                self._first[slot] = None

    def give_back(self, slots: Sequence[int]) -> None:
        """Nobody retains these any more: they are like others."""
        mine = [slot for slot in slots if slot in self._aside]
        for slot in mine:
            del self._aside[slot]
        self._policy.load(mine)

    # -- what goes ---------------------------------------------------------------------------

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        if not (self.active or self._anything()):
            return self._policy.victims(count, pinned)
        first = self._released(count, pinned)
        left = count - len(first)
        rest = self._named(left, pinned, set(first)) if left > 0 else []
        left -= len(rest)
        return first + rest + (self._set_aside(left, pinned) if left > 0 else [])

    def _released(self, count: int, pinned: Container[int]) -> list[int]:
        if not self._first:
            return []
        for slot in [slot for slot in islice(self._first, max(count, 0)) if self._retained(slot)]:
            del self._first[slot]
        free = (slot for slot in self._first if slot not in pinned and not self._retained(slot))
        return list(islice(free, max(count, 0)))

    def _named(self, count: int, pinned: Container[int], but: set[int]) -> list[int]:
        """The policy's own victims: what of them is retained is set aside first."""
        asked = count
        while True:
            named = self._policy.victims(asked + len(but), pinned)
            found = [slot for slot in named if slot not in but]
            retained = [slot for slot in found if self._retained(slot)]
            if not retained:
                return found[:count]
            self._policy.remove(retained)
            self._aside.update(dict.fromkeys(retained))
            asked = max(count, min(2 * asked, _ASKED_MAX))

    def _set_aside(self, count: int, pinned: Container[int]) -> list[int]:
        """Retained ones: there is nothing else that could go."""
        return list(islice((slot for slot in self._aside if slot not in pinned), count))

    def evict(self, count: int, pinned: Container[int] = ()) -> list[int]:
        if not (self.active or self._anything()):
            return self._policy.evict(count, pinned)
        first = self._released(count, pinned)
        self.remove(first)
        left = count - len(first)
        if left <= 0:
            return first
        self._named(left, pinned, set())
        found = first + self._policy.evict(left, pinned)
        if len(found) < count:
            rest = self._set_aside(count - len(found), pinned)
            self._forget(rest)
            found += rest
        if self._first:
            self._forget(found)
        return found

    def chances(self, slots: Sequence[int], seconds: float, now: float) -> Sequence[float]:
        if not self.active:
            return self._policy.chances(slots, seconds, now)
        others = [slot for slot in slots if slot in self._policy]
        known = dict(zip(others, self._policy.chances(others, seconds, now), strict=True))
        known |= dict.fromkeys(self._first, 0.0)
        return [known.get(slot, 1.0) for slot in slots]

    # -- the rest ----------------------------------------------------------------------------

    def shared_bytes(self, slots: int) -> int:
        return self._policy.shared_bytes(slots)

    def share(self, memory: memoryview, now: float) -> None:
        self._policy.share(memory, now)

    def close(self) -> None:
        self._policy.close()

    def remove(self, slots: Sequence[int]) -> None:
        if self.active:
            self._forget(slots)
        self._policy.remove(slots)

    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        self._policy.load(slots, last_used)

    def __len__(self) -> int:
        return len(self._policy) + len(self._aside)

    def __contains__(self, slot: object) -> bool:
        return slot in self._aside or slot in self._policy

    @property
    def nbytes(self) -> int:
        return self._policy.nbytes + _SLOT_BYTES * (len(self._aside) + len(self._first))
