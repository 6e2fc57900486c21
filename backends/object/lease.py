"""Who is the caretaker of a bucket, and which servers live: by objects that are renewed.

    caretaker/<term>    who keeps the budget in this term, or that it has left, and its last report
    servers/<...>       an object of each server; its name says all (see `object_names`). It is
                        empty if there was room for all that it stored lately

A lease has run out when its objects have not changed for a time that the observer measures by its
own clock. Its holder counts from the moment before it last renewed it, and gives up earlier. So
clocks may differ in what they say; they only have to run about as fast. An observer learns of all
changes from one listing, and reads only what has changed.

A server becomes the caretaker by creating the object of the next term, which a store with
conditional puts lets only one do. In a store without them the last one to write it wins: each reads
it back later than anyone may be late, and does other work meanwhile. Before the caretaker deletes
anything it looks whether the object is its own and no later term has begun (`confirm`). One that
was asleep finds that its lease has run out. What one deletes that was stopped in the middle of a
request has been recorded as removed, and whoever stores such a block again gives it another name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
import xxhash

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
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome, Store, bounded
from kvtier.errors import UNREADABLE
from kvtier.record.record import Buffer

LEASE_S = 45.0
_RENEW_SHARE = 0.45
PATIENCE = 1.5
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
_SIZES = 64
"""Of so many reports in a row no two have the same size, so that a listing tells a new one from a
renewal."""
_PRESENT_S = 600.0
"""The caretaker itself says so rarely that it lives: nobody tells it so."""
_LACKS_ROOM = b"!"
"""What is in a server's object whose blocks found no room lately: a listing shows its size."""


class CaretakerReport(msgspec.Struct, frozen=True):
    """What the caretaker says of the bucket."""

    measured: bool = False
    """Whether `bytes` is known."""
    capacity: int = 0
    bytes: int = 0
    """Of all blocks below the url that are recorded."""
    share: int = 0
    """What each server may store beyond what has been seen of its manifests."""
    share_s: float = LEASE_S
    """For so long after it has read this."""
    seen: dict[str, int] = {}
    """By writer, for each server that has a share, the number of its last manifest that counts."""


class Term(msgspec.Struct, frozen=True):
    """Who has the lease of a term, and what it reports: the body of its object."""

    server: str
    """Empty after it has left."""
    lease_s: float
    round: int = 0
    """A report of an earlier round that is written late does not count."""
    report: CaretakerReport = CaretakerReport()
    check: str = ""
    """The checksum of the same without it: a flipped digit would be another report."""

    def sealed(self) -> Self:
        """The same with its checksum."""
        said = msgspec.to_builtins(msgspec.structs.replace(self, check=""))
        text = msgspec.json.encode(msgspec.convert(said, Term))  # 45 is 45.0 when it is read
        return msgspec.structs.replace(self, check=xxhash.xxh3_64_hexdigest(text))


