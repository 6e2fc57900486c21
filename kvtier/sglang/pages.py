"""Pages of an engine's host memory on their way to the tiers of a stack, and back.

A page of KV cache is one record, a page of another pool (states, windows) one or several. They pass
through the slots of the stack's cpu tier.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtier.chain.plan import HOST, NOWHERE, leading
from kvtier.device.host_copies import HostCopies
from kvtier.device.layout import Bytes, DeviceLayout, DeviceTensor, PageRef
from kvtier.errors import ConfigError
from kvtier.guard import guarded
from kvtier.interfaces.handler import RegionHandler
from kvtier.interfaces.mover import TransferKind
from kvtier.stack import Stack
from kvtier.types import BlockKey, block_key, group_of

logger = logging.getLogger(__name__)

LOAD_S = 5.0
"""No load takes longer, whatever a tier's `load_deadline` says: SGLang gives its threads ten
seconds to end, and fails if one has not ended then."""
STATES_S = 4.0
"""Nor one of what belongs to KV cache that has just been loaded, within the same ten seconds."""
FIND_S = 0.25
"""How long a medium that has to be asked may take to say what it has."""
STORE_S = 0.5
"""How long a store waits for room. SGLang keeps pages in host memory until they are stored."""
LEAST_BYTES = 16 << 10
"""No page is cut into smaller records: each has a header of 4 KiB."""
RECORDS_MAX = 256
"""Pages of all other pools are no more of them, even if they are so much larger than KV cache's."""
STRIPE = 64
"""Copies are fastest between multiples of it."""
_POLL_S = 0.05
_PAUSE_S = 0.002
"""Between two polls of the chain, so that a busy mover does not take the GIL from the engine all
the time."""


PageKeys = tuple[BlockKey, ...]
"""Of one page: of each of its records."""


class Piece(NamedTuple):
    """A piece of every page of a pool: of the first one, how far the next one is, and its size."""

    base: int
    step: int
    size: int


class HostPages(msgspec.Struct, frozen=True):
    """Pages of an engine's pools: where they lie, and what of each belongs together."""

    layout: DeviceLayout
    arrays: list[Bytes]
    """One row a page, for each piece that a page consists of."""
    groups: dict[str, range]
    """Those of each pool: a page of it is one record in each of these."""
    memory: list[Any]
    """What must live as long as these: they are made of addresses."""

    @classmethod
    def of_pools(cls, pools: Mapping[str, Any]) -> HostPages:
        """Those of SGLang's host pools, by the addresses that these give for copies. Raises
        ConfigError for a pool that gives none, or whose pages are not equally far apart.

        All records of a stack have slots of one size. So that states, which are often many times as
        large as a page of KV cache, do not decide on it, pages of the other pools are several
        records, none larger than a page of the first pool, as far as that is reasonable. They are
        numbered by the pools' names: a namespace does not know in which order they came.
        """
        kv, *names = pools
        pieces = {name: _pieces_of(pools[name]) for name in (kv, *sorted(names))}
        first, *others = (sum(each.size for each in of_page) for of_page in pieces.values())
        largest = max(first, LEAST_BYTES, sum(others) // RECORDS_MAX)
        tensors: list[DeviceTensor] = []
        groups: list[tuple[PageRef, ...]] = []
        ranges = {}
        for name, of_page in pieces.items():
            count, begun = int(pools[name].page_num), len(groups)
            for part in _cut(of_page, largest if groups else first):
                at = len(tensors)
                groups.append(tuple(PageRef(at + i, each.size) for i, each in enumerate(part)))
                tensors += [DeviceTensor(each.base, count, each.step, each.size) for each in part]
            ranges[name] = range(begun, len(groups))
        layout = DeviceLayout(tuple(tensors), tuple(groups))
        memory = [pool.kv_buffer for pool in pools.values()]
        return cls(layout, [_array(each) for each in tensors], ranges, memory)

    def keys(self, pool: str, hashes: Iterable[bytes]) -> list[PageKeys]:
        """The keys of a pool's pages."""
        groups = self.groups[pool]
        return [tuple(block_key(each, group) for group in groups) for each in hashes]


def _pieces_of(pool: Any) -> list[Piece]:
    try:
        tokens, count, _ = pool.page_size, pool.page_num, pool.kv_buffer
        asked = [0, min(1, count - 1), count - 1]
        starts, sizes = pool.get_page_buffer_meta(
            np.concatenate([np.arange(each * tokens, (each + 1) * tokens) for each in asked])
        )
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            "--hicache-mem-layout",
            f"{type(pool).__name__} does not say where its pages lie: {error}",
            "use page_first_direct, or serve this model by an engine without kvtier",
        ) from error
    first, second, last = np.array(starts, np.int64).reshape(3, -1)
    sizes = list(sizes[: len(first)])
    steps = second - first if count > 1 else np.array(sizes, np.int64)
    if (first + steps * (count - 1) != last).any() or (steps < sizes).any():
        raise ConfigError(
            "--hicache-mem-layout",
            f"the pages of {type(pool).__name__} are not equally far apart",
            "use page_first_direct, or serve this model by an engine without kvtier",
        )
    return [Piece(*each) for each in zip(first.tolist(), steps.tolist(), sizes, strict=True)]


