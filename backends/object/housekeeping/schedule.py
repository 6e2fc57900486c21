"""When a keeper looks at what others do, audits, and joins manifests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from kvtier.backends.object.budget.budget import Grant
from kvtier.backends.object.stores.errors import EndlessListing, StoreFull

_SOON_SHARE = 0.9


class Schedule:
    """Due times, by a steady clock.

    Of all servers that share a namespace, one audits in each interval, and records for all what it
    finds. A server audits by itself only if it knows less than the others.
    """

    def __init__(self, refresh_s: float, audit_s: float, clock: Callable[[], float]) -> None:
        self.next_look = self.next_audit = self.next_join = 0.0
        self.needed_audit = math.inf
        """When to audit because nobody knows what is there."""
        self.writers = 1
        """How many share the namespace, as far as is known."""
        self._refresh_s = refresh_s
        self._audit_s = audit_s
        self._clock = clock
        self._soon = False

    # -- looks -----------------------------------------------------------------------------------

    def look_at(self) -> float:
        """When the next look is due."""
        return self.next_look - (self._refresh_s * _SOON_SHARE if self._soon else 0.0)

    def look_soon(self) -> bool:
        """Bring the next look forward; whether it was not before."""
        before, self._soon = self._soon, True
        return not before

    def look_begins(self) -> None:
        self.next_look = self._clock() + self._refresh_s

    def looks_at_others(self) -> None:
        self.look_begins()
        self._soon = False

    # -- audits ----------------------------------------------------------------------------------

    def audit_due(self) -> bool:
        return self._clock() >= min(self.next_audit, self.needed_audit)

    def audited(self) -> None:
        self.next_audit = self._clock() + self._audit_s * self.writers * random.uniform(0.8, 1.2)
        self.needed_audit = math.inf

    def plan_audits(self, grant: Grant, *, unknown: bool, lacks_something: bool) -> None:
        """After a look. `unknown`: nobody knows what is there. `lacks_something`: this server needs
        an audit that others need not."""
        before, self.writers = self.writers, grant.writers
        now = self._clock()
        if not unknown:
            self.needed_audit = math.inf  # another server may have audited meanwhile
        elif self.needed_audit == math.inf:
            self.needed_audit = now + self._jitter_s(max(before, self.writers))
        turns = 1 if lacks_something else self.writers
        self.next_audit = min(self.next_audit, now + 1.2 * turns * self._audit_s)

    # -- joins -----------------------------------------------------------------------------------

    def join_due(self) -> bool:
        """True for about one of all servers in the time of a look. If many joined at once, as many
        joined manifests would be there afterwards, and would be joined again."""
        return self._clock() >= self.next_join and random.random() * self.writers < 1

    def join_begins(self) -> None:
        """If joining fails it is not tried at every look, because it may read gigabytes."""
        self.next_join = self._clock() + self._audit_s

    def joined(self) -> None:
        self.next_join = 0.0

    # -- errors ----------------------------------------------------------------------------------

    def failed(self, error: Exception, took_s: float) -> None:
        """Try again at the next look, but not all servers at the same time. After a listing that
        failed after minutes wait as many minutes: every page of a listing is paid for."""
        now = self._clock()
        self.look_begins()
        list_at = max(self.next_look, now + min(took_s, self._audit_s))
        if self.next_audit <= now:
            self.next_audit = list_at + self._jitter_s(self.writers)
        if self.needed_audit <= now:
            self.needed_audit = list_at + self._jitter_s(self.writers)
        if isinstance(error, EndlessListing | StoreFull):  # it will be no better at the next look
            self.next_audit = self.needed_audit = now + self._audit_s

    def _jitter_s(self, writers: int) -> float:
        """Leaves it to the other servers for a random time, if there are any."""
        return random.uniform(0.0, (writers - 1) * self._refresh_s)
