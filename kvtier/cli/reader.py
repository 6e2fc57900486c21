"""What is to be copied, read as anybody may read: a running engine there does not notice.

To a mover this is one more handler, so that blocks go straight from their medium into the memory
from which they are written, proved on the way, and both sides are always busy.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

from kvtier.backends.object.spec import ObjectSpec
from kvtier.cli.blocks import entry_of
from kvtier.cli.choice import Choice
from kvtier.cli.holdings import Slab
from kvtier.cli.measure import patient
from kvtier.config import StackConfig
from kvtier.core.interfaces.backend import TierContext, backend
from kvtier.core.interfaces.handler import Handler
from kvtier.core.records.record import Buffer, record_bytes
from kvtier.core.slab.layout import VALID, runs
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, SlotSpec

_BATCH_BYTES = 2 << 20
_FILE_THREADS = 8


class Numbers(SlotSpec):
    """Blocks by number: rows of a choice, or places in a file."""


class Reader(Handler):
    """A source of blocks by number. What cannot be read is GONE or CORRUPT, nothing else: a copy
    tells troubles of its source from those of its target by that."""

    def __init__(self) -> None:
        self.unread = 0
        """So many of those that are called CORRUPT could not be read at all."""
        self._counting = threading.Lock()

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        assert isinstance(spec, Numbers)
        outcomes = self.read(spec.slots, keys, into)
        unread = [
            index
            for index, outcome in enumerate(outcomes)
            if outcome not in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT)
        ]
        for index in unread:
            outcomes[index] = Outcome.CORRUPT
        with self._counting:
            self.unread += len(unread)
        return outcomes

    @abstractmethod
    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with a record, unproved."""

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        raise TypeError("a source is only read")

    def used_again(self, number: int, key: BlockKey) -> bool:
        """Whether a block that could not be proved has been replaced by another meanwhile."""
        return False


class ChoiceReader(Reader):
    """Reads the rows of a choice from slabs and stores."""

    def __init__(self, config: StackConfig, choice: Choice, namespace: Namespace) -> None:
        super().__init__()
        self._choice = choice
        self._stores: dict[int, Handler] = {}
        self.concurrency = _FILE_THREADS
        record = record_bytes(namespace.payload_bytes)
        self.batch_blocks = max(1, min(64, _BATCH_BYTES // record))
        for number, (place, slab) in enumerate(choice.origins):
            if slab is None:
                self._add_store(number, config, place.tier, namespace)

    def _add_store(self, number: int, config: StackConfig, tier: int, namespace: Namespace) -> None:
        settings = patient(config.tiers[tier])
        store = backend(settings.kind).open_handler(settings, TierContext(namespace))
        self._stores[number] = store
        if not getattr(settings, "url", "").startswith("file:"):
            # Every request waits for its answer; a folder has none to wait for.
            self.concurrency = max(self.concurrency, store.concurrency)
            self.batch_blocks = min(self.batch_blocks, store.batch_blocks)

    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        origins, places = self._choice.places(numbers)
        outcomes: list[Outcome] = []
        start = 0
        for origin, neighbours in groupby(origins):
            some = slice(start, start + len(list(neighbours)))
            outcomes += self._read_from(origin, places[some], keys[some], into[some])
            start = some.stop
        return outcomes

    def _read_from(
        self, origin: int, places: list[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        slab = self._choice.origins[origin].slab
        if slab is not None:
            return read_slots(slab, places, into)
        return self._stores[origin].load(ObjectSpec(places), keys, into)

    def used_again(self, number: int, key: BlockKey) -> bool:
        (origin,), (slot,) = self._choice.places([number])
        slab = self._choice.origins[origin].slab
        if slab is None:
            return False
        try:
            state, found = entry_of(slab, slot)
        except OSError:
            return True  # the whole slab is gone
        return state != VALID or found != key

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def read_slots(slab: Slab, slots: Sequence[int], into: Sequence[Buffer]) -> list[Outcome]:
    """Read slots of a slab, neighbours by one call; opened each time, because slabs come and go."""
    try:
        return _read_slots(slab, slots, into, os.O_DIRECT)
    except FileNotFoundError:
        return [Outcome.GONE] * len(slots)
    except OSError as error:
        if error.errno != errno.EINVAL:
            return [Outcome.IO_ERROR] * len(slots)
    try:  # not every file system can go around its cache
        return _read_slots(slab, slots, into, 0)
    except OSError:
        return [Outcome.IO_ERROR] * len(slots)


def _read_slots(
    slab: Slab, slots: Sequence[int], into: Sequence[Buffer], flags: int
) -> list[Outcome]:
    size = slab.header.slot_bytes
    if any(len(buffer) != size for buffer in into):
        return [Outcome.CORRUPT] * len(slots)
    fd = os.open(slab.data, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return [Outcome.CORRUPT] * len(slots)
        outcomes = []
        for start, stop in runs(slots):
            count = os.preadv(fd, into[start:stop], slab.header.slot_at(slots[start]))
            whole = min(stop - start, count // size)
            outcomes += [Outcome.OK] * whole + [Outcome.CORRUPT] * (stop - start - whole)
        return outcomes
    finally:
        os.close(fd)
