"""What a backend's author states of it, and what the suites work with: blocks, an opened tier, a
handler in another process, folders in shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.interfaces.backend import Backend, TierContext, backend
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.move.protocol import TierOpening
from kvtier.record.record import HEADER_BYTES, Buffer, Header, record_bytes, seal, verify
from kvtier.settings import TierSettings
from kvtier.system.disk import Disk
from kvtier.types import (
    BlockKey,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    Reservation,
    block_key,
)

NAMESPACE = Namespace(facts={"model": "testing"}, group_bytes=(8192,))
LARGE = Namespace(facts={"model": "large"}, group_bytes=(8 << 20,))
GROUPED = Namespace(facts={"model": "grouped"}, group_bytes=(8192, 4608, 12, 20480), parts=4)


def make_keys(count: int, *, start: int = 0, group: int = 0) -> list[BlockKey]:
    """Distinct keys, the same ones every time."""
    return [
        block_key(hashlib.sha256(index.to_bytes(8, "big")).digest(), group)
        for index in range(start, start + count)
    ]


def payload(key: BlockKey, namespace: Namespace = NAMESPACE) -> bytes:
    """The one right payload of a key."""
    return hashlib.shake_128(namespace.digest + key).digest(namespace.payload_of(key))


def blank(namespace: Namespace = NAMESPACE) -> Buffer:
    """An aligned buffer with room for any record of the namespace."""
    return memoryview(mmap.mmap(-1, record_bytes(namespace.payload_bytes)))


def fill(record: Buffer, key: BlockKey, namespace: Namespace = NAMESPACE) -> None:
    """Write a key's right record into a buffer."""
    body = payload(key, namespace)
    record[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    seal(record, Header(key, namespace.digest, len(body), namespace.parts or 1))


def sealed(key: BlockKey, namespace: Namespace = NAMESPACE) -> Buffer:
    """A key's right record in a buffer of its own."""
    record = blank(namespace)
    fill(record, key, namespace)
    return record


def prove(record: Buffer, key: BlockKey, namespace: Namespace = NAMESPACE) -> Outcome:
    """What the mover would say of a loaded record; wrong bytes that it would serve raise.

    This is promise one: bytes that pass `verify` and are not the key's own are the one thing that
    no fault, crash or race may ever bring about.
    """
    outcome = verify(record, key, namespace.digest)
    if outcome.ok:
        right = payload(key, namespace)
        if record[HEADER_BYTES : HEADER_BYTES + len(right)] != right:
            raise AssertionError(f"wrong bytes were served for {key.hex()}")
    return outcome


# How the suites see a backend: what its author states, and an opened tier to work with.


class Subject(ABC):
    """A backend under test, and what it promises beyond the contract of every tier."""

    backend: Backend[Any]
    persistent = False
    """Committed blocks outlive `close` and the death of the process."""
    shared = False
    """Several tiers may be open on one medium; what one commits, the others find."""
    revives = False
    """A restart may also serve blocks that were evicted or not committed yet, but all of whose
    bytes are still there. (Blocks that were dropped never come back, whatever the medium.)"""
    off_disk = False
    """The catalogue leaves the disk to others: on its caller's thread it does not even rename."""
    overhead_bytes = 0
    """What the files may take beyond the settings' capacity: locks, descriptions."""

    sheds = False
    """Beside other engines a tier may drop blocks of its own accord: the room is shared anew when
    one comes. The crash campaign has its writers report that."""
    quarantine_blocks = 0
    """The room of how many blocks may stay out of use after damage was found there."""

    @abstractmethod
    def settings(self, folder: Path, blocks: int, record_bytes: int) -> TierSettings:
        """Settings of a tier with room for exactly so many records of this size (and for what
        the medium needs beside them), with all its files in `folder`."""

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> Tier:
        """Override where files are reached through a disk, so that faults can enter there."""
        return self.backend.open_tier(settings, context)

    def open_handler(self, settings: TierSettings, context: TierContext, disk: Disk) -> Handler:
        """The other half, likewise."""
        return self.backend.open_handler(settings, context)

    @property
    def through_disk(self) -> bool:
        """Whether files are reached through the disk that these two are given."""
        mine = type(self)
        return not (
            mine.open_tier is Subject.open_tier and mine.open_handler is Subject.open_handler
        )

    def recorded_removals(self, folder: Path) -> set[BlockKey]:
        """Blocks that the medium says it has given up: whoever writes that down before it tells
        its caller may die in between."""
        return set()

    def block_files(self, folder: Path) -> list[Path]:
        """The files that hold blocks, if they may change behind the tier's back without killing
        it (a file that is mapped may not): the fault suite damages them."""
        return []


class Rig:
    """A tier and its handler, opened on one folder, and the whole ways in and out of them."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        *,
        blocks: int = 8,
        namespace: Namespace = NAMESPACE,
        disk: Disk | None = None,
        engine: str = "",
    ) -> None:
        self.subject = subject
        self.folder = folder
        self.blocks = blocks
        self.namespace = namespace
        self.disk = disk or Disk()
        self.backend = subject.backend
        self.settings = subject.settings(folder, blocks, record_bytes(namespace.payload_bytes))
        self.capacity = self.settings.capacity.resolve(self.disk.total_bytes(folder))
        # Private media carry the engine's name: no two folders may share one.
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.context = TierContext(namespace, engine or name, stack=name)
        self.open()

    def open(self) -> None:
        """Open both halves; a crash test calls it after the death of another process."""
        self.tier = self.subject.open_tier(self.settings, self.context, self.disk)
        self.handler = self.subject.open_handler(self.settings, self.context, self.disk)

    def close(self) -> None:
        """Close both halves as an orderly shutdown would."""
        self.handler.close()
        self.tier.close()

    def reopen(self) -> None:
        """A restart."""
        self.close()
        self.open()

    def peer(self) -> Rig:
        """Another engine on the same medium."""
        return Rig(
            self.subject,
            self.folder,
            blocks=self.blocks,
            namespace=self.namespace,
            disk=self.disk,
            engine=self.context.engine + "-peer",
        )

    def settle(self) -> None:
        """Wait until the room of what was dropped is free, and what others did is known."""
        self.tier.flush()
        self.tier.refresh()
        self.tier.tick()

    def reserve(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        """`prepare_store`, with what every reservation must be."""
        reservation = self.tier.prepare_store(keys, evict=evict)
        assert len(reservation.spec) == len(reservation.keys)
        assert not set(reservation.evicted) & set(reservation.keys)
        assert evict or not reservation.evicted
        return reservation

    def write(self, reservation: Reservation) -> dict[BlockKey, Outcome]:
        """Move the right records to where a reservation says; what failed, by key."""
        records = [sealed(key, self.namespace) for key in reservation.keys]
        outcomes = self.transfer(reservation.keys, reservation.spec, records, loading=False)
        return {key: outcome for key, outcome in outcomes.items() if not outcome.ok}

    def put(self, keys: Sequence[BlockKey], *, evict: bool = True) -> list[BlockKey]:
        """Store right records all the way; the keys that were committed."""
        reservation = self.reserve(keys, evict=evict)
        failed = self.write(reservation)
        self.tier.complete_store(reservation.keys, failed)
        return [key for key in reservation.keys if key not in failed]

    def fill(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Store without evicting until there is no more room: a medium may grow in pieces."""
        stored: list[BlockKey] = []
        while more := self.put([key for key in keys if key not in stored], evict=False):
            stored += more
            self.settle()
        return stored

    def read(self, keys: Sequence[BlockKey], spec: LoadStoreSpec) -> dict[BlockKey, Outcome]:
        """Load pinned keys and prove each record, as the mover does."""
        records = [blank(self.namespace) for _ in keys]
        outcomes = self.transfer(keys, spec, records, loading=True)
        for key, record in zip(keys, records, strict=True):
            if outcomes[key].ok:
                outcomes[key] = prove(record, key, self.namespace)
        return outcomes

    def get(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Load what is a hit all the way; the keys whose right bytes arrived."""
        hits = self.resident(keys)
        outcomes = self.read(hits, self.tier.prepare_load(hits))
        failed = {key: outcome for key, outcome in outcomes.items() if not outcome.ok}
        self.tier.complete_load(hits, failed)
        return [key for key in hits if key not in failed]

    def resident(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The keys that are a hit now."""
        found = self.tier.lookup(keys)
        return [key for key, now in zip(keys, found, strict=True) if now is Presence.HIT]

    def transfer(
        self,
        keys: Sequence[BlockKey],
        spec: LoadStoreSpec,
        records: Sequence[Buffer],
        *,
        loading: bool,
    ) -> dict[BlockKey, Outcome]:
        """Call the handler in batches, as the mover does."""
        outcomes: list[Outcome] = []
        move = self.handler.load if loading else self.handler.store
        for start in range(0, len(keys), self.handler.batch_blocks):
            stop = min(start + self.handler.batch_blocks, len(keys))
            batch = move(spec.select(start, stop), keys[start:stop], records[start:stop])
            assert len(batch) == stop - start, "a handler reports one outcome a block"
            outcomes += batch
        return dict(zip(keys, outcomes, strict=True))

    def check_room(self) -> None:
        """The budget holds, by the tier's own account and by the files' sizes."""
        stats = self.tier.stats()
        assert stats.bytes_used <= stats.bytes_capacity <= self.capacity
        limit = self.capacity + self.subject.overhead_bytes
        files = self.occupied_bytes()
        assert files <= limit, f"the files take {files} bytes, of {limit} with overhead_bytes"

    def occupied_bytes(self) -> int:
        """What the medium's files take; files and folders may come and go meanwhile."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(Path(folder) / name).st_size
        return total


def failures(keys: Sequence[BlockKey], outcome: Outcome) -> Mapping[BlockKey, Outcome]:
    """All these keys failed, all in the same way."""
    return dict.fromkeys(keys, outcome)


# A handler in a process that knows settings and context alone, as that of the mover does.


class Question(msgspec.Struct):
    """What to open, and what to load there."""

    opening: TierOpening
    context: TierContext
    spec: msgspec.Raw
    keys: list[BlockKey]


def load_elsewhere(
    settings: TierSettings, context: TierContext, spec: LoadStoreSpec, keys: Sequence[BlockKey]
) -> list[Outcome]:
    """Load pinned keys, at most as many as one call may have, and prove them, in a new process."""
    opening, place = TierOpening.of(settings), msgspec.Raw(msgspec.msgpack.encode(spec))
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"],
        input=msgspec.msgpack.encode(Question(opening, context, place, list(keys))),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.msgpack.decode(done.stdout, type=list[Outcome])


def answer() -> None:
    """Answer a question from stdin."""
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    found, namespace = backend(asked.opening.kind), asked.context.namespace
    handler = found.open_handler(asked.opening.read(), asked.context)
    records = [blank(namespace) for _ in asked.keys]
    spec = msgspec.msgpack.decode(asked.spec, type=found.spec)
    outcomes = handler.load(spec, asked.keys, records)
    for index, (key, record) in enumerate(zip(asked.keys, records, strict=True)):
        if outcomes[index].ok:
            outcomes[index] = prove(record, key, namespace)
    handler.close()
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


# Folders in shared memory for tests and benchmarks, which do not outlive them for long.
#
# A process that is killed removes nothing. Shared memory that nobody uses slows down all of the
# machine, so each folder names its owner, and whoever makes the next one removes those whose owner
# is gone.

SHARED = Path("/dev/shm")
_NAME = re.compile(r"kvtier-(?:test|bench)-(\d+)-[0-9a-f]+")


def make_memory_folder(kind: str = "test", parent: Path = SHARED) -> Path:
    """A new folder of this process; the caller removes it. `kind` is "test" or "bench"."""
    remove_ownerless(parent)
    folder = parent / f"kvtier-{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    return folder


def remove_ownerless(parent: Path = SHARED) -> None:
    """Remove the folders whose owner has ended."""
    for path in parent.iterdir():
        named = _NAME.fullmatch(path.name)
        if named is not None and not _alive(int(named[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):  # another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
