"""What every mover writes down: how much is in flight for which tier, and the counters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.core.interfaces.mover import MoverStats, Transfer, TransferKind, TransferResult
from kvtier.types import Outcome


class TransferCounts:
    """Admission and counters of a mover. Not locked: each mover calls it under its own lock.

    A host tier has no queue: its memory is the buffer of the medium at the other end. Loads are
    counted against loads alone, stores against all, so that stores never crowd loads out.
    Prefetches are counted against loads and each other, and nothing is counted against them.
    """

    def __init__(self, host: Sequence[bool], queue_blocks: Sequence[int] | None) -> None:
        self._host = host
        self._bounds = queue_blocks
        self._in_flight = {kind: [0] * len(host) for kind in TransferKind}
        self._prefetching = [0] * len(host)
        self._stats = MoverStats()

    def lanes(self, transfer: Transfer) -> tuple[int, ...]:
        """The tiers whose handlers this transfer occupies, in the order it does so."""
        if self._host[transfer.target]:
            return (transfer.source,)
        if self._host[transfer.source]:
            return (transfer.target,)
        return (transfer.source, transfer.target)

    def admit(self, transfer: Transfer) -> bool:
        """Take a transfer in, unless a tier would have more in flight than its bound.

        Raises ValueError on one that makes no sense: that is the caller's own mistake.
        """
        blocks = len(transfer.keys)
        if not len(transfer.source_spec) == len(transfer.target_spec) == blocks:
            raise ValueError(f"transfer {transfer.id} needs one place at both ends for every key")
        if transfer.source == transfer.target or not (
            0 <= transfer.source < len(self._host) and 0 <= transfer.target < len(self._host)
        ):
            raise ValueError(f"transfer {transfer.id} must go from one tier to another")
        lanes = self.lanes(transfer)
        if self._bounds is not None and any(
            self._waiting(transfer, lane) + blocks > self._bounds[lane] for lane in lanes
        ):
            return False
        counted = self._counted(transfer)
        for lane in lanes:
            counted[lane] += blocks
        self._stats.in_flight_blocks += blocks
        return True

    def release(self, transfer: Transfer) -> None:
        """Take back an admission: the transfer has ended, or could not be handed on."""
        blocks, counted = len(transfer.keys), self._counted(transfer)
        for lane in self.lanes(transfer):
            counted[lane] -= blocks
        self._stats.in_flight_blocks -= blocks

    def hasten(self, transfer: Transfer) -> None:
        """A prefetch is a load from now on, even if that makes more loads than the bound."""
        blocks = len(transfer.keys)
        for lane in self.lanes(transfer):
            self._prefetching[lane] -= blocks
            self._in_flight[transfer.kind][lane] += blocks
        transfer.prefetch = False

    def ended(self, transfer: Transfer, result: TransferResult) -> None:
        """Close the account of an admitted transfer."""
        self.release(transfer)
        self._stats.timeouts += Outcome.TIMEOUT in result.outcomes

    def restarted(self) -> None:
        """Count a start that followed a death."""
        self._stats.restarts += 1

    def stats(self) -> MoverStats:
        """A copy of the counters."""
        return msgspec.structs.replace(self._stats)

    def _counted(self, transfer: Transfer) -> list[int]:
        return self._prefetching if transfer.prefetch else self._in_flight[transfer.kind]

    def _waiting(self, transfer: Transfer, lane: int) -> int:
        loads = self._in_flight[TransferKind.LOAD][lane]
        if transfer.prefetch:
            return loads + self._prefetching[lane]
        if transfer.kind is TransferKind.LOAD:
            return loads
        return loads + self._in_flight[TransferKind.STORE][lane]
