"""The catalogue side: which blocks are in the folder, which may come, which must go."""

from __future__ import annotations

import fcntl
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvtier.errors import MediumError, NotResident
from kvtier.interfaces.tier import Tier
from kvtier.system.disk import Disk
from kvtier.types import (
    BlockKey,
    EventKind,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)
from kvtier_folder.medium import BLOCK, PART, FolderSpec, key_of, size_of

log = logging.getLogger("kvtier.folder")


class FolderTier(Tier):
    """Least recently used goes first; one process at a time.

    A key is in at most one of three places: `_reserved` (on its way in), `_resident` (a hit), or
    `_doomed` (offered to nobody, but its file is still there: pinned, or impossible to remove).
    """

    medium = "folder"

    def __init__(self, folder: Path, capacity: int, namespace: Namespace, disk: Disk) -> None:
        self._folder = folder
        self._namespace = namespace
        self._disk = disk
        self._resident: OrderedDict[BlockKey, None] = OrderedDict()  # coldest first
        self._reserved: set[BlockKey] = set()
        self._unwanted: set[BlockKey] = set()
        self._doomed: set[BlockKey] = set()
        self._pins: Counter[BlockKey] = Counter()
        self._events: list[TierEvent] = []
        self._stats = TierStats(self.medium, bytes_capacity=capacity)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = _open_private(self._folder / "lock")
            try:
                self._attach()
            except BaseException:
                self.close()  # or it would stay locked
                raise
        except OSError as error:
            raise MediumError(f"cannot use {folder}: {error}; free it or name another") from error

    # What is on the medium: one file a block, which has its name only once it is committed.

    def _attach(self) -> None:
        """Lock the folder and take in what earlier processes committed to it."""
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in self._folder.glob(f"*{PART}"):
            self._disk.unlink(path)
        if not self._is_ours():
            for path in self._folder.glob(f"*{BLOCK}"):
                self._disk.unlink(path)
            with _open_private(self._folder / "namespace.json") as file:
                file.write(self._namespace.to_json())
        files = {path: path.stat() for path in self._folder.glob(f"*{BLOCK}")}
        for path in sorted(files, key=lambda path: files[path].st_mtime_ns):
            key = key_of(path)
            if key is None or files[path].st_size != self._size(key):
                self._disk.unlink(path)
                continue
            self._resident[key] = None
            self._stats.bytes_used += self._size(key)
        self._make_room(0, ())  # the capacity may have been larger once

    def _is_ours(self) -> bool:
        """Whether the blocks in the folder are of this namespace; says why not."""
        try:
            theirs = Namespace.from_json((self._folder / "namespace.json").read_bytes())
        except FileNotFoundError:
            return False
        except (msgspec.DecodeError, ValueError):
            log.warning("%s has no readable namespace.json and is emptied", self._folder)
            return False
        for difference in self._namespace.differences(theirs):
            log.warning("%s is of another model and is emptied: %s", self._folder, difference)
        return theirs.digest == self._namespace.digest

    def _size(self, key: BlockKey) -> int:
        return size_of(key, self._namespace)

    def _sweep(self) -> None:
        """Remove the files of doomed blocks that nobody reads; one that stays takes room."""
        for key in [key for key in self._doomed if key not in self._pins]:
            try:
                self._disk.unlink(self._folder / (key.hex() + PART))
                self._disk.unlink(self._folder / (key.hex() + BLOCK))
            except OSError as error:
                log.warning("cannot remove %s yet: %s", key.hex(), error)
                continue
            self._doomed.discard(key)
            self._stats.bytes_used -= self._size(key)

    def _rename(self, key: BlockKey, old: str, new: str) -> bool:
        """A block is there when it has its name, and whole: so a rename commits, or takes back."""
        try:
            self._disk.rename(self._folder / (key.hex() + old), self._folder / (key.hex() + new))
        except OSError as error:
            log.warning("cannot rename %s to %s: %s", key.hex(), new, error)
            return False
        return True

    def _make_room(self, size: int, spared: Collection[BlockKey]) -> list[BlockKey]:
        """Evict until `size` bytes fit, if they can."""
        short = self._stats.bytes_used + size - self._stats.bytes_capacity
        evicted = []
        for key in self._resident:  # not all of them: there may be a million
            if short <= 0:
                break
            if key not in self._pins and key not in spared:
                evicted.append(key)
                short -= self._size(key)
        self._drop(evicted)
        self._stats.evicted += len(evicted)
        return evicted

    def _fits(self, size: int) -> bool:
        return self._stats.bytes_used + size <= self._stats.bytes_capacity

    def _drop(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            del self._resident[key]
            self._doomed.add(key)
            if key in self._pins:  # not removed yet, but a restart must not find it
                self._rename(key, BLOCK, PART)
        self._sweep()
        self._announce(EventKind.REMOVED, keys)

    # The contract, in the order of `kvtier.interfaces.tier.Tier`.

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        return [self._presence(key) for key in keys]

    def _presence(self, key: BlockKey) -> Presence:
        if key in self._resident:
            return Presence.HIT
        return Presence.PENDING if key in self._reserved else Presence.MISS

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        missing = sum(key not in self._resident for key in keys)
        if missing:
            raise NotResident(f"{missing} of {len(keys)} keys are not resident: look up first")
        self._pins.update(keys)
        return FolderSpec([key.hex() + BLOCK for key in keys])

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        for outcome in (failed or {}).values():
            self._stats.corrupt += outcome is Outcome.CORRUPT
        self._pins.subtract(keys)
        self._pins = +self._pins  # forgets the keys that nobody pins any more
        self._drop([key for key in failed or {} if key in self._resident])

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        taken: list[BlockKey] = []
        evicted: list[BlockKey] = []
        offered = set(keys)
        for key in keys:
            if key in self._resident or key in self._reserved or key in self._doomed:
                continue
            size = self._size(key)
            if evict:
                evicted += self._make_room(size, offered)
            if not self._fits(size):
                self._stats.dropped += 1
                continue
            self._reserved.add(key)
            self._stats.bytes_used += size
            taken.append(key)
        return Reservation(taken, FolderSpec([key.hex() + PART for key in taken]), evicted)

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        committed = []
        for key in keys:
            if key not in self._reserved:
                continue
            self._reserved.discard(key)
            if (
                key not in self._unwanted
                and key not in (failed or {})
                and self._rename(key, PART, BLOCK)
            ):
                self._resident[key] = None
                committed.append(key)
            else:
                self._unwanted.discard(key)
                self._doomed.add(key)
                self._stats.dropped += 1
        self._sweep()
        self._stats.stored += len(committed)
        self._announce(EventKind.STORED, committed)

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        for key in reversed(keys):  # so that the head of a prefix outlives its tail
            if key in self._resident:
                self._resident.move_to_end(key)

    def victims(self, count: int) -> list[BlockKey]:
        return list(islice((key for key in self._resident if key not in self._pins), count))

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._drop([key for key in dict.fromkeys(keys) if key in self._resident])

    def clear(self) -> None:
        self._unwanted |= self._reserved
        self._drop(list(self._resident))

    def _announce(self, kind: EventKind, keys: Collection[BlockKey]) -> None:
        if keys:
            self._events.append(TierEvent(kind, self.medium, tuple(keys)))

    def take_events(self) -> list[TierEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> TierStats:
        self._stats.blocks = len(self._resident)
        self._stats.pinned = len(self._pins)
        self._stats.in_flight = len(self._reserved)
        return copy(self._stats)

    def tick(self) -> None:
        self._sweep()

    def close(self) -> None:
        self._lock.close()  # and with it goes the lock on the folder


def _open_private(path: Path) -> BinaryIO:
    """A file that is nobody else's business, empty."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
