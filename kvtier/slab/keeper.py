"""What a tier of slabs must do on its medium, kept off the thread that asks it questions.

The keeper runs in a thread of its own and does all the file work: it finds slabs that others made,
re-reads tables that changed, adopts slabs of the dead, makes new slabs before room runs out, gives
room to neighbours that lack it, and writes down what was dropped. What it learns it queues as
updates, which the tier applies at its next call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from kvtier.errors import FormatError, MediumError, NewerFormat
from kvtier.settings import WritePolicy
from kvtier.slab import layout
from kvtier.slab.files import (
    NOBODY,
    FolderBusy,
    SlabFile,
    has_name,
    hide_entry,
    hold_owner,
    let_go,
    owner_path,
    write_entries,
)
from kvtier.slab.folder import FolderLimits, SlabFolder, differs_in
from kvtier.slab.layout import SLOT_BITS, SLOT_MASK
from kvtier.slab.shares import Shares, create_slab
from kvtier.slab.watch import Known, Problems, SlabUpdate, SlabWatch
from kvtier.system.disk import Disk
from kvtier.types import BlockKey

logger = logging.getLogger(__name__)

_REQUESTS_MAX = 4096
"""So many requests are remembered between two writings."""
_SLOTS_MAX = 8192
"""At most so many entries are written at once, those that were used most: it takes some 50 ms of
a thread that shares its interpreter with the engine's scheduler."""


class UseLog:
    """What a tier's requests have used since it was written down last.

    `note` and `carry` are for the tier's thread and `write` for the keeper's.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._noted: deque[Sequence[int]] = deque(maxlen=_REQUESTS_MAX)
        self._carried: deque[Mapping[int, tuple[int, int]]] = deque()
        self._clock = clock

    def note(self, places: Sequence[int]) -> None:
        """A request has used the blocks in these places (see NvmeSpec)."""
        self._noted.append(places)

    def carry(self, used: Mapping[int, tuple[int, int]]) -> None:
        """The blocks in these places were used so often elsewhere, and then at last."""
        self._carried.append(used)

    def write(self, disk: Disk, mine: Set[int], table_of: Callable[[int], Path]) -> None:
        """Write down what was noted of these slabs, the only ones that are ours to write to."""
        while self._carried:
            self._write(disk, mine, table_of, self._carried.popleft())
        counts: Counter[int] = Counter()
        while self._noted:
            counts.update(self._noted.popleft())
        now = int(self._clock())
        noted = {place: (count, now) for place, count in counts.most_common(_SLOTS_MAX)}
        self._write(disk, mine, table_of, noted)

    def _write(
        self,
        disk: Disk,
        mine: Set[int],
        table_of: Callable[[int], Path],
        used: Mapping[int, tuple[int, int]],
    ) -> None:
        slabs: dict[int, dict[int, tuple[int, int]]] = {}
        for place, counted in used.items():
            if place >> SLOT_BITS in mine:
                slabs.setdefault(place >> SLOT_BITS, {})[place & SLOT_MASK] = counted
        for slab_id, slots in slabs.items():
            self._write_slab(disk, table_of(slab_id), slots)

    def _write_slab(self, disk: Disk, table: Path, used: Mapping[int, tuple[int, int]]) -> None:
        fd = disk.open(table)
        try:
            slots = sorted(used)
            for start, stop in layout.runs(slots):
                entries = bytearray((stop - start) * layout.ENTRY_BYTES)
                at = layout.entry_at(slots[start])
                if disk.readv(fd, [memoryview(entries)], at) != len(entries):
                    return
                for slot in slots[start:stop]:
                    # Only these eight bytes: the rest of the entry is the handler's to write.
                    here = layout.entry_at(slot)
                    entry = memoryview(entries)[here - at :][: layout.ENTRY_BYTES]
                    text = layout.add_uses(entry, *used[slot])
                    disk.writev(fd, [memoryview(text)], here + layout.USES_AT)
        finally:
            disk.close(fd)


_LOOK_S = 0.02
"""How long another process's commit may stay unknown here."""
_LOOK_SHARE = 10
"""A look around takes at most one part in so many of a core, however many slabs there are."""
_WORK_SHARE = 20
"""And all housekeeping together one part in so many: the engine's own thread waits for it."""
_UPDATES_MAX = 64
"""With more that the tier has not taken in, the keeper does not look: nobody may ask for days, and
what happens meanwhile is one difference later on."""
_GIVEN_ROUNDS = 3
"""So long what was given away is left to those who lack room, before it is taken back."""
_USES_S = 10.0
_CLOSE_S = 2.0
"""Who closes waits no longer for a disk that hangs: what is not written down by then is lost."""


