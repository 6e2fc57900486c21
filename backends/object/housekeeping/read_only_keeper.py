"""The keeper of a tier that is only read: it learns what others write, and changes nothing.

It needs no right to write, claims no room, and deletes nothing whatever the budget says: that is
left to servers that write. What cannot be read is forgotten until the next audit. That audit does
not list blocks, but reads all manifests.
"""

from __future__ import annotations

import math

from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.housekeeping.use_counts import Uses
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.stores.wrapper import ReadOnlyStore
from kvtier.types import Namespace


class ReadOnlyKeeper(Keeper):
    """A keeper whose store drops writes."""

    def __init__(self, store: Store, namespace: Namespace, limits: Limits) -> None:
        super().__init__(ReadOnlyStore(store), namespace, limits)
        self.uses = Uses(self._store, namespace, math.inf, self._lock_yield.pause)

    def look_soon(self) -> None:
        """No claim makes room here."""

    def _audit(self, stop_at: float | None = None) -> None:
        self.schedule.look_begins()
        self.outbox.flush()
        self._publish_recorded()
        self.catalogued = True
        self.schedule.audited()

    def _look_at_others(self) -> None:
        self.schedule.looks_at_others()
        if not self._backlogged:
            self._publish(self._journal.read_new())

    def _leave(self) -> None:
        self._claims.close(clean=True)  # none was ever published