def read_term(body: Buffer) -> Term | None:
    """What stands in the object of a term; None if that is not what a caretaker has written."""
    try:
        found = msgspec.json.decode(body, type=Term)
        return found if found == found.sealed() else None
    except UNREADABLE:
        return None


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
    ) -> None:
        self._store = store
        self._server = server
        self._lease_s = lease_s
        self.clock = clock
        self.term = 0
        """Ours, if we have ever been the caretaker."""
        self.held = False
        """Whether we are the caretaker, as far as we know."""
        self._candidate_for = 0
        """The term that we have written in a store that refuses nobody, until that is decided."""
        self.decided_at = math.inf
        """When it is, by our clock."""
        self._renewed_at = self._written_at = -1e18
        """Before and after our term's object was written last."""
        self._observed: tuple[float, ...] = (0,)
        """What the last listing showed of the lease: its term first."""
        self._observed_at = 0.0
        self.holder: Term | None = None
        """Who had the lease when we last looked, if it is not ours."""
        self.last_report = CaretakerReport()
        """What the last caretaker said, whether it lives or not."""
        self._report_at = (0, 0)
        """Its term and round."""
        self._store_s = -math.inf
        """When our term's object was written by the store's clock, after `look`; and"""
        self._store_s_at = 0.0
        """when that was by ours."""

    @property
    def until(self) -> float:
        """When our lease ends, by our clock; it is over a little earlier for what takes long."""
        return self._renewed_at + self._lease_s if self.held else 0.0

    @property
    def _due(self) -> bool:
        return self.clock() - self._renewed_at > self._lease_s * _RENEW_SHARE

    def look(self) -> CaretakerReport | None:
        """The caretaker's last report; None if there is no caretaker. Raises StoreError."""
        if self.held and not self._due and self._store_s > -math.inf:
            return self.last_report
        listed = bounded(self._store.list(TERMS), _TERMS_MAX, "caretakers")
        terms = {term: info for info in listed if (term := parse_term(info.name))}
        latest = max(terms, default=0)
        self.held &= latest == self.term and self.clock() < self.until
        if latest > self._candidate_for:  # another server was faster
            self._candidate_for, self.decided_at = 0, math.inf
        if self.held:
            self._store_s, self._store_s_at = terms[latest].modified_s, self._written_at
            if len(terms) > 1:
                self._store.delete([info.name for term, info in terms.items() if term < latest])
        elif latest:
            self._observe(latest, terms[latest])
        return self.last_report if self.held or not self._has_ended() else None

    def _observe(self, term: int, info: ObjectInfo) -> None:
        observed: tuple[float, ...] = (term, info.modified_s, info.size)
        if observed == self._observed:
            return
        if observed[::2] != self._observed[::2]:  # else it was renewed, and reports nothing new
            found = self._read(info.name, info.size)
            if found is not None or term != self._observed[0]:
                self.holder = found
            if found is not None and (term, found.round) > self._report_at:
                self.last_report, self._report_at = found.report, (term, found.round)
        self._observed, self._observed_at = observed, self.clock()

    def _has_ended(self) -> bool:
        if self._observed[0] == self.term or self._candidate_for:
            return True
        holder = self.holder  # None: it cannot be read
        late = self.clock() - self._observed_at > PATIENCE * (holder.lease_s if holder else LEASE_S)
        if late or holder is None:
            return late
        ours = holder.server == self._server  # a bid of which we heard no answer
        return ours or not holder.server or not writer_ids.may_live(holder.server)

    def acquire(self) -> bool:
        """Become the caretaker, after `look` found none; False if another server was faster. In a
        store without conditional puts that is not known before `decided_at`: call again then.
        Raises StoreError."""
        began, term = self.clock(), self._candidate_for
        if not term:
            term = int(self._observed[0]) + 1
            won = self._propose(term)
            if won is None:
                self._candidate_for, self.decided_at = term, self.clock() + _SETTLE_S
        elif began < self.decided_at:
            return False
        else:
            won = self._is_ours(term)
            if won:
                self._write(term, self.last_report)
            self._candidate_for, self.decided_at = 0, math.inf
        if won:
            self.term, self.held = term, True
            self._report_at = (term, 0)
            self._renewed_at, self._written_at = began, self.clock()
            self._observed, self._observed_at = (term,), began
        return bool(won)

    def _propose(self, term: int) -> bool | None:
        """Create the object of a term; whether it is ours, None if the store refuses nobody."""
        end = time.monotonic() + _WRITE_S
        report = self.last_report
        first = self._write(term, report, if_absent=True, deadline=end)
        if first is PutOutcome.ALREADY_THERE:
            return False
        again = self._write(term, report, if_absent=True, deadline=end)
        return True if again is PutOutcome.ALREADY_THERE else None

    def publish(self, report: CaretakerReport) -> None:
        """Say what we know, if that is news, and that we are there still. Raises StoreError."""
        self.check()
        began = self.clock()
        is_news = report != self.last_report
        if is_news or self._due:
            round_ = self._report_at[1] + is_news
            self._write(self.term, report, round_)
            self.last_report, self._report_at = report, (self.term, round_)
            self._renewed_at, self._written_at = began, self.clock()

    def check(self) -> None:
        """Raises LeaseLost if our lease has run out by our clock."""
        if not self.held or self.clock() >= self.until:
            self.held = False
            raise LeaseLost("the lease of this caretaker has run out")

    def confirm(self) -> float:
        """The seconds for which we are certainly the caretaker. Raises LeaseLost if that is over or
        almost over, or if somebody else is the caretaker; other StoreErrors if nobody knows."""
        left = self.until - self.clock() - self._lease_s / _MARGIN_SHARE
        if left > 0:
            later = term_name(self.term + 1)
            if self._is_ours(self.term) and self._store.head(later) is None:
                return left
            self.held = False
        raise LeaseLost("another server is the caretaker")

    def store_time(self) -> float:
        """The time by the store's clock, not later than it is; minus infinity if that is not
        known."""
        return self._store_s + self.clock() - self._store_s_at

    def close(self) -> None:
        """Leave the place to another server at once. Raises StoreError."""
        term = self.term if self.held and self.clock() < self.until else self._candidate_for
        if term and self._is_ours(term):
            self._server = ""
            self._write(term, self.last_report, self._report_at[1] + 1)
        self.held, self._candidate_for = False, 0

    # -- the store -------------------------------------------------------------------------------

    def _is_ours(self, term: int) -> bool:
        found = self._read(term_name(term), _BODY_BYTES_MAX)
        return found is not None and found.server == self._server

    def _read(self, name: str, size: int) -> Term | None:
        """The body of a term's object; None if it is not there or cannot be one."""
        room = memoryview(bytearray(min(size, _BODY_BYTES_MAX)))
        try:
            length = self._store.get(name, room) if room else 0
        except LengthMismatch:
            return None
        return read_term(room[: length or 0])

    def _write(
        self, term: int, report: CaretakerReport, round_: int = 0, **more: Any
    ) -> PutOutcome:
        body = msgspec.json.encode(Term(self._server, self._lease_s, round_, report).sealed())
        body += b" " * ((round_ - len(body)) % _SIZES)
        return self._store.put(term_name(term), [memoryview(body)], **more)