class WriteLeases(Protocol):
    """What an engine may write to a medium with a write budget."""

    def begin(self, when_short: Callable[[], None]) -> None:
        """Take the first lease; who runs short says so."""

    def renew(self, *, at_once: bool = False) -> None:
        """Take, or give back, what is due; raises OSError, or MediumError."""

    def close(self) -> None:
        """Give back what is left; raises OSError, or MediumError."""


class SlabKeeper:
    """The file work of one tier. `updates` is a queue from the keeper to the tier; `want_room`,
    `record`, `release` and `flush` are the other direction."""

    def __init__(
        self, folder: SlabFolder, limits: FolderLimits, leases: WriteLeases | None = None
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.owner, self._owner_fd = folder.claim()
        self.updates: deque[SlabUpdate] = deque()
        self.uses = UseLog()
        self.when_idle: Callable[[], None] = lambda: None
        """Called between rounds: a tier that nobody calls must apply its updates all the same."""
        self.at_end: Callable[[], None] = lambda: None
        """Called once, when there is no further round."""
        self._problems = Problems(folder.root)
        self.warn_once = self._problems.warn_once
        self._watch = SlabWatch(folder, self.updates, self._problems)
        self._known, self._broken = self._watch.known, self._watch.broken
        self._given: dict[int, float] = {}
        self._todo: deque[tuple[int, int, bytes]] = deque()
        self._hidden: deque[tuple[int, int, BlockKey]] = deque()
        self._released: deque[tuple[int, bool]] = deque()
        self._slots_wanted = 0
        self._shares = Shares(folder, limits)
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._look_took = self._next_housekeeping = self._next_uses = self._full_until = 0.0
        self._between = folder.between_s
        self.unwell = False
        """Whether the last round came to nothing."""
        self._takes_nothing = False
        """It owns no slab, and none can be made: not for the lack of room, which is no failure."""
        self._thread: threading.Thread | None = None
        self._leases = leases
        if leases is not None:
            with self._problems.tolerated((OSError, MediumError)):
                leases.begin(self._wake.set)

    @property
    def trouble(self) -> str:
        """What went wrong last."""
        return self._problems.last

    def start(self) -> None:
        """Begin to work in the background. Raises RuntimeError if the system gives no thread."""
        thread = threading.Thread(target=self._run, name="kvtier-keeper", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self.pause())
            self._wake.clear()
            if not self._stopping:
                self.work()
                with self._problems.tolerated(Exception):
                    self.when_idle()
        with self._problems.tolerated(Exception):
            self.at_end()
        self._end()

    def pause(self) -> float:
        """How long to sleep if nobody wants anything."""
        alone = all(known.mine for known in list(self._known.values()))  # others may work meanwhile
        return max(self.folder.between_s / 4 if alone else _LOOK_S, _LOOK_SHARE * self._look_took)

    def work(self, *, thorough: bool = False) -> None:
        """One round; `thorough` does the rarer parts too, whatever the time."""
        with self._mutex:
            try:
                self._round(thorough)
                self.unwell = self._takes_nothing
            except Exception as error:  # noqa: BLE001 - without this thread no slab is made
                self.unwell = True
                self._problems.report(error)

    def _round(self, thorough: bool) -> None:
        if not has_name(self._owner_fd, owner_path(self.folder.owners, self.owner)):
            self._begin_again()
        self._write_down()
        if self._leases is not None:
            with self._problems.tolerated((OSError, MediumError)):
                self._leases.renew(at_once=thorough)
        if not self._look():
            return
        now = time.monotonic()
        if thorough or now >= self._next_housekeeping or self._slots_wanted:
            began = time.thread_time()
            self._adopt_orphans()
            try:
                self._make_room()
                self._takes_nothing = False
            except OSError as error:
                self._problems.report(error)
                self._takes_nothing = not self._mine()
            self._share()
            self._write_uses(now, thorough)
            took = time.thread_time() - began
            self._between = max(self.folder.between_s, _WORK_SHARE * took)
            self._next_housekeeping = now + self._between

    def _begin_again(self) -> None:
        """The folder has been removed under us, or what makes us an owner: make it anew, unless its
        disk was taken off. Slabs that are left are orphans now, like all others of the dead. A mark
        that is there again as another file, as after a copy, nobody holds: it is held anew."""
        self.updates.extend(SlabUpdate(known.slab, gone=True) for known in self._known.values())
        self._known.clear()
        try:
            owner, fd = self.owner, hold_owner(self.folder.owners, self.owner)
        except (FileNotFoundError, NotADirectoryError):
            self.folder.establish()
            owner, fd = self.folder.claim()
            self._problems.warn_once(f"{self.folder.root} was removed: starting over in another")
        self._shares.begin_again()
        os.close(self._owner_fd)
        self.owner, self._owner_fd = owner, fd

    # -- looking ---------------------------------------------------------------------------

    def _look(self) -> bool:
        """Learn what has changed, unless the tier has enough to take in."""
        if len(self.updates) > _UPDATES_MAX:
            return False
        began = time.thread_time()
        self._watch.look()
        self._look_took = time.thread_time() - began
        return True

    # -- owning ----------------------------------------------------------------------------

    def _adopt_orphans(self) -> None:
        theirs = [known.slab for known in self._known.values() if not known.mine]
        owners = {slab.owner for slab in theirs}
        # Our own, too: it was lost from sight for a while.
        dead = {owner for owner in owners if owner == self.owner or not self.folder.alive(owner)}
        now = time.monotonic()
        self._given = {slab_id: until for slab_id, until in self._given.items() if until > now}
        for slab in theirs:
            if slab.owner != NOBODY:
                self._given.pop(slab.id, None)  # whoever it was for has had it
        orphans = [slab for slab in theirs if slab.owner in dead and slab.id not in self._given]
        if not orphans and not self._broken:
            return
        with self.folder.locked():
            # The coldest first, as the tier takes in the blocks of one slab.
            for orphan in sorted(orphans, key=lambda slab: self.folder.last_used(slab.id)):
                with (
                    self._problems.tolerated(),
                    contextlib.suppress(FormatError, FileNotFoundError),
                ):
                    self._adopt(orphan.id)
            if self._broken and self.folder.is_only_owner(self.owner):
                while self._broken:
                    with self._problems.tolerated():
                        self._remove_broken(self._broken.pop())

    def _adopt(self, slab_id: int) -> None:
        slab, table = self.folder.read_table(slab_id)
        if slab.owner != self.owner and self.folder.alive(slab.owner):
            return
        header = slab.header
        if header.flags & layout.FLAG_DISCARD or header.slot_bytes != self.limits.slot_bytes:
            self.folder.remove_slab(slab_id)
            return
        self.folder.write_owner(slab_id, self.owner)
        self._known[slab_id] = Known(slab, True)
        self.updates.append(SlabUpdate(slab, mine=True, table=table))

    def _remove_broken(self, slab_id: int) -> None:
        """Look once more, because a read may go wrong where nothing is."""
        try:
            self.folder.read_table(slab_id)
        except (NewerFormat, OSError):
            return
        except FormatError:
            self.folder.remove_slab(slab_id)

    def _make_room(self) -> None:
        """More slabs, if they are wanted and the budget and the floor allow it."""
        mine = self._mine()
        wanted, self._slots_wanted = self._slots_wanted, 0
        self._shares.introduce(self._owner_fd)
        if not mine and self.limits.grows:
            wanted = max(wanted, 1)
        if not wanted:
            self._shares.tell(self._owner_fd, lacks_room=False)
        slots = max(1, self.limits.slab_bytes // self.limits.slot_bytes)
        while wanted > 0 and not self._stopping:
            known = [each.slab for each in self._known.values()]
            limits = self._shares.limits(self.owner, mine, known)
            slab = create_slab(self.folder, self.owner, slots, limits) if limits else None
            if slab is None:
                self._full_until = time.monotonic() + self._between
                lacks = self._shares.lacks(self.owner, mine, slots * self.limits.slot_bytes)
                self._shares.tell(self._owner_fd, lacks_room=lacks)
                return
            mine.append(slab)
            wanted -= slab.header.slots
            self._known[slab.id] = Known(slab, True)
            self.updates.append(SlabUpdate(slab, mine=True))
            self._shares.tell(self._owner_fd, lacks_room=False)

    def _mine(self) -> list[SlabFile]:
        return [known.slab for known in self._known.values() if known.mine]

    def _share(self) -> None:
        """Let go of a slab that others are to have, and leave its room to them for a while."""
        excess = self._shares.excess(self.owner, self._mine())
        if excess is not None:
            self.updates.append(excess)
            self._full_until = time.monotonic() + _GIVEN_ROUNDS * self._between

    # -- what the tier asks for --------------------------------------------------------------

    def want_room(self, slots: int) -> None:
        """So many slots should be made."""
        if self.limits.grows and time.monotonic() >= self._full_until:
            self._slots_wanted = max(self._slots_wanted, slots)
            self._wake.set()

    def record(self, slab_id: int, slot: int, state: int, key: BlockKey) -> None:
        """Write an entry down soon: dropped (FREE, no key) or quarantined (BAD). An update
        says when it is done; until then the slot must not be used."""
        self._todo.append((slab_id, slot, layout.pack_entries(state, [key], 0, 0)))
        self._wake.set()

    def hide(self, slab_id: int, slot: int, key: BlockKey) -> None:
        """Take an evicted block out of the table soon, if it still stands there: its slot is being
        given to another."""
        self._hidden.append((slab_id, slot, key))
        self._wake.set()

    def release(self, slab_id: int, *, remove: bool) -> None:
        """The tier has let go of a slab: hand it over, or delete it."""
        self._released.append((slab_id, remove))
        self._wake.set()

    def flush(self) -> None:
        """Write everything down that the tier has recorded so far."""
        with self._mutex:
            try:
                self._write_down()
            except (OSError, MediumError) as error:
                self._problems.report(error)

    def _write_down(self) -> None:
        """What cannot be written waits for the next round, before what comes until then."""
        by_slab: dict[int, dict[int, bytes]] = {}
        # Counted first: what was recorded of a slab before it was let go is written before, too.
        released = len(self._released)
        while self._todo:
            slab_id, slot, entry = self._todo.popleft()
            by_slab.setdefault(slab_id, {})[slot] = entry
        for slab_id in list(by_slab):
            with self._problems.tolerated():
                table = self.folder.table_path(slab_id)
                write_entries(self.folder.disk, table, by_slab[slab_id])
                written = list(by_slab.pop(slab_id))
                if known := self._known.get(slab_id):
                    self.updates.append(SlabUpdate(known.slab, written=written))
        for hidden in list(self._hidden):
            slab_id, slot, key = hidden
            with self._problems.tolerated():
                hide_entry(self.folder.disk, self.folder.table_path(slab_id), slot, key)
                self._hidden.remove(hidden)
        left = [(i, slot, each) for i, rows in by_slab.items() for slot, each in rows.items()]
        self._todo.extendleft(reversed(left))
        due = [self._released.popleft() for _ in range(released)]
        try:
            for slab_id, remove in due.copy():
                if remove or slab_id not in by_slab:
                    with self._problems.tolerated((OSError, FolderBusy)):
                        self._hand_over(slab_id, remove)
                        due.remove((slab_id, remove))
        finally:
            self._released.extendleft(reversed(due))

    def _write_uses(self, now: float, at_once: bool) -> None:
        if at_once or now >= self._next_uses:
            self._next_uses = now + _USES_S
            mine = {slab_id for slab_id, known in self._known.items() if known.mine}
            self.uses.write(self.folder.disk, mine, self.folder.table_path)

    def _hand_over(self, slab_id: int, remove: bool) -> None:
        with self.folder.locked():
            if remove:
                self.folder.remove_slab(slab_id)
            elif slab_id in self._known:
                self.folder.write_owner(slab_id, NOBODY)
                self._given[slab_id] = time.monotonic() + _GIVEN_ROUNDS * self._between
        self._known.pop(slab_id, None)

    def close(self) -> None:
        """Stop; slabs that need not outlive the process are deleted."""
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            self._end()
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._problems.warn_once(f"{self.folder.root} does not answer: closing without it")

    def _end(self) -> None:
        with self._mutex, contextlib.suppress(OSError, MediumError):
            self._write_down()
            if self.limits.discard:
                with self.folder.locked():
                    for slab_id in [i for i, known in self._known.items() if known.mine]:
                        self.folder.remove_slab(slab_id)
            else:
                self._write_uses(0.0, at_once=True)
        if self._leases is not None:
            with contextlib.suppress(OSError, MediumError):
                self._leases.close()
        let_go(self.folder.owners, self.owner, self._owner_fd)


_READ_ONLY_LOOK_S = 1.0
"""Most such folders never change. Where somebody writes beside us, it is known so much later."""


def only_reads(path: Path, write: WritePolicy) -> bool:
    """Whether a tier of these settings has no more than its reading to do in this folder."""
    return write is WritePolicy.NEVER and path.is_dir() and not os.access(path, os.W_OK | os.X_OK)


class ReadOnlyFolder(SlabFolder):
    """One namespace's part of a folder in which nothing is ever written."""

    settled_ns = 1 << 63
    """Never: it may be another machine's, and not say when something has come."""

    def establish(self) -> None:
        """Say what is in the way; raises MediumError where blocks are that cannot be read."""
        if not self.home.is_dir():
            facts = differs_in(self.root, self.namespace)
            logger.warning(
                "%s is only read, and has nothing of this model%s",
                self.root,
                f" as it is now; what it has does not fit: {facts}" if facts else "",
            )
        elif not os.access(self.home, os.R_OK | os.X_OK):
            raise MediumError(f"no right to read {self.home}: run this as its owner, or allow it")

    def claim(self) -> tuple[int, int]:
        return NOBODY, -1

    def alive(self, owner: int) -> bool:
        """Nobody can tell here. Whom nobody succeeds must not be waited for: they all are."""
        return True


class ReadOnlySlabKeeper(SlabKeeper):
    """A keeper that only looks."""

    def pause(self) -> float:
        return max(_READ_ONLY_LOOK_S, _LOOK_SHARE * self._look_took)

    def _round(self, thorough: bool) -> None:
        self._look()

    def flush(self) -> None:
        """Nothing is written down."""

    def _end(self) -> None:
        """Nothing is to be let go of."""
