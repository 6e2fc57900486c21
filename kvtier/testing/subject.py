"""How the suites see a backend: what its author states, and an opened tier to work with."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.core.backend import Backend, TierContext
from kvtier.core.disk import Disk
from kvtier.core.record import Buffer, record_bytes
from kvtier.core.settings import TierSettings
from kvtier.core.tier import Handler, Tier
from kvtier.testing.records import NAMESPACE, blank, prove, sealed
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, Presence, Reservation


class Subject(ABC):
    """A backend under test, and what it promises beyond the contract of every tier."""

    persistent = False
    """Committed blocks outlive `close` and the death of the process."""
    shared = False
    """Several tiers may be open on one medium; what one commits, the others find."""
    overhead_bytes = 0
    """What the medium may take in its folder beyond the capacity: tables, locks, descriptions."""

    quarantine_blocks = 0
    """The room of how many blocks may stay out of use after damage was found there."""

    @abstractmethod
    def backend(self, disk: Disk) -> Backend[Any]:
        """The backend, touching its medium through `disk` if it has files."""

    @abstractmethod
    def settings(self, folder: Path, capacity: int) -> TierSettings:
        """Settings of a tier with room for records of `capacity` bytes in all, and with all its
        files in `folder`."""

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
        self.capacity = blocks * record_bytes(namespace.payload_bytes)
        self.backend = subject.backend(self.disk)
        self.settings = subject.settings(folder, self.capacity)
        # Private media carry the engine's name: no two folders may share one.
        name = engine or hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.context = TierContext(namespace, name)
        self.open()

    def open(self) -> None:
        """Open both halves; a crash test calls it after the death of another process."""
        self.tier: Tier = self.backend.open_tier(self.settings, self.context)
        self.handler: Handler = self.backend.open_handler(self.settings, self.context)

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

    def slots(self) -> int:
        """How many of the namespace's largest blocks the tier says that it has room for."""
        return self.tier.stats().bytes_capacity // record_bytes(self.namespace.payload_bytes)

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
        found = self.tier.lookup(keys)
        hits = [key for key, now in zip(keys, found, strict=True) if now is Presence.HIT]
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

    def occupied_bytes(self) -> int:
        """What the medium's files take."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def failures(keys: Sequence[BlockKey], outcome: Outcome) -> Mapping[BlockKey, Outcome]:
    """All these keys failed, all in the same way."""
    return dict.fromkeys(keys, outcome)
