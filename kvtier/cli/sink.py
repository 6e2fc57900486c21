"""Which blocks a copy takes, and their way from a source into one tier, which is opened for it.

They are chosen in columns, some seventy bytes a block, and read as anybody may read: a running
engine there does not notice. To a mover the reader is one more handler, so that blocks go straight
from their medium into the memory from which they are written, proved on the way.

They stream: a mover reads on many threads into a bounded number of buffers and writes from these,
so that the slower side sets the pace. Only what has landed is committed, block by block, and what
is there already is not stored again: whatever was interrupted can simply be run again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier import amounts
from kvtier.cli.console import Progress, warn
from kvtier.cli.inspect import Inspectors
from kvtier.cli.signals import uninterrupted
from kvtier.errors import MediumError
from kvtier.inspect import CopyAudit, Filling, Source
from kvtier.inspect.filling import ROW, Rows
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.mover import Mover, Transfer, TransferKind, TransferResult
from kvtier.interfaces.tier import Tier
from kvtier.move.threads import ThreadMover
from kvtier.record.record import Buffer, record_bytes
from kvtier.slab.layout import keys_of
from kvtier.types import (
    GROUP_BYTES,
    KEY_BYTES_MAX,
    BlockKey,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    SlotSpec,
)

_PIECE = 1 << 16
USED_MAX = 1 << 16
"""A copy takes along how often blocks were used, but of no more than so many."""


class Choice:
    """Blocks of one namespace, each once, the most wanted first. `at` is where a block is in the
    words of its source."""

    def __init__(self, namespace: str, rows: Rows, sources: list[Source]) -> None:
        self.namespace = namespace
        self.sources = sources
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def pieces(self, size: int) -> Iterator[tuple[list[BlockKey], list[int]]]:
        """Keys and their rows, so many at once."""
        for start in range(0, len(self), size):
            keys = self.keys(start, start + size)
            yield keys, list(range(start, start + len(keys)))

    def room(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """The bytes that each of them takes where a block of a cache group takes so many (the last
        counts for all groups beyond). Where they lie now they may be compressed, or in slots."""
        if len(sizes) == 1:
            return np.full(len(self), sizes[0], np.int64)
        starts = range(0, len(self), _PIECE)
        groups = [_groups(self._rows[start : start + _PIECE]) for start in starts]
        known = np.minimum(np.concatenate([np.zeros(0, np.uint32), *groups]), len(sizes) - 1)
        taken: npt.NDArray[np.int64] = np.array(sizes, np.int64)[known]
        return taken

    def keys(self, start: int, stop: int) -> list[BlockKey]:
        """The keys of these rows."""
        return keys_of(self._rows[start:stop])

    def places(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where these rows are: the number of each one's source, and its place there."""
        chosen = self._rows[rows]
        return chosen["origin"].tolist(), chosen["at"].tolist()

    def cut(self, size_max: int, sizes: Sequence[int]) -> Choice:
        """The first blocks, up to so many bytes of room."""
        count = int(np.searchsorted(np.cumsum(self.room(sizes)), size_max, side="right"))
        return Choice(self.namespace, self._rows[:count].copy(), self.sources)

    def only(self, keys: Collection[BlockKey]) -> Choice:
        """Those of the blocks that have one of these keys."""
        chosen = [
            np.fromiter((key in keys for key in self.keys(start, start + _PIECE)), bool)
            for start in range(0, len(self), _PIECE)
        ]
        rows = self._rows[np.concatenate([np.zeros(0, bool), *chosen])]
        return Choice(self.namespace, rows, self.sources)

    def used(self) -> dict[BlockKey, tuple[int, float]]:
        """How often these were used and when last, without those that never were; of very many
        the most used."""
        rows = self._rows[self._rows["uses"] > 0]
        rows = rows[np.argsort(rows["uses"], kind="stable")[-USED_MAX:]]
        values = zip(rows["uses"].tolist(), rows["used_at"].astype(float).tolist(), strict=True)
        return dict(zip(keys_of(rows), values, strict=True))


