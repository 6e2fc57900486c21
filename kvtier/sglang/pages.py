"""Pages of an engine's host memory on their way to the tiers of a stack, and back.

A page is one record, which passes through the slots of the stack's cpu tier.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

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
from kvtier.types import BlockKey

logger = logging.getLogger(__name__)

LOAD_S = 5.0
"""No load takes longer, whatever a tier's `load_deadline` says: SGLang gives its threads ten
seconds to end, and fails if one has not ended then."""
FIND_S = 0.25
"""How long a medium that has to be asked may take to say what it has."""
STORE_S = 0.5
"""How long a store waits for room. SGLang keeps pages in host memory until they are stored."""
_POLL_S = 0.05
_PAUSE_S = 0.002
"""Between two polls of the chain, so that a busy mover does not take the GIL from the engine all
the time."""


class HostPages(msgspec.Struct, frozen=True):
    """An engine's pages: where they lie, and what of each belongs together."""

    layout: DeviceLayout
    arrays: list[Bytes]
    """One row a page, for each piece that a page consists of."""
    memory: Any
    """What must live as long as these: they are made of addresses."""

    @classmethod
    def of_pool(cls, pool: Any) -> HostPages:
        """Those of one of SGLang's host pools, by the addresses that it gives for copies. Raises
        ConfigError for a pool that gives none, or whose pages are not equally far apart."""
        tokens, count = pool.page_size, pool.page_num
        asked = [0, min(1, count - 1), count - 1]
        try:
            starts, sizes = pool.get_page_buffer_meta(
                np.concatenate([np.arange(each * tokens, (each + 1) * tokens) for each in asked])
            )
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(
                "--hicache-mem-layout",
                f"{type(pool).__name__} does not say where its pages lie: {error}",
                "use layer_first, page_first or page_first_direct",
            ) from error
        first, second, last = np.array(starts, np.int64).reshape(3, -1)
        sizes = list(sizes[: len(first)])
        steps = second - first if count > 1 else np.array(sizes, np.int64)
        if (first + steps * (count - 1) != last).any() or (steps < sizes).any():
            raise ConfigError(
                "--hicache-mem-layout",
                f"the pages of {type(pool).__name__} are not equally far apart",
                "use layer_first, page_first or page_first_direct",
            )
        tensors, arrays = [], []
        for base, step, size in zip(first.tolist(), steps.tolist(), sizes, strict=True):
            memory = (ctypes.c_uint8 * (step * (count - 1) + size)).from_address(base)
            pages = np.frombuffer(memory, np.uint8)
            arrays.append(np.lib.stride_tricks.as_strided(pages, (count, size), (step, 1)))
            tensors.append(DeviceTensor(base, count, step, size))
        refs = tuple(PageRef(at, size) for at, size in enumerate(sizes))
        return cls(DeviceLayout(tuple(tensors), (refs,)), arrays, pool.kv_buffer)


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
        self._pages = pages
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

    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys some tier can give."""
        with self._lock:
            query = self._chain.find(keys)
        while not query.answered and time.monotonic() < query.since + FIND_S:
            self._stack.mover.wait(_POLL_S)
            with self._lock:
                self._chain.poll()
        with self._lock:
            return len(self._found(keys))

    def load(self, keys: Sequence[BlockKey], pages: Sequence[int]) -> int:
        """Fill pages with the records of these keys; says how many leading ones are right. The
        other pages may hold anything."""
        end = time.monotonic() + self._load_s
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
            copied = self._copy(TransferKind.LOAD, some, pages[done:], end)
            came = next((at for at, key in enumerate(some) if key not in copied), len(some))
            done += came
            if not came:
                break
        return done

    def store(self, keys: Sequence[BlockKey], pages: Sequence[int]) -> list[bool]:
        """Copy pages into the first tier; says of each key whether a tier has it now. Waits a
        little for room where that would evict what has still to be written down."""
        end = time.monotonic() + STORE_S
        page_of = dict(zip(keys, pages, strict=True))
        while True:
            with self._lock:
                missing = self._missing(list(page_of))
                room = self._chain.room_beside_unwritten(len(missing), new=True) if missing else 0
            if not missing or time.monotonic() >= end:
                return [key not in missing for key in keys]
            some = missing[:room]
            places = [page_of[key] for key in some]
            if not (some and self._copy(TransferKind.STORE, some, places, end)):
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

    def _found(self, keys: Sequence[BlockKey]) -> list[int]:
        """The tiers of those leading keys that can be had."""
        origins = self._chain.locate(keys)
        return origins[: leading(origins)]

    def _missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        origins = self._chain.locate(keys)
        return [key for key, at in zip(keys, origins, strict=True) if at == NOWHERE]

    def _loadable(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey] | None:
        """Those leading keys that can be had, as many as there is room for now; None if no tier
        has the first."""
        with self._lock:
            found = self._found(keys)
            if not found:
                return None
            count = max(0, min(len(found), self._chain.reservations.room()))
            below = [at for at in range(count) if found[at] != HOST]
            room = self._chain.room_beside_unwritten(len(below), new=False) if below else 0
            return keys[: below[room] if room < len(below) else count]

    def _copy(
        self, kind: TransferKind, keys: Sequence[BlockKey], pages: Sequence[int], end: float
    ) -> set[BlockKey]:
        """Copy between the pages of these keys and the first tier; says which were copied. Until it
        returns, the pages are in use, even if that is later than it should be."""
        page_of = dict(zip(keys, pages, strict=False))
        with self._lock:
            number = next(self._ids)
            job = self._copies.begin(number, kind, page_of, f"pages-{number}", end)
        while not job.ended:
            self._copies.copier.wait([number])
            with self._lock:
                self._collect()
            if not job.ended:  # a copy hangs
                self._closed.wait(_POLL_S)
        if job.failed and kind is TransferKind.LOAD:
            logger.warning(
                "%d of %d pages could not be loaded (%s): they are recomputed",
                len(job.failed),
                len(job.reserved),
                job.why,
            )
        return job.copied

    def _collect(self) -> None:
        for result in self._copies.copier.poll():
            self._copies.end(result)

    def _poll(self) -> None:
        while not self._closed.wait(_PAUSE_S):
            self._step()

    @guarded(lambda: None)
    def _step(self) -> None:
        self._stack.mover.wait(_POLL_S)
        with self._lock:
            self._copies.poll_chain()