class ServerPresence:
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
        self._looked_at = -math.inf
        self.alive_at: dict[str, float] = {}
        """By writer: it has renewed its object later than this, by our clock."""
        self.lacking_room: set[str] = set()
        """Writers of those that found no room lately."""

    def look(self, own: ServerName) -> tuple[dict[str, ServerName], list[ServerName]]:
        """Those that live, by writer, ours among them, and those that have died without a word
        since the last look. Raises StoreError."""
        living = {own.writer: own}
        dead: list[ServerName] = []
        now = self._clock()
        seen: dict[str, tuple[float, float]] = {}
        alive_at: dict[str, float] = {}
        self.lacking_room.clear()
        for info in bounded(self._store.list(SERVERS), _SERVERS_MAX, "servers"):
            name = parse_server(info.name)
            if name is None:
                continue
            before = self._seen.get(info.name)
            known = before[0] == info.modified_s if before else False
            since = before[1] if before and known else now
            renewed = before is not None and not known
            last = self.alive_at.get(name.writer, -math.inf)
            alive_at[name.writer] = self._looked_at if renewed else last
            late = now - since > PATIENCE * self._lease_s or not writer_ids.may_live(name.server)
            if late and name != own:
                dead.append(name)
                continue
            living[name.writer] = name
            if info.size:
                self.lacking_room.add(name.writer)
            seen[info.name] = info.modified_s, since
        self._seen, self.alive_at, self._looked_at = seen, alive_at, now
        if dead:
            self._store.delete([str(name) for name in dead])
        return living, dead
