"""How often blocks were used and which are retained, as servers write it down beside manifests.

    <namespace>/uses/<writer>-<number>
    <namespace>/retained/<writer>

A list is a manifest with entries of a kind of its own. A list of uses has a count in place of the
size, and each server writes one now and then of what its requests have used most. A server that
finds many joins them into one that names those it covers, so that none counts twice. These are only
statistics: the caretaker evicts by them, and `--hottest` chooses by them. What a dead server had
not written, and what cannot be read, does not count. A list of retained blocks has the ends of the
retentions; it counts while its server lives.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvtier.backends.object import manifests
from kvtier.backends.object.gil_yield import CHUNK
from kvtier.backends.object.manifests import ENTRY, RETAINED, USED, Entries
from kvtier.backends.object.object_names import parse_uses, retained_prefix, uses_prefix
from kvtier.backends.object.stores.errors import Forbidden, LengthMismatch, StoreError
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.errors import FormatError, NewerFormat
from kvtier.types import BlockKey

_log = logging.getLogger(__name__)

_REQUESTS_MAX = 4096
"""So many requests are remembered between two looks."""
_BLOCKS_MAX = 1 << 16
"""So many blocks are counted between two lists. If there are more, only those that are used more
than the median are kept."""
_JOINED_MAX = 1 << 16
_LIST_BYTES_MAX = 5 << 20
_JOIN_MIN = 16
"""So many lists are joined into one."""
_LISTS_MAX = 64
_LISTS_BYTES_MAX = 24 << 20
"""Of all lists that are read at once: one sum and the lists that are not in it yet have less."""
_COUNT_MAX = (1 << 32) - 1


class Uses:
    """Counts what the requests of one server use. `note` and `retain` are for the tier's thread,
    the rest for the keeper's."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        writer: str,
        every_s: float,
        pause: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._writer = writer
        self._every_s = every_s
        self._pause = pause
        self._clock = clock
        self._number = 0
        self._next = clock() + every_s
        self._noted: deque[Sequence[BlockKey]] = deque(maxlen=_REQUESTS_MAX)
        self._counts: Counter[BlockKey] = Counter()
        self._retained: Mapping[BlockKey, float] = {}
        self._stated: Mapping[BlockKey, float] = self._retained
        """What our list in the store says."""
        self._undeleted = 0
        """So many lists have been joined that the store would not delete."""

    def note(self, keys: Sequence[BlockKey]) -> None:
        """A request has used these blocks."""
        self._noted.append(keys)

    def retain(self, blocks: Mapping[BlockKey, float]) -> None:
        """These blocks are retained now, each until a time in seconds of the epoch."""
        self._retained = blocks

    def look(self) -> None:
        """Write lists when they are due. An error holds up nothing else: the next list has all
        counts."""
        self.count()
        if self._clock() >= self._next:
            self._next = self._clock() + self._every_s
            try:
                self._write()
                self._write_retained()
            except StoreError as error:
                _log.debug("uses are not written down: %s", error)

    def carry(self, used: Mapping[BlockKey, tuple[int, float]]) -> None:
        """Write how often these blocks were used, and when last, where they came from. Of very many
        only the most used count. Raises StoreError."""
        chosen = dict(nlargest(_JOINED_MAX, used.items(), key=itemgetter(1)))
        if chosen:
            counts, times = zip(*chosen.values(), strict=True)
            times_us = [int(at * 1e6) for at in times]
            self._put(manifests.pack_entries(USED, list(chosen), 0, counts, times_us))
            self._join()

    def count(self) -> None:
        """Turn noted requests into counts, which take less memory."""
        while self._noted:
            self._counts.update(self._noted.popleft())
            if len(self._counts) > _BLOCKS_MAX:
                most = np.median(np.fromiter(self._counts.values(), np.uint64))
                self._counts = Counter({k: n for k, n in self._counts.items() if n > most})
            self._pause()

    def close(self) -> None:
        """Write the last list, and retain nothing more."""
        self._next = 0.0
        self._retained = {}
        self.look()

    def _write(self) -> None:
        if not self._counts:
            return
        now_us = int(time.time() * 1e6)
        pieces = []
        counts = iter(self._counts.items())
        while some := dict(islice(counts, CHUNK)):
            keys, uses = list(some), list(some.values())
            pieces.append(manifests.pack_entries(USED, keys, 0, uses, now_us))
            self._pause()
        self._put(manifests.joined(pieces))
        self._counts.clear()
        self._join()

    def _write_retained(self) -> None:
        blocks = self._retained
        if blocks is self._stated:
            return
        name = f"{retained_prefix(self._namespace)}{self._writer}"
        if blocks:
            ends = [int(min(until, 1e10) * 1e6) for until in blocks.values()]
            entries = manifests.pack_entries(RETAINED, list(blocks), 0, 0, ends)
            self._store.put(name, manifests.pack(bytes.fromhex(self._namespace), entries))
        elif self._stated:
            self._store.delete([name])
        self._stated = blocks

    def _join(self) -> None:
        most = _JOIN_MIN + self._undeleted
        if sum(1 for _ in islice(_listed(self._store, self._namespace), most)) < most:
            return
        lists = _Lists(self._store, self._namespace)
        if len(lists.names) < (2 if lists.left_out else _JOIN_MIN):
            return
        entries = lists.sum()
        if len(entries) > _JOINED_MAX:  # so old uses count less and less
            entries = entries[np.argsort(entries["size"])[-_JOINED_MAX:]]
            entries["size"] //= 2
        self._put(entries, lists.names)
        names = [f"{uses_prefix(self._namespace)}{name}" for name in lists.names]
        self._undeleted = len(self._store.delete(names))

    def _put(self, entries: Entries, covers: Sequence[str] = ()) -> None:
        name = f"{uses_prefix(self._namespace)}{self._writer}-{self._number:010d}"
        self._number += 1
        self._store.put(name, manifests.pack(bytes.fromhex(self._namespace), entries, covers))


