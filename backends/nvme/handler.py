"""The data side of an NVMe folder: records by direct I/O, entries of the table around them.

Neighbouring slots are moved by one system call. A store writes the entry as RESERVED, then the
record, then the entry as VALID: a process that dies in between leaves a slot that counts as free.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.backends.nvme.open_slabs import OpenSlab, OpenSlabs
from kvtier.backends.nvme.spec import SLOT_BITS, SLOT_MASK, NvmeSpec
from kvtier.core.slab import layout
from kvtier.errors import FormatError
from kvtier.interfaces.handler import Handler, own_spec
from kvtier.record.record import Buffer, record_bytes
from kvtier.system.disk import Disk, read_all, write_all
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome

logger = logging.getLogger(__name__)

_CALL_BYTES = 4 << 20
"""Of payload. A direct read of 1 MiB costs 1.6 times the processor time of a quarter of this."""
_SLOWEST = 4 << 20
"""Bytes a second: one thread of several gets as many even of a slow disk that engines share."""
_TRIES_SHARE = 0.5
"""The part of `call_seconds` after whose end nothing more is tried in a call in which something has
failed: the rest is for the try that is under way then."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_SYNC = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)
"""Of a folder: the file system knows no such thing, or it is somebody else's."""


class NvmeHandler(Handler):
    """Reads and writes the slots of one namespace's slabs; shared by the mover's threads."""

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        *,
        threads: int,
        direct: bool,
        power_safe: bool,
        only_read: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.concurrency = threads
        record = record_bytes(namespace.payload_bytes)
        self.batch_blocks = max(1, min(64, _CALL_BYTES // namespace.payload_bytes))
        self.call_seconds = max(Handler.call_seconds, self.batch_blocks * record / _SLOWEST)
        self._home = root / namespace.id
        self._namespace = namespace
        self._power_safe = power_safe
        self._disk = disk or Disk()
        self._slabs = OpenSlabs(
            self._home, namespace.digest, self._disk, direct=direct, only_read=only_read
        )

    # -- moving ----------------------------------------------------------------------------

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._each_run(own_spec(spec, NvmeSpec).places, keys, into, self._load_run)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        own = own_spec(spec, NvmeSpec)
        if not self._slabs.acts_for(own.owner):
            return [Outcome.DROPPED] * len(own)
        outcomes = self._each_run(own.places, keys, records, self._store_run)
        # A slab that is gone is the target's trouble: GONE would speak of the record to store.
        return [Outcome.DROPPED if each is Outcome.GONE else each for each in outcomes]

    def _each_run(
        self,
        places: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        move: Callable[[OpenSlab, int, Sequence[BlockKey], Sequence[Buffer]], Outcome],
    ) -> list[Outcome]:
        """Move run by run, and find out which blocks of a run that fails it was. A disk may take
        seconds for each error: what there is no time for is TIMEOUT."""
        outcomes = [Outcome.TIMEOUT] * len(places)
        until, failed = time.monotonic() + _TRIES_SHARE * self.call_seconds, False
        tries = deque(layout.runs(places))
        while tries and not (failed and time.monotonic() >= until):
            start, stop = tries.popleft()
            outcome = self._run(places[start], keys[start:stop], buffers[start:stop], move)
            failed |= not outcome.ok
            if outcome.ok or stop - start == 1:
                outcomes[start:stop] = [outcome] * (stop - start)
            else:
                tries.extendleft((at, at + 1) for at in reversed(range(start, stop)))
        return outcomes

    def _run(
        self,
        place: int,
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        move: Callable[[OpenSlab, int, Sequence[BlockKey], Sequence[Buffer]], Outcome],
    ) -> Outcome:
        try:
            slab = self._slabs.borrow(place >> SLOT_BITS)
        except FileNotFoundError:
            return Outcome.GONE
        except (FormatError, OSError) as error:
            logger.debug("slab %08x cannot be opened: %s", place >> SLOT_BITS, error)
            return Outcome.IO_ERROR
        try:
            slot = place & SLOT_MASK
            if slot + len(keys) > slab.slots:
                return Outcome.GONE
            return move(slab, slot, keys, buffers)
        except OSError as error:
            refused = error.errno == errno.EINVAL and slab.direct
            if not refused:
                return Outcome.NO_SPACE if error.errno in _NO_SPACE else Outcome.IO_ERROR
        finally:
            self._slabs.give_back(slab)
        self._slabs.refuse_direct(place >> SLOT_BITS)
        return self._run(place, keys, buffers, move)

    def _load_run(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> Outcome:
        for at, buffers in self._pieces(slab, slot, keys, into):
            if read_all(self._disk, slab.data_fd, buffers, at) != sum(map(len, buffers)):
                return Outcome.GONE
        return Outcome.OK

    def _store_run(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> Outcome:
        self._write_entries(slab, slot, keys, layout.RESERVED)
        for at, buffers in self._pieces(slab, slot, keys, records):
            write_all(self._disk, slab.data_fd, buffers, at)
        if self._power_safe:
            self._disk.sync(slab.data_fd)
        self._write_entries(slab, slot, keys, layout.VALID)
        if self._power_safe:
            self._disk.sync(slab.table_fd)
            self._sync_names(slab)
        return Outcome.OK

    def _sync_names(self, slab: OpenSlab) -> None:
        """Of the slab, and of the folders above that were made for it."""
        if slab.named:
            return
        for folder in (self._home, self._home.parent, self._home.parent.parent):
            try:
                self._disk.sync_names(folder)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise
        slab.named = True

    def _write_entries(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], state: int
    ) -> None:
        entries = layout.pack_entries(state, keys, 0, int(time.time()))
        write_all(self._disk, slab.table_fd, [memoryview(entries)], layout.entry_at(slot))

    def _pieces(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[tuple[int, list[Buffer]]]:
        """What one system call each can move: the whole run if its records fill their slots."""
        size = slab.slot_bytes
        lengths = [record_bytes(self._namespace.payload_of(key)) for key in keys]
        cut = [buffer[:length] for buffer, length in zip(buffers, lengths, strict=True)]
        if all(length == size for length in lengths[:-1]):
            return [(slot * size, cut)]
        return [((slot + index) * size, [buffer]) for index, buffer in enumerate(cut)]

    def close(self) -> None:
        self._slabs.close()
