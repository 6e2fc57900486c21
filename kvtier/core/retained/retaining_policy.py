"""An eviction policy that lets retained blocks go last and released ones first, around any other.

The policy within never learns of it. It names victims in its own order. Those that are retained are
set aside, and it is asked again: each is met once, not at every eviction. When they are used they
are the policy's again, and also when nobody retains them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice

from kvtier.eviction.policy import UNKNOWN, EvictionPolicy

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
