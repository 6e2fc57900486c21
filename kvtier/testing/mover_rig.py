"""A mover over three media that tests hold, break and look into."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.core.interfaces.backend import TierContext
from kvtier.core.interfaces.mover import Mover, Transfer, TransferKind, TransferResult
from kvtier.core.records.record import record_bytes
from kvtier.core.settings import ByteSize, Capacity
from kvtier.testing.media import (
    FileSettings,
    FileSpec,
    HostSettings,
    HostSpec,
    Medium,
    MediumSettings,
)
from kvtier.testing.records import NAMESPACE, fill, make_keys, prove
from kvtier.types import Outcome

HOST, NEAR, FAR = 0, 1, 2


SOON = 120.0
"""Only what hangs takes so long."""


BATCH = 4


QUEUE_BLOCKS = 32


RECORD = record_bytes(NAMESPACE.payload_bytes)


class MoverRig:
    """A mover over three media (host memory, and two that are not), and the test's side of them."""

    def __init__(self, folder: Path) -> None:
        self.media = [
            Medium(folder / f"tier{tier}", RECORD, create=True) for tier in (HOST, NEAR, FAR)
        ]
        size = Capacity(ByteSize(1 << 20))
        paths = [str(medium.path) for medium in self.media]
        self.tiers: list[MediumSettings] = [HostSettings(capacity=size, path=paths[HOST])]
        self.tiers += [
            FileSettings(
                capacity=size,
                path=paths[tier],
                concurrency=2 if tier == NEAR else 1,
                batch_blocks=BATCH,
                queue_blocks=QUEUE_BLOCKS,
            )
            for tier in (NEAR, FAR)
        ]
        self.context = TierContext(NAMESPACE)
        self.mover: Mover
        self._ids = 0

    def close(self) -> None:
        """Let everything go, then end the mover."""
        for medium in self.media:
            medium.release()
        self.mover.close()
        self.close_media()

    def close_media(self) -> None:
        """Close the test's side of the media."""
        for medium in self.media:
            medium.close()

    def fill(self, tier: int, slots: Sequence[int]) -> None:
        """Write the right record of key `slot` into every one of these slots."""
        keys = make_keys(max(slots) + 1)
        for slot in slots:
            fill(self.media[tier].record(slot), keys[slot])

    def transfer(
        self,
        kind: TransferKind,
        source: int,
        target: int,
        slots: Sequence[int],
        seconds: float = SOON,
        *,
        prove: bool = True,
        prefetch: bool = False,
    ) -> Transfer:
        """Key `slot` from slot `slot` to slot `slot`, for each of these."""
        self._ids += 1
        keys = make_keys(max(slots, default=0) + 1)
        specs = [HostSpec, FileSpec, FileSpec]
        return Transfer(
            id=self._ids,
            kind=kind,
            source=source,
            target=target,
            keys=[keys[slot] for slot in slots],
            source_spec=specs[source](list(slots)),
            target_spec=specs[target](list(slots)),
            deadline=time.monotonic() + seconds,
            prove=prove,
            prefetch=prefetch,
        )

    def load(
        self,
        slots: Sequence[int],
        source: int = NEAR,
        seconds: float = SOON,
        *,
        prove: bool = True,
    ) -> int:
        """Submit a load into host memory that must be accepted; its id."""
        return self.submit(
            self.transfer(TransferKind.LOAD, source, HOST, slots, seconds, prove=prove)
        )

    def prefetch(self, slots: Sequence[int], source: int = NEAR) -> int:
        """Submit a load that nobody waits for yet, and that must be accepted; its id."""
        return self.submit(self.transfer(TransferKind.LOAD, source, HOST, slots, prefetch=True))

    def store(
        self,
        slots: Sequence[int],
        target: int = NEAR,
        seconds: float = SOON,
        *,
        prove: bool = False,
    ) -> int:
        """Submit a store from host memory that must be accepted; its id."""
        return self.submit(
            self.transfer(TransferKind.STORE, HOST, target, slots, seconds, prove=prove)
        )

    def relay(self, slots: Sequence[int], seconds: float = SOON) -> int:
        """Submit a store from one medium that is not host memory to another; its id."""
        return self.submit(self.transfer(TransferKind.STORE, NEAR, FAR, slots, seconds))

    def submit(self, transfer: Transfer) -> int:
        """Submit what must be accepted; its id."""
        assert self.mover.submit(transfer)
        return transfer.id

    def results(self, *ids: int) -> list[TransferResult]:
        """The results of these transfers, in this order; no others may come."""
        found: dict[int, TransferResult] = {}
        until = time.monotonic() + SOON
        while len(found) < len(ids):
            assert time.monotonic() < until, f"no result of {set(ids) - set(found)}"
            self.mover.wait(1.0)
            for result in self.mover.poll():
                assert result.id in ids
                assert result.id not in found
                found[result.id] = result
        return [found[each] for each in ids]

    def outcomes(self, transfer: int) -> list[Outcome]:
        """How one transfer ended."""
        return self.results(transfer)[0].outcomes

    def right(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether these slots hold the right records."""
        keys = make_keys(max(slots) + 1)
        return all(prove(self.media[tier].record(slot), keys[slot]).ok for slot in slots)

    def empty(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether nothing was ever written to these slots."""
        return all(bytes(self.media[tier].record(slot)) == bytes(RECORD) for slot in slots)

    def reported(self, slots: Sequence[int]) -> list[Outcome | None]:
        """The outcomes that were reported to host memory of these slots."""
        return [self.media[HOST].reported(slot) for slot in slots]
