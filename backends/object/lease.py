"""Who is the caretaker of a bucket, and which servers live: by objects that are renewed.

    caretaker/<term>            who keeps the budget in this term; empty after it has left
    caretaker/<term>-<round>    what it reported last: a new one only when that changes
    servers/<...>               an object of each server; its name says all (see `object_names`).
                                It is empty if there was room for all that it stored lately

A lease has run out when its objects have not changed for a time that the observer measures by its
own clock. Its holder counts from the moment before it last renewed it, and gives up earlier. So
clocks may differ in what they say; they only have to run about as fast. An observer learns of all
changes from one listing, and reads only reports that it does not know.

A server becomes the caretaker by creating the object of the next term, which a store with
conditional puts lets only one do. In a store without them the last one to write it wins: each waits
longer than anyone may be late, and reads it back. Before the caretaker deletes anything it looks
whether its object is as it wrote it and no later term has begun (`confirm`). One that was asleep
finds that its lease has run out. What one deletes that was stopped in the middle of a request has
been recorded as removed, and whoever stores such a block again gives it another name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget import clock
from kvtier.backends.object.object_names import (
    SERVERS,
    TERMS,
    ServerName,
    parse_report,
    parse_server,
    parse_term,
    report_name,
    term_name,
)
from kvtier.backends.object.stores.errors import LengthMismatch, StoreError
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome, Store, bounded

LEASE_S = 45.0
_RENEW_SHARE = 0.45
_PATIENCE = 1.5
"""An observer waits for so many times the lease: clocks run as fast as that, at least."""
_WRITE_S = 1.0
"""Without conditional puts: who begins to write a term ends within this time."""
_SETTLE_S = 2.0
"""And who has written one reads it back after this: by then all others have ended, too."""
_MARGIN_SHARE = 8
"""The last part of a lease in which its holder begins nothing any more."""
_BODY_BYTES_MAX = 1 << 20
_SERVERS_MAX = 1 << 16
_TERMS_MAX = 1 << 12
_OLD_REPORTS_MAX = 16
"""So many are deleted at once: a server may just be about to read one of the latest."""
_T = TypeVar("_T")
_PRESENT_S = 600.0
"""The caretaker itself says so rarely that it lives: nobody tells it so."""
_LACKS_ROOM = b"!"
"""What is in a server's object whose blocks found no room lately: a listing shows its size."""


class Report(msgspec.Struct, frozen=True):
    """What the caretaker says of the bucket."""

    measured: bool = False
    """Whether `bytes` is known."""
    capacity: int = 0
    bytes: int = 0
    """Of all blocks below the url that are recorded."""
    share: int = 0
    """What each server may store beyond what has been seen of its manifests."""
    seen: dict[str, int] = {}
    """By writer, for each server that has a share, the number of its last manifest that counts."""


class Holder(msgspec.Struct, frozen=True):
    """Who has the lease of a term: the body of its object."""

    server: str
    lease_s: float


class LeaseLost(StoreError):
    """Another server is the caretaker now, or may be."""


