"""Who is the caretaker of a bucket, and which servers live: by objects that are renewed.

    caretaker/<term>    who keeps the budget in this term, and what it last knew
    servers/<...>       an object of each server; its name says all (see `object_names`), and it is
                        empty if there was room for all that the server stored lately

A lease has run out when its object has not changed for a time that the observer measures by its own
clock. Its holder counts from the moment before it last renewed it, and gives up earlier. So clocks
may differ in what they say; they only have to run about as fast.

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
from collections.abc import Callable

import msgspec

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget import clock
from kvtier.backends.object.object_names import (
    SERVERS,
    TERMS,
    ServerName,
    parse_server,
    parse_term,
    term_name,
)
from kvtier.backends.object.stores.errors import LengthMismatch, StoreError
from kvtier.backends.object.stores.store import PutOutcome, Store, bounded

LEASE_S = 30.0
_RENEW_SHARE = 2
_PATIENCE = 1.5
"""An observer waits for so many times the lease: clocks run as fast as that, at least."""
_SETTLE_S = 2.0
"""Without conditional puts: who begins to write a term ends within half of this time."""
_MARGIN_SHARE = 8
"""The last part of a lease in which its holder begins nothing any more."""
_BODY_BYTES_MAX = 1 << 20
_SERVERS_MAX = 1 << 16
_LACKS_ROOM = b"!"
"""What is in a server's object whose blocks found no room lately: a listing shows its size."""


class Report(msgspec.Struct, frozen=True):
    """What the caretaker says of the bucket: the body of its object."""

    server: str
    term: int
    round: int = 0
    lease_s: float = LEASE_S
    closed: bool = False
    measured: bool = False
    """Whether `bytes` is known."""
    capacity: int = 0
    bytes: int = 0
    """Of all blocks below the url that are recorded."""
    share: int = 0
    """What each server may store beyond what has been seen of its manifests."""
    seen: dict[str, int] = {}
    """By writer, for each server that has a share, the number of its last manifest that counts."""


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
        self._server = server
        self._lease_s = lease_s
        self.clock = clock
        self._sleep = sleep
        self._body = b""
        """Of our own object, as we wrote it last."""
        self._term = 0
        self._renewed_at = self._written_at = -1e18
        """Before and after our object was written last."""
        self._observed: tuple[int, bytes] = (0, b"")
        self._observed_at = 0.0
        self._store_s = -math.inf
        """When the latest term's object was written by the store's clock, after `look`; and"""
        self._store_s_at = 0.0
        """when that was by ours."""
        self.held = False
        """Whether we are the caretaker, as far as we know."""

    @property
    def until(self) -> float:
        """When our lease ends, by our clock; it is over a little earlier for what takes long."""
        return self._renewed_at + self._lease_s if self.held else 0.0

    def look(self) -> Report | None:
        """The caretaker's last report; None if there is no caretaker. Raises StoreError."""
        term, body = self._read_latest()
        ours = term == self._term and body == self._body and self.clock() < self.until
        self.held &= ours
        if (term, body) != self._observed:
            self._observed, self._observed_at = (term, body), self.clock()
        report = _decode(body)
        return None if report is None or self._has_ended(report) else report

    def _has_ended(self, report: Report) -> bool:
        if report.server == self._server:
            return not self.held
        age = self.clock() - self._observed_at
        return (
            report.closed
            or age > _PATIENCE * report.lease_s
            or not writer_ids.may_live(report.server)
        )

    def last_report(self) -> Report | None:
        """What the last caretaker said, whether it lives or not."""
        return _decode(self._observed[1])

    def acquire(self) -> bool:
        """Become the caretaker, after `look` found none; False if another server was faster."""
        began = self.clock()
        term = self._observed[0] + 1
        last = self.last_report() or Report(self._server, term)
        mine = msgspec.structs.replace(
            last, server=self._server, term=term, lease_s=self._lease_s, closed=False, round=0
        )
        body, name = msgspec.json.encode(mine), term_name(term)
        end = time.monotonic() + _SETTLE_S / 2
        if self._put(name, body, if_absent=True, deadline=end) is PutOutcome.ALREADY_THERE:
            return False
        again = self._put(name, body, if_absent=True, deadline=end)
        if again is PutOutcome.STORED:  # the store does not refuse what is there
            self._sleep(_SETTLE_S)
            if self._read(name, len(body)) != body:
                return False
        self._term, self._body, self.held = term, body, True
        self._renewed_at, self._written_at = began, self.clock()
        self._observed, self._observed_at = (term, body), began
        old = [info.name for info in self._store.list(TERMS) if (parse_term(info.name) or 0) < term]
        self._store.delete(old)
        return True

    def renew(self, report: Report) -> None:
        """Say that we are there still, and what we know. Raises StoreError."""
        if not self.held or self.clock() >= self.until:
            self.held = False
            raise LeaseLost("the lease of this caretaker has run out")
        began = self.clock()
        body = msgspec.json.encode(
            msgspec.structs.replace(report, server=self._server, term=self._term)
        )
        self._put(term_name(self._term), body)
        self._body, self._renewed_at, self._written_at = body, began, self.clock()
        self._observed, self._observed_at = (self._term, body), began

    def confirm(self) -> float:
        """The seconds for which we are certainly the caretaker. Raises LeaseLost if that is over or
        almost over, or if somebody else is the caretaker; other StoreErrors if nobody knows."""
        left = self.until - self.clock() - self._lease_s / _MARGIN_SHARE
        if left > 0:
            name, later = term_name(self._term), term_name(self._term + 1)
            ours = self._read(name, len(self._body)) == self._body
            if ours and self._store.head(later) is None:
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
            last = _decode(self._body) or Report(self._server, self._term)
            self.renew(msgspec.structs.replace(last, closed=True))
        self.held = False

    # -- the store -------------------------------------------------------------------------------

    def _read_latest(self) -> tuple[int, bytes]:
        found = {parse_term(info.name) or 0: info for info in self._store.list(TERMS)}
        term = max(found, default=0)
        if not term:
            return 0, b""
        if term == self._term and self.held:
            self._store_s, self._store_s_at = found[term].modified_s, self._written_at
        return term, self._read(term_name(term), min(found[term].size, _BODY_BYTES_MAX))

    def _read(self, name: str, size: int) -> bytes:
        room = memoryview(bytearray(size))
        try:
            length = self._store.get(name, [room])
        except LengthMismatch:
            return b""
        return bytes(room[: length or 0])

    def _put(
        self, name: str, body: bytes, *, if_absent: bool = False, deadline: float | None = None
    ) -> PutOutcome:
        return self._store.put(name, [memoryview(body)], if_absent=if_absent, deadline=deadline)


def _decode(body: bytes) -> Report | None:
    try:
        return msgspec.json.decode(body, type=Report)
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

    def renew(self, *, lacks_room: bool = False) -> None:
        """Say that we live, if that is due or if it is news that we lack room. Raises
        StoreError."""
        began = self._clock()
        due = began - self._renewed_at > self._lease_s / _RENEW_SHARE
        if due or lacks_room != self._lacked_room:
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

    def look(self) -> tuple[dict[str, ServerName], list[ServerName]]:
        """Those that live, by writer, and those that have died without a word since the last look.
        Raises StoreError."""
        living: dict[str, ServerName] = {}
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
            if now - since > _PATIENCE * self._lease_s or not writer_ids.may_live(name.server):
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
