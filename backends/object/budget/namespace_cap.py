"""What a namespace may hold beside others, as one of its writers works it out from all claims."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvtier.backends.object.budget.budget import UNLIMITED, Budget
from kvtier.backends.object.budget.claim import Writer
from kvtier.settings import ByteSize

_log = logging.getLogger(__name__)


class NamespaceCap:
    """The cap of one namespace. `seen` are all writers by their claims, `others` those of the same
    namespace without this one."""

    def __init__(self, namespace: str, budget: Budget) -> None:
        self.bytes = 0
        """What the namespace may hold; 0 if that is not known yet."""
        self.needs_room = False
        """Whether other namespaces leave too little room."""
        self.measured = False
        """Whether it is known what other namespaces hold."""
        self.own_capacity = budget.capacity
        """By our own settings."""
        self._namespace = namespace
        self._budget = budget
        self._foreign: dict[str, int] = {}
        """What other namespaces may hold: by their claims, else by the last listing."""
        self._listed: dict[str, int] = {}
        """What the last listing found of them."""
        self._listed_since = False
        """Whether there was a listing since the last `wish`."""
        self._capacity_fell = self._warned = False

    def reset(self) -> None:
        """Others took this writer for dead: what was agreed does not hold any more."""
        self.bytes = 0
        self.measured = False

    def note_foreign(self, foreign: Mapping[str, int]) -> None:
        """A listing has found so many bytes of each other namespace."""
        self._foreign, self._listed = dict(foreign), dict(foreign)
        self.measured = self._listed_since = True

    def agree_capacity(self, seen: Mapping[str, Writer]) -> None:
        """The largest capacity of all living writers counts for all."""
        stated = [one.claim.capacity for one in seen.values() if one.alive]
        largest = max([self.own_capacity, *(size for size in stated if size < UNLIMITED)])
        self._capacity_fell |= largest < self._budget.capacity
        self._budget.capacity = largest
        if largest > self.own_capacity and not self._warned:
            self._warned = True
            _log.warning(
                "servers that share this store have different capacities: while one runs with %s, "
                "the %s of this one do not count; write the same in all stacks",
                ByteSize(largest),
                ByteSize(self.own_capacity),
            )

    def wish(self, seen: Mapping[str, Writer], others: Sequence[Writer]) -> int:
        """The cap to claim. What is above the cap now may be used only after `raise_to`."""
        capacity = self._budget.capacity
        free = max(0, capacity - self._foreign_bytes(seen))
        if not self.measured:
            # what other writers of this namespace found to fit does fit while their claims stand
            return min(capacity, max([self.bytes, *(one.claim.cap for one in others)]))
        alive = {one.claim.namespace for one in seen.values() if one.alive}
        fair = capacity // len(alive | {self._namespace})
        self.needs_room = self.needs_room and self.bytes < fair
        if self._listed_since:
            # The namespace gives way to blocks that nobody claims. A namespace with claims has
            # found room beside ours.
            unclaimed = sum(size for space, size in self._listed.items() if space not in alive)
            self.bytes = min(self.bytes, max(0, capacity - unclaimed))
        self._listed_since = False
        if self._capacity_fell:  # the writer with the larger capacity has gone: share anew
            self.bytes = min(self.bytes, max(free, fair))
        self._capacity_fell = False
        others_need_room = any(
            one.alive and one.claim.needs_room and one.claim.cap < fair
            for one in seen.values()
            if one.claim.namespace != self._namespace
        )
        if not others_need_room:
            return max(free, self.bytes)
        if self.bytes > fair:
            self.bytes = self._budget.lower_cap(fair)
        return max(self.bytes, min(free, fair))

    def raise_to(self, wished: int, seen: Mapping[str, Writer], others: Sequence[Writer]) -> None:
        """Use a higher cap, as far as all claims, read after it was published, leave room."""
        if wished <= self.bytes:
            return
        if self.measured:
            free = self._budget.capacity - self._foreign_bytes(seen)
        else:
            free = max((one.claim.cap for one in others), default=0)
        self.bytes = max(self.bytes, min(wished, free))

    def _foreign_bytes(self, seen: Mapping[str, Writer]) -> int:
        caps: dict[str, int] = {}
        for one in seen.values():
            namespace = one.claim.namespace
            if namespace != self._namespace:
                caps[namespace] = max(caps.get(namespace, 0), one.claim.cap)
        self._foreign.update(caps)
        return sum(self._foreign.values())