def _cut(pieces: Sequence[Piece], largest: int) -> list[list[Piece]]:
    """Parts of a page of about the same size, as many as it takes."""
    total = sum(each.size for each in pieces)
    size = -(-total // -(-total // largest))
    size = total if size == total else -(-size // STRIPE) * STRIPE
    parts: list[list[Piece]] = []
    room = 0
    for base, step, left in pieces:
        while left:
            if not room:
                parts.append([])
                room = size
            some = min(left, room)
            parts[-1].append(Piece(base, step, some))
            base, left, room = base + some, left - some, room - some
    return parts


def _array(tensor: DeviceTensor) -> Bytes:
    size = tensor.stride * (tensor.blocks - 1) + tensor.page_bytes
    memory: Any = (ctypes.c_uint8 * size).from_address(tensor.base)
    shape = tensor.blocks, tensor.page_bytes
    pages = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(pages, shape, (tensor.stride, 1))


def restorable(there: Sequence[bool], needed: int) -> list[int]:
    """How long a prefix of these pages may be for a pool that needs so many of its last ones, or
    all of a shorter one: `there` says which it has."""
    run, lengths = 0, []
    for length, has in enumerate(there, 1):
        run = run + 1 if has else 0
        if run >= min(needed, length):
            lengths.append(length)
    return lengths


class PageStore:
    """Stores pages in a stack, and loads them; for any number of threads.

    No call waits longer than `LOAD_S` and a copy within memory. What fails, is late or has no room
    is missing from its answer. A thread calls the chain between the calls, so that what has been
    stored goes on to the lower tiers.
    """

    def __init__(self, stack: Stack, pages: HostPages) -> None:
        if not isinstance(stack.host, RegionHandler):
            raise ConfigError(
                "$.tiers[0].kind",
                f"is {stack.config.tiers[0].kind}, which pages cannot be copied to",
                "put a tier of kind cpu first",
            )
        self._stack, self._chain = stack, stack.chain
        self.pages = pages
        self._copies = HostCopies(
            stack.chain, stack.host, stack.namespace, pages.layout, pages.arrays
        )
        self._load_s = min(LOAD_S, max(each.load_deadline.seconds for each in stack.config.tiers))
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._closed = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="kvtier-poll", daemon=True)
        self._poller.start()

    # -- what the engine asks --------------------------------------------------------------------

    def find(self, *asked: Sequence[PageKeys]) -> list[list[bool]]:
        """Which pages of each list tiers can give, whole."""
        keys = _flat(page for pages in asked for page in pages)
        with self._lock:
            query = self._chain.find(keys)
        while not query.answered and time.monotonic() < query.since + FIND_S:
            self._stack.mover.wait(_POLL_S)
            with self._lock:
                self._chain.poll()
        with self._lock:
            origins = dict(zip(keys, self._chain.locate(keys), strict=True))
        there = {key for key, origin in origins.items() if leading([origin])}
        return [[there.issuperset(page) for page in pages] for pages in asked]

    def load_end(self, most: float = LOAD_S) -> float:
        """When a load that begins now ends at the latest, and not after so many seconds."""
        return time.monotonic() + min(self._load_s, most)

    def load(
        self, pages: Sequence[PageKeys], places: Sequence[int], end: float | None = None
    ) -> int:
        """Fill places with a pool's pages; says how many leading ones are right. The other places
        may hold anything."""
        end = self.load_end() if end is None else end
        keys, place_of = _flat(pages), _places(pages, places)
        if len(place_of) < len(keys):  # a page at two places, of which SGLang has none
            return 0
        with self._lock:
            self._chain.touch(keys)
        done = 0
        while done < len(keys) and time.monotonic() < end:
            some = self._loadable(keys[done:])
            if some is None:
                break
            if not some:
                self._stack.mover.wait(_POLL_S)  # for room
                continue
            copied = self._copy(TransferKind.LOAD, {key: place_of[key] for key in some}, end)
            came = next((at for at, key in enumerate(some) if key not in copied), len(some))
            done += came
            if not came:
                break
        return done // len(pages[0]) if pages else 0

    def store(self, pages: Sequence[PageKeys], places: Sequence[int]) -> list[bool]:
        """Copy a pool's pages into the first tier; says of each whether tiers have it now. Waits a
        little for room where that would evict what has still to be written down."""
        end = time.monotonic() + STORE_S
        place_of = _places(pages, places)
        while True:
            with self._lock:
                missing = self._missing(list(place_of))
                room = self._chain.room_beside_unwritten(len(missing), new=True) if missing else 0
            if not missing or time.monotonic() >= end:
                lost = set(missing)
                return [lost.isdisjoint(page) for page in pages]
            some = {key: place_of[key] for key in missing[:room]}
            if not (some and self._copy(TransferKind.STORE, some, end)):
                self._stack.mover.wait(_POLL_S)

    def clear(self) -> None:
        """Forget all that is stored here."""
        with self._lock:
            self._chain.clear()

    def close(self) -> None:
        """End what runs, and close the stack; once."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._poller.join()
        self._copies.copier.close()
        with self._lock:
            self._collect()
            self._stack.close()

    # -- what of it is under way -----------------------------------------------------------------

    def _missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        origins = self._chain.locate(keys)
        return [key for key, at in zip(keys, origins, strict=True) if at == NOWHERE]

    def _loadable(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey] | None:
        """Those leading keys that can be had, as many as there is room for now; None if no tier
        has the first."""
        with self._lock:
            origins = self._chain.locate(keys)
            found = leading(origins)
            if not found:
                return None
            count = max(0, min(found, self._chain.reservations.room()))
            below = [at for at in range(count) if origins[at] != HOST]
            room = self._chain.room_beside_unwritten(len(below), new=False) if below else 0
            return keys[: below[room] if room < len(below) else count]

    def _copy(
        self, kind: TransferKind, place_of: Mapping[BlockKey, int], end: float
    ) -> set[BlockKey]:
        """Copy between the pages at these places and the first tier; says which records were
        copied. Until it returns, the pages are in use, even if that is later than it should be."""
        by_group = dict(sorted(place_of.items(), key=lambda item: group_of(item[0])))
        with self._lock:
            number = next(self._ids)
            job = self._copies.begin(number, kind, by_group, f"pages-{number}", end)
        while not job.ended:
            self._copies.copier.jobs.wait([number])
            with self._lock:
                self._collect()
            if not job.ended:  # a copy hangs
                self._closed.wait(_POLL_S)
        if job.failed and kind is TransferKind.LOAD:
            logger.warning(
                "%d of %d records could not be loaded (%s): their pages are recomputed",
                len(job.failed),
                len(job.reserved),
                job.why,
            )
        return job.copied

    def _collect(self) -> None:
        for result in self._copies.copier.jobs.poll():
            self._copies.end(result)

    def _poll(self) -> None:
        while not self._closed.wait(_PAUSE_S):
            self._step()

    @guarded(lambda: None)
    def _step(self) -> None:
        self._stack.mover.wait(_POLL_S)
        with self._lock:
            self._copies.poll_chain()


def _flat(pages: Iterable[PageKeys]) -> list[BlockKey]:
    return list(itertools.chain.from_iterable(pages))


def _places(pages: Sequence[PageKeys], places: Sequence[int]) -> dict[BlockKey, int]:
    """Where each record belongs: a page's records have its place."""
    return {key: place for page, place in zip(pages, places, strict=False) for key in page}