class Lease:
    """The caretaker's lease as one server sees it, and its own if it has it."""

    def __init__(
        self,
        store: Store,
        server: str,
        lease_s: float,
        clock: Callable[[], float] = clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._own = Holder(server, lease_s)
        self._body = msgspec.json.encode(self._own)
        self.clock = clock
        self._sleep = sleep
        self.term = 0
        """Ours, if we have ever been the caretaker."""
        self._renewed_at = self._written_at = -1e18
        """Before an object of ours was written last, and after our term's object was."""
        self._observed: tuple[float, ...] = (0,)
        """What the last listing showed of the lease: its term first."""
        self._observed_at = 0.0
        self.holder: Holder | None = None
        """Who had the lease when we last looked, if it is not ours."""
        self._report = Report()
        self._report_at = (0, 0)
        """Term and round of the last report that was read or written."""
        self._old: list[str] = []
        """Names of objects that the next reports replace."""
        self._store_s = -math.inf
        """When the latest term's object was written by the store's clock, after `look`; and"""
        self._store_s_at = 0.0
        """when that was by ours."""
        self.held = False
        """Whether we are the caretaker, as far as we know."""

    @property
    def until(self) -> float:
        """When our lease ends, by our clock; it is over a little earlier for what takes long."""
        return self._renewed_at + self._own.lease_s if self.held else 0.0

    @property
    def last_report(self) -> Report:
        """What the last caretaker said, whether it lives or not."""
        return self._report

    @property
    def _due(self) -> bool:
        return self.clock() - self._renewed_at > self._own.lease_s * _RENEW_SHARE

    def look(self) -> Report | None:
        """The caretaker's last report; None if there is no caretaker. Raises StoreError."""
        if self.held and not self._due and self._store_s > -math.inf:
            return self._report
        terms: dict[int, ObjectInfo] = {}
        reports: dict[tuple[int, int], ObjectInfo] = {}
        for info in bounded(self._store.list(TERMS), _TERMS_MAX, "caretakers"):
            if term := parse_term(info.name):
                terms[term] = info
            elif report := parse_report(info.name):
                reports[report] = info
        term = max(terms, default=0)
        self.held &= term == self.term and self.clock() < self.until
        if not term:
            return None
        self._observe(term, terms[term], max(reports, default=(0, 0)))
        if not self.held:
            self._learn(reports)
        elif self._report_at[0] == term:
            old = [info for at, info in terms.items() if at < term]
            old += [info for before, info in reports.items() if before < self._report_at]
            self._old = [info.name for info in old]
        return None if self._has_ended(terms[term]) else self._report

    def _observe(self, term: int, info: ObjectInfo, report: tuple[int, int]) -> None:
        if term == self.term and self.held:
            self._store_s, self._store_s_at = info.modified_s, self._written_at
        elif term != self._observed[0]:
            self.holder = _decode(self._read(info), Holder)
        observed = (term, info.modified_s, info.size, *report)
        if observed != self._observed:
            self._observed, self._observed_at = observed, self.clock()

    def _learn(self, reports: Mapping[tuple[int, int], ObjectInfo]) -> None:
        at = max(reports, default=(0, 0))
        if at > self._report_at:
            found = _decode(self._read(reports[at]), Report)
            if found is not None:  # else it has just been replaced
                self._report, self._report_at = found, at

    def _has_ended(self, info: ObjectInfo) -> bool:
        if self.term == self._observed[0]:
            return not self.held
        age = self.clock() - self._observed_at
        holder = self.holder or Holder("", LEASE_S)
        return (
            not info.size
            or age > _PATIENCE * holder.lease_s
            or not writer_ids.may_live(holder.server)
        )

    def acquire(self) -> bool:
        """Become the caretaker, after `look` found none; False if another server was faster."""
        began = self.clock()
        term = int(self._observed[0]) + 1
        name = term_name(term)
        end = time.monotonic() + _WRITE_S
        if self._put(name, self._body, if_absent=True, deadline=end) is PutOutcome.ALREADY_THERE:
            return False
        again = self._put(name, self._body, if_absent=True, deadline=end)
        if again is PutOutcome.STORED:  # the store does not refuse what is there
            self._sleep(_SETTLE_S)
            if not self._is_ours(name):
                return False
            began = self.clock()
            self._put(name, self._body)
        self.term, self.held = term, True
        self._renewed_at, self._written_at = began, self.clock()
        self._observed, self._observed_at = (term,), began
        self._old = []
        return True

    def publish(self, report: Report) -> None:
        """Say what we know, if that is news, and that we are there still. Raises StoreError."""
        self.check()
        began = self.clock()
        if report != self._report or self._report_at[0] != self.term:
            before, round_ = self._report_at
            at = (self.term, round_ + 1 if before == self.term else 1)
            self._put(report_name(*at), msgspec.json.encode(report))
            if before:
                self._old.append(report_name(before, round_))
            self._report, self._report_at, self._renewed_at = report, at, began
        elif self._due:
            self._put(term_name(self.term), self._body)
            self._renewed_at, self._written_at = began, self.clock()
        if len(self._old) >= _OLD_REPORTS_MAX:
            self._store.delete(self._old)
            self._old = []

    def check(self) -> None:
        """Raises LeaseLost if our lease has run out by our clock."""
        if not self.held or self.clock() >= self.until:
            self.held = False
            raise LeaseLost("the lease of this caretaker has run out")

    def confirm(self) -> float:
        """The seconds for which we are certainly the caretaker. Raises LeaseLost if that is over or
        almost over, or if somebody else is the caretaker; other StoreErrors if nobody knows."""
        left = self.until - self.clock() - self._own.lease_s / _MARGIN_SHARE
        if left > 0:
            name, later = term_name(self.term), term_name(self.term + 1)
            if self._is_ours(name) and self._store.head(later) is None:
                return left
            self.held = False
        raise LeaseLost("another server is the caretaker")

    def store_time(self) -> float:
        """The time by the store's clock, not later than it is; minus infinity if that is not
        known."""
        return self._store_s + self.clock() - self._store_s_at

    def close(self) -> None:
        """Leave the place to another server at once. Raises StoreError."""
        if self.held and self.clock() < self.until:
            self._put(term_name(self.term), b"")
        self.held = False

    # -- the store -------------------------------------------------------------------------------

    def _is_ours(self, name: str) -> bool:
        return self._read(ObjectInfo(name, len(self._body), 0.0)) == self._body

    def _read(self, info: ObjectInfo) -> bytes:
        room = memoryview(bytearray(min(info.size, _BODY_BYTES_MAX)))
        try:
            length = self._store.get(info.name, [room]) if room else 0
        except LengthMismatch:
            return b""
        return bytes(room[: length or 0])

    def _put(
        self, name: str, body: bytes, *, if_absent: bool = False, deadline: float | None = None
    ) -> PutOutcome:
        return self._store.put(name, [memoryview(body)], if_absent=if_absent, deadline=deadline)


def _decode(body: bytes, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


class Presence:
    """The object of one server, which says that it lives and may have a share."""

    def __init__(
        self,
        store: Store,
        name: ServerName,
        lease_s: float,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._store = store
        self.name = name
        self._lease_s = lease_s
        self._clock = clock
        self._renewed_at = -1e18
        self._lacked_room = False

    @property
    def until(self) -> float:
        """Until then nobody takes us for dead."""
        return self._renewed_at + self._lease_s

    def renew(self, *, lacks_room: bool = False, is_caretaker: bool = False) -> None:
        """Say that we live, if that is due or if it is news that we lack room. Raises
        StoreError."""
        began = self._clock()
        due_s = _PRESENT_S if is_caretaker else self._lease_s * _RENEW_SHARE
        if began - self._renewed_at > due_s or lacks_room != self._lacked_room:
            self._store.put(str(self.name), [memoryview(_LACKS_ROOM if lacks_room else b"")])
            self._renewed_at, self._lacked_room = began, lacks_room

    def close(self) -> None:
        """We store no more. Raises StoreError."""
        writer_ids.mark_ended(self.name.server)
        if self._renewed_at > 0:
            self._store.delete([str(self.name)])
        self._renewed_at = -1e18


class Servers:
    """All servers below a url, as the caretaker sees them."""

    def __init__(self, store: Store, lease_s: float, clock: Callable[[], float] = clock) -> None:
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[str, tuple[float, float]] = {}
        """By name: when its object was last renewed by the store's clock, and since when we know
        that by ours."""
        self.lacking_room: set[str] = set()
        """Writers of those that found no room lately."""

    def look(self, own: ServerName) -> tuple[dict[str, ServerName], list[ServerName]]:
        """Those that live, by writer, ours among them, and those that have died without a word
        since the last look. Raises StoreError."""
        living = {own.writer: own}
        dead: list[ServerName] = []
        now = self._clock()
        seen: dict[str, tuple[float, float]] = {}
        self.lacking_room.clear()
        for info in bounded(self._store.list(SERVERS), _SERVERS_MAX, "servers"):
            name = parse_server(info.name)
            if name is None:
                continue
            before = self._seen.get(info.name)
            known = before[0] == info.modified_s if before else False
            since = before[1] if before and known else now
            late = now - since > _PATIENCE * self._lease_s or not writer_ids.may_live(name.server)
            if late and name != own:
                dead.append(name)
                continue
            living[name.writer] = name
            if info.size:
                self.lacking_room.add(name.writer)
            seen[info.name] = info.modified_s, since
        self._seen = seen
        if dead:
            self._store.delete([str(name) for name in dead])
        return living, dead