def choose(inspectors: Inspectors, namespace: str, *, hottest: bool = False) -> Choice:
    """All blocks of a namespace, the newest first, or the most used and of these the newest; of
    several copies the one in the first tier. What is written down was looked at, and is taken."""
    sources: list[Source] = []
    pieces: list[Rows] = [np.zeros(0, ROW)]
    for source in (source for each in inspectors for source in each.sources(namespace)):
        rows = source.rows()
        rows["origin"] = len(sources)
        pieces.append(rows)
        sources.append(source)
    rows = _once(np.concatenate(pieces))
    order = np.argsort(-rows["stored_at"], kind="stable")
    if hottest:
        order = order[np.argsort(-rows["uses"][order].astype(np.int64), kind="stable")]
    return Choice(namespace, rows[order], sources)


def _groups(rows: Rows) -> npt.NDArray[np.uint32]:
    """The cache group of each key: its last bytes."""
    keys = np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(-1, KEY_BYTES_MAX)
    ends = rows["key_bytes"].astype(np.intp)[:, None] + np.arange(-GROUP_BYTES, 0)
    return np.take_along_axis(keys, ends, axis=1).view(">u4").ravel().astype(np.uint32)


def _once(rows: Rows) -> Rows:
    """Of the rows with one key the first source's, and there the latest."""
    words: Any = np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, KEY_BYTES_MAX // 8)
    columns = (-rows["stored_at"], rows["origin"], rows["key_bytes"], *words.T)
    order = np.lexsort(columns)
    same = np.ones(len(rows), bool)
    if len(rows):
        same[0] = False
        lengths = rows["key_bytes"][order]
        same[1:] = lengths[1:] == lengths[:-1]
        for word in words.T:
            ordered = word[order]
            same[1:] &= ordered[1:] == ordered[:-1]
    return rows[np.sort(order[~same])]


class Numbers(SlotSpec):
    """Blocks by their rows in a choice."""