class _Lists:
    """Reads the lists of a namespace; raises StoreError.

    `names` are those that their sum may replace: also damaged ones, but not those of a newer
    version, nor those that may not be read.
    """

    def __init__(self, store: Store, namespace: str, skipped: Collection[str] = ()) -> None:
        self.names: list[str] = []
        self.left_out = False
        """Whether there were too many bytes to read them all."""
        self.read: list[tuple[list[str], str, Entries]] = []
        left = _LISTS_BYTES_MAX
        for name, info in islice(_listed(store, namespace), _LISTS_MAX):
            if name in skipped:
                self.names.append(name)
                continue
            size = info.size if info.size <= _LIST_BYTES_MAX else 0
            if size > left:
                self.left_out = True  # for the next server that joins
                continue
            left -= size
            try:
                found = _read_list(store, namespace, info.name, size, USED)
            except (NewerFormat, Forbidden):
                continue
            except (FormatError, LengthMismatch):
                self.names.append(name)
                continue
            if found is not None:  # else another server joins it
                self.names.append(name)
                self.read.append((found[1], name, found[0]))

    def sum(self) -> Entries:
        """One entry for each block, with all its uses and the time of the latest."""
        joined = {name for covers, _, _ in self.read for name in covers}
        counted: set[str] = set()
        pieces = [np.zeros(0, ENTRY)]
        for covers, name, entries in sorted(self.read, key=lambda read: -len(read[0])):
            if name not in joined and counted.isdisjoint(covers):
                counted.update(covers)
                pieces.append(entries)
        entries = manifests.joined(pieces)
        _, first, which = np.unique(
            manifests.key_prints(entries), return_index=True, return_inverse=True
        )
        counts, times = np.zeros((2, len(first)), np.uint64)
        np.add.at(counts, which, np.minimum(entries["size"], _COUNT_MAX))
        np.maximum.at(times, which, entries["time_us"])
        found = entries[first]
        found["size"] = np.minimum(counts, _COUNT_MAX)
        found["time_us"] = times
        return found


def _listed(store: Store, namespace: str) -> Iterator[tuple[str, ObjectInfo]]:
    """The names of the lists of a namespace."""
    for info in store.list(uses_prefix(namespace)):
        if name := parse_uses(info.name):
            yield name, info


def _read_list(
    store: Store, namespace: str, name: str, size: int, kind: int
) -> tuple[Entries, list[str]] | None:
    data = memoryview(bytearray(size))
    length = store.get(name, data)
    if length is None:
        return None
    return manifests.unpack(data[:length], bytes.fromhex(namespace), kinds=(kind,))


def used_blocks(store: Store, namespace: str) -> Entries | None:
    """One entry for each block that was used, with its uses in place of the size, and the time of
    the latest. None if there are no lists. Raises StoreError."""
    lists = _Lists(store, namespace)
    return lists.sum() if lists.names else None


def new_uses(store: Store, namespace: str, read: set[str]) -> Entries:
    """The uses in lists that are not in `read`, which has the names of all of them afterwards.
    Raises StoreError."""
    lists = _Lists(store, namespace, skipped=read)
    read.clear()
    read.update(lists.names)
    return lists.sum()


def retained_blocks(store: Store, namespace: str, writers: Collection[str]) -> list[Entries]:
    """What these servers retain, with the ends as times. Raises StoreError."""
    found = []
    prefix = retained_prefix(namespace)
    for info in store.list(prefix) if writers else ():
        if info.name.removeprefix(prefix) in writers and info.size <= _LIST_BYTES_MAX:
            try:
                listed = _read_list(store, namespace, info.name, info.size, RETAINED)
            except (FormatError, LengthMismatch, Forbidden):
                continue
            found += [] if listed is None else [listed[0]]
    return found


def count_uses(
    store: Store, namespace: str, blocks: Entries
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """How often each of these blocks was used, and in which second last; raises StoreError."""
    found = _Lists(store, namespace).sum()
    counts, times = np.zeros((2, len(blocks)), np.uint32)
    if len(found):
        known, wanted = manifests.key_prints(found), manifests.key_prints(blocks)
        order = np.argsort(known)
        at = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(order) - 1)]
        same = known[at] == wanted
        counts[same] = found["size"][at[same]]
        times[same] = np.minimum(found["time_us"][at[same]] // 1_000_000, _COUNT_MAX)
    return counts, times
