"""Copies between an engine's own host memory and the first tier of a stack, for engines that do
their copies to the device themselves.

Each page or chunk of the engine's is one record: the copier takes its checksum on the way in, and
proves it on the way out. The mover does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvtier.chain.ledger import Ticket
from kvtier.chain.tier_chain import TierChain
from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier
from kvtier.device.layout import Bytes, DeviceBlocks, DeviceLayout
from kvtier.device.records import RankRecords
from kvtier.interfaces.handler import RegionHandler
from kvtier.interfaces.mover import TransferKind
from kvtier.types import BlockKey, Namespace, Outcome, group_of

_BLAMED = (Outcome.CORRUPT, Outcome.GONE, Outcome.IO_ERROR)
"""What says that a record itself is bad."""


class HostCopy(msgspec.Struct, eq=False):
    """A job: under way, or ended."""

    number: int
    reserved: Sequence[BlockKey]
    """Those that have a slot."""
    ticket: Ticket | None = None
    """Of a load."""
    failed: Mapping[BlockKey, Outcome] = msgspec.field(default_factory=dict)
    result: CopyResult | None = None
    ended: bool = False

    @property
    def copied(self) -> set[BlockKey]:
        """What has come, or was taken in, once it has ended."""
        return {key for key in self.reserved if key not in self.failed}

    @property
    def why(self) -> str:
        """How those ended that have failed, for a log."""
        return ", ".join(sorted({each.value for each in self.failed.values()})) or "no room"


class HostCopies:
    """Begins and ends jobs. One thread at a time may call it, or the chain; any may wait for the
    copier."""

    def __init__(
        self,
        chain: TierChain,
        host: RegionHandler,
        namespace: Namespace,
        layout: DeviceLayout,
        arrays: list[Bytes],
    ) -> None:
        """`host` is the first tier's; `arrays` have the engine's memory as `layout` says."""
        self._chain, self._region, self._groups = chain, host.region, len(layout.groups)
        self.copier = CpuCopier(RankRecords(layout, host.region, namespace.digest), arrays)
        self._jobs: dict[int, HostCopy] = {}

    def begin(
        self,
        number: int,
        kind: TransferKind,
        places: Mapping[BlockKey, int],
        request: str,
        deadline: float,
    ) -> HostCopy:
        """Store what lies at these places, or load these blocks there: of one group, or sorted by
        group. It may leave some out, and has ended already if that is all of them, or if this
        raises."""
        if kind is TransferKind.STORE:
            reservation = self._chain.prepare_store(list(places))
            job, spec, deadline = HostCopy(number, reservation.keys), reservation.spec, float("inf")
        else:
            ticket = self._chain.begin_load(list(places), request, deadline, proves=True)
            job, spec = HostCopy(number, list(ticket.keys), ticket), ticket.spec
        self._jobs[number] = job
        if not job.reserved:
            self._end(job, {})
            return job
        try:
            self._region.refresh(getattr(spec, "slots", ()))  # it may have grown
            ids = np.array([places[key] for key in job.reserved], np.int64)
            self.copier.jobs.submit(
                CopyJob(
                    id=number,
                    kind=kind,
                    keys=job.reserved,
                    slots=getattr(spec, "slots", ()),
                    blocks=DeviceBlocks(ids, self._sizes(job.reserved), [0] * self._groups),
                    deadline=deadline,
                )
            )
        except BaseException:
            self._end(job, dict.fromkeys(job.reserved, Outcome.DROPPED))
            raise
        return job

    def _sizes(self, keys: Sequence[BlockKey]) -> list[int]:
        """How many of these each group of the layout has. A layout of one takes those of any."""
        if self._groups == 1:
            return [len(keys)]
        counted = Counter(map(group_of, keys))
        return [counted[group] for group in range(self._groups)]

    def end(self, result: CopyResult) -> HostCopy:
        """Let go of what a job held that the copier says has ended."""
        job = self._jobs[result.id]
        job.result = result
        outcomes = zip(job.reserved, result.outcomes, strict=True)
        self._end(job, {key: outcome for key, outcome in outcomes if not outcome.ok})
        return job

    def _end(self, job: HostCopy, failed: Mapping[BlockKey, Outcome]) -> None:
        del self._jobs[job.number]
        job.failed, job.ended = failed, True
        if job.ticket is None:
            self._chain.complete_store(job.reserved, failed)
        else:
            blamed = {key: outcome for key, outcome in failed.items() if outcome in _BLAMED}
            self._chain.end_load(job.ticket, blamed, proved=job.copied)

    def poll_chain(self) -> None:
        """Collect what the mover has done, and start what is next."""
        self._chain.poll()
        for tier in self._chain.tiers:
            tier.take_events()  # nobody asks for them