class ChoiceReader(Handler):
    """Reads the rows of a choice from their sources. What cannot be read is GONE or CORRUPT,
    nothing else: a copy tells troubles of its source from those of its target by that."""

    def __init__(self, choice: Choice, namespace: Namespace) -> None:
        self.unread = 0
        """So many of those that are called CORRUPT could not be read at all."""
        self._counting = threading.Lock()
        self._choice = choice
        record = record_bytes(namespace.payload_bytes)
        for source in choice.sources:
            source.open(namespace)
        self.concurrency = max((each.concurrency for each in choice.sources), default=1)
        batches = [each.batch_blocks(record) for each in choice.sources]
        self.batch_blocks = min(batches, default=1)

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        assert isinstance(spec, Numbers)
        outcomes = self.read(spec.slots, keys, into)
        for index, outcome in enumerate(outcomes):
            if outcome not in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT):
                outcomes[index] = Outcome.CORRUPT
                with self._counting:
                    self.unread += 1
        return outcomes

    def read(
        self, rows: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with a record, unproved."""
        origins, places = self._choice.places(rows)
        outcomes: list[Outcome] = []
        for origin, neighbours in groupby(origins):
            some = slice(len(outcomes), len(outcomes) + len(list(neighbours)))
            source = self._choice.sources[origin]
            outcomes += source.read(places[some], keys[some], into[some])
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        raise TypeError("a source is only read")

    def used_again(self, row: int, key: BlockKey) -> bool:
        """Whether a block that could not be proved has been replaced by another meanwhile."""
        (origin,), (at,) = self._choice.places([row])
        return self._choice.sources[origin].used_again(at, key)

    def close(self) -> None:
        for source in self._choice.sources:
            source.close()


STAGING_BYTES = 64 << 20
_PIECE_BYTES = 32 << 20
_PIECE_BLOCKS_MAX = 256
_PIECES_UNDER_WAY = 4
_PIECE_S = 0.1
"""With a rate, a piece is no larger than what may be moved in this time."""
_WAIT_S = 0.05
_ROOM_S = 10.0
"""How long to wait for room that others have to make."""
_LOOK_BLOCKS = 1 << 16
OUTAGE_S = 30.0
"""For so long a tier that fails is asked again, each time after a pause."""
AGAIN_S = 1.0
_FAILS = (Outcome.IO_ERROR, Outcome.TIMEOUT)

_READER, _TIER = 0, 1

Piece = tuple[list[BlockKey], list[int]]
"""Keys, and the row of each in the reader's choice."""


class Copied(msgspec.Struct):
    """What has become of the blocks of one namespace."""

    namespace: str
    asked: int = 0
    already_there: int = 0
    copied: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the first read to the last commit."""
    bad: int = 0
    """Failed their check when they were read."""
    unread: int = 0
    """Could not be read: their store or disk failed."""
    gone: int = 0
    """Were no longer there when they were to be read."""
    not_stored: int = 0
    missing: int = 0
    """Prompts ask for them, and the source does not have them."""
    left: int = 0
    """Not asked for, because of the size that was given or that the tier has."""
    untold: int = 0
    """Are in a store that does not tell of them: it could not be written down."""
    full: bool = False
    """There was no room for more: engines that share the tier hold it, or it is too small."""
    skipped: str = ""
    """Why nothing of it was copied."""

    @property
    def whole(self) -> bool:
        """Whether everything that could be read is where it should be."""
        left_behind = self.bad or self.unread or self.not_stored or self.untold or self.skipped
        return not (left_behind or self.all_gone)

    @property
    def all_gone(self) -> bool:
        """Some blocks may go while they are copied. If all have, they went before."""
        return 0 < self.asked == self.gone


class RateLimit:
    """Keeps a copy below so many bytes a second."""

    def __init__(
        self,
        bytes_per_s: int | None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._due = clock()

    def spend(self, size: int) -> None:
        """Wait until these bytes may be moved."""
        if self.bytes_per_s is None:
            return
        now = self._clock()
        self._due = max(self._due, now) + size / self.bytes_per_s
        self._sleep(self._due - now)


class Sink:
    """One tier that is being filled from one reader."""

    def __init__(
        self,
        tier: Tier,
        mover: Mover,
        reader: ChoiceReader,
        namespace: Namespace,
        pace: RateLimit,
        filling: Filling[Any],
    ) -> None:
        self._tier = tier
        self._filling = filling
        self._written: CopyAudit | None = filling.audit(namespace)
        self._mover = mover
        self._reader = reader
        self._namespace = namespace
        self._pace = pace
        self._flights: dict[int, Piece] = {}
        self._ids = count()
        self.stored: list[BlockKey] = []
        """What was not there before, and is there once all is filled."""
        self._here: list[BlockKey] = []  # what was asked for, and was there before
        self._evicting = False
        self._full = False
        self._again: list[tuple[BlockKey, int]] = []  # could not be written just now
        self._failing_since: float | None = None
        self._told_of_outage = False
        room = _PIECE_BYTES
        if pace.bytes_per_s is not None:
            room = min(room, int(pace.bytes_per_s * _PIECE_S))
        self.piece = max(1, min(_PIECE_BLOCKS_MAX, room // record_bytes(namespace.payload_bytes)))
        """How many blocks are best offered at once."""

    def fill(self, pieces: Iterable[Piece], result: Copied, bar: Progress) -> None:
        """Store all of these that are not there."""
        start = time.monotonic()
        for keys, numbers in pieces:
            self._offer(keys, numbers, result, bar)
            if self._again:
                self._ride_out(result, bar)
        self._land_all(result, bar)
        self._ride_out(result, bar)
        self._count_kept(result)
        result.unread = self._reader.unread
        result.bad = max(0, result.bad - result.unread)
        result.seconds = time.monotonic() - start

    def _offer(
        self, keys: list[BlockKey], numbers: list[int], result: Copied, bar: Progress
    ) -> None:
        number_of = dict(zip(keys, numbers, strict=True))
        left = self._lacking(keys)
        lacking = set(left)
        here = [key for key in keys if key not in lacking]
        if self._written is not None:
            self._written.add(here)
        if self._evicting:
            self._pin(here)
        else:
            self._here += here
        result.already_there += len(here)
        bar.advance(len(here))
        give_up = time.monotonic() + _ROOM_S
        while left and not self._full:
            taken = self._start(left, number_of, result, bar)
            # What was taken may have failed by now, and is lacking again: it is not tried twice.
            left = self._lacking([key for key in left if key not in taken])
            if taken:
                give_up = time.monotonic() + _ROOM_S
            elif left:
                self._full = self._make_room(result, bar) and time.monotonic() > give_up
        result.not_stored += len(left)
        result.full = self._full

    def _land_all(self, result: Copied, bar: Progress) -> None:
        while self._flights:
            self._settle(result, bar)

    def _ride_out(self, result: Copied, bar: Progress) -> None:
        """Try again, after a while, what could not be written: a store may be away for a moment."""
        self._land_all(result, bar)
        while self._again:
            time.sleep(AGAIN_S)
            again, self._again = dict(self._again), []
            self._offer(list(again), list(again.values()), result, bar)
            self._land_all(result, bar)

    def _lacking(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        found = self._tier.lookup(keys)
        return [key for key, at in zip(keys, found, strict=True) if at is Presence.MISS]

    def _start(
        self, keys: list[BlockKey], number_of: dict[BlockKey, int], result: Copied, bar: Progress
    ) -> set[BlockKey]:
        """Reserve room for what there is room for, set it on its way, and say what that is."""
        reserved = self._tier.prepare_store(keys, evict=self._evicting)
        if self._written is not None:
            self._written.drop(reserved.evicted)
        if not reserved.keys:
            return set()
        numbers = [number_of[key] for key in reserved.keys]
        transfer = Transfer(
            id=next(self._ids),
            kind=TransferKind.STORE,
            source=_READER,
            target=_TIER,
            keys=reserved.keys,
            source_spec=Numbers(numbers),
            target_spec=reserved.spec,
            deadline=float("inf"),
        )
        self._flights[transfer.id] = (reserved.keys, numbers)
        self._pace.spend(sum(map(self._namespace.payload_of, reserved.keys)))
        self._mover.submit(transfer)
        while len(self._flights) >= _PIECES_UNDER_WAY:
            self._settle(result, bar)
        return set(reserved.keys)

    def _make_room(self, result: Copied, bar: Progress) -> bool:
        """Wait for room and learn what others have left; whether that is all that can be done."""
        self._settle(result, bar)
        self._tier.refresh()
        if not self._evicting:
            # From here on others go, but none that was copied, or was there: the newest first.
            self._evicting = True
            self._pin(self.stored + self._here)
            return False
        return True

    def _pin(self, keys: Sequence[BlockKey]) -> None:
        found = self._tier.lookup(keys)
        here = [key for key, at in zip(keys, found, strict=True) if at is Presence.HIT]
        self._tier.prepare_load(here)

    def _settle(self, result: Copied, bar: Progress) -> None:
        """Wait a moment, and commit what has landed."""
        self._mover.wait(_WAIT_S)
        for ended in self._mover.poll():
            later = len(self._again)
            landed = self._commit(ended, result)
            later -= len(self._again)
            if self._evicting:
                self._pin(landed)
            size = sum(map(self._namespace.payload_of, landed))
            bar.advance(len(ended.outcomes) + later, size)
        self._tier.tick()
        self._tier.take_events()  # nobody listens

    def _commit(self, ended: TransferResult, result: Copied) -> list[BlockKey]:
        keys, numbers = self._flights.pop(ended.id)
        failed: dict[BlockKey, Outcome] = {}
        for key, number, outcome in zip(keys, numbers, ended.outcomes, strict=True):
            if outcome.ok:
                continue
            failed[key] = outcome
            gone = outcome is Outcome.GONE
            if gone or (outcome is Outcome.CORRUPT and self._reader.used_again(number, key)):
                result.gone += 1
            elif outcome is Outcome.CORRUPT:
                result.bad += 1
            elif outcome in _FAILS and self._may_come_back():
                self._again.append((key, number))
            else:
                result.not_stored += 1
        self._tier.complete_store(keys, failed)
        landed = [key for key in keys if key not in failed] if failed else keys
        if landed:
            self._failing_since = None
        self.stored += landed
        return landed

    def _may_come_back(self) -> bool:
        """Whether a tier that fails has not done so for long; says so once."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if not self._told_of_outage:
            self._told_of_outage = True
            warn(f"blocks cannot be written: trying again, for {OUTAGE_S:.0f} s")
        return now - self._failing_since < OUTAGE_S

    def _count_kept(self, result: Copied) -> None:
        """Only now, because a tier that others share may have had to let something go."""
        stored, self.stored = self.stored, []
        for start in range(0, len(stored), _LOOK_BLOCKS):
            keys = stored[start : start + _LOOK_BLOCKS]
            lost = self._lacking(keys)
            gone = set(lost)
            kept = [key for key in keys if key not in gone]
            self.stored += kept
            if self._written is not None:
                self._written.add(kept)
            result.not_stored += len(lost)
            result.copied += len(keys) - len(lost)
            result.bytes += sum(map(self._namespace.payload_of, keys))
            result.bytes -= sum(map(self._namespace.payload_of, lost))

    def carry_uses(self, used: Mapping[BlockKey, tuple[int, float]]) -> None:
        """Take along how often what was stored was used where it came from. Of what was there
        before nothing is said, so that none counts twice."""
        try:
            carried = {key: used[key] for key in self.stored if key in used}
            self._filling.carry_uses(self._tier, self._namespace, carried)
        except MediumError as error:  # the blocks are there all the same
            warn(f"how often they were used did not come along: {error}")

    def say_interrupted(self) -> None:
        """What was copied before."""
        size = amounts.size(sum(map(self._namespace.payload_of, self.stored)))
        with suppress(OSError):  # the terminal may have gone
            warn(
                f"interrupted: {len(self.stored)} blocks ({size}) of the namespace "
                f"{self._namespace.id[:12]} were copied, and stay: run it again to go on"
            )

    def flush(self) -> None:
        """Have written down what was stored, however long it takes: a listing may be under way."""
        self._tier.flush()

    def close(self) -> None:
        """Let what is being written land, drop the rest, and close everything, within seconds. What
        was stored is written down as far as that goes."""
        self._mover.close()
        unheard = Copied("")
        for ended in self._mover.poll():
            self._commit(ended, unheard)
        self._tier.close()

    def check(self, result: Copied) -> None:
        """Ask the tier, once all is closed, whether it has written down what was copied."""
        if self._written is not None:
            result.untold = self._written.missing()


@contextmanager
def open_sink(
    filling: Filling[Any],
    namespace: Namespace,
    reader: ChoiceReader,
    pace: RateLimit,
) -> Iterator[Sink]:
    """A tier that is to be filled, opened; the reader is closed with it."""
    sink: Sink | None = None
    try:
        with filling.alone():
            try:
                with uninterrupted():
                    sink = _open(filling, namespace, reader, pace)
                yield sink
                sink.flush()  # only who is not told to end waits for it
            finally:
                if sink is not None:
                    with uninterrupted():
                        sink.close()
    except KeyboardInterrupt:
        if sink is not None:
            sink.say_interrupted()
        raise
    finally:
        if sink is None:
            reader.close()


def _open(
    filling: Filling[Any], namespace: Namespace, reader: ChoiceReader, pace: RateLimit
) -> Sink:
    filling.check(namespace)
    tier, handler = filling.open(namespace)
    try:
        mover = ThreadMover([reader, handler], namespace, staging_bytes=STAGING_BYTES)
    except BaseException:
        tier.close()
        raise
    return Sink(tier, mover, reader, namespace, pace, filling)
