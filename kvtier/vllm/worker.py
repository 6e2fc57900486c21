"""The workers' side: carries worker jobs between a rank's KV tensors and the engine's region.

The region is mapped before the engine serves, or when the first job names it, and mapped anew when
a later one names another. Nothing here raises: a job that cannot be carried out is reported as
failed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier, host_arrays
from kvtier.device.cuda import device as cuda_device
from kvtier.device.direct import DirectAccess, KvikioDriver, probe
from kvtier.device.layout import DeviceBlocks, DeviceLayout, HeadShape
from kvtier.device.pacing import EngineSteps
from kvtier.device.pinned import PinPlan
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.errors import KVTierError
from kvtier.interfaces.handler import HostRegion
from kvtier.interfaces.mover import TransferKind
from kvtier.settings import Gds
from kvtier.types import Outcome
from kvtier.vllm.protocol import NO_SLOT, RecordGeometry, Report, WorkerJob

logger = logging.getLogger(__name__)

OpenCopier = Callable[[DeviceLayout, HostRegion, bytes], DeviceCopier]
READY_S = 120.0
"""An engine's start waits no longer."""


class RankShare(msgspec.Struct, frozen=True):
    """What a rank has of the engine's blocks, and of their records.

    Where several ranks hold the same (`copies`), a record has one part for them: the first of them
    writes it, and all read it. Where each has layers of its own (`pipelined`), some may have more.
    """

    rank: int
    ranks: int
    blocks_per_chunk: int
    group_ids: tuple[int, ...]
    copies: int = 1
    pipelined: bool = False
    heads: Sequence[Sequence[HeadShape]] = ()
    """Of its pages, where it loads what other numbers of ranks have written."""

    @property
    def part(self) -> int:
        """The part of a record that it reads, and writes."""
        return self.rank // self.copies

    @property
    def parts(self) -> int:
        """How many there are."""
        return self.ranks // self.copies

    @property
    def writes(self) -> bool:
        """Whether it does; else another, which holds the same, writes what it has to store."""
        return self.rank % self.copies == 0

    def layout(self, caches: Any, geometry: RecordGeometry) -> DeviceLayout:
        """How the KV tensors lie, which must be what the scheduler expects."""
        stated = tuple(geometry.group_bytes[group] for group in self.group_ids)
        try:
            layout = DeviceLayout.of_caches(
                caches, self.blocks_per_chunk, self.part, self.parts, self.group_ids, self.heads
            )
            if self.heads and not layout.knows_heads:
                raise ValueError("they do not show where each head's bytes lie (across_degrees)")
            given = f"the KV tensors give {layout.group_bytes} in {self.parts}"
            layout = layout.widened(stated) if self.pipelined else layout
            if (stated, geometry.parts) == (layout.group_bytes, self.parts):
                return layout
        except ValueError as error:
            given = str(error)
        raise ValueError(
            f"the scheduler expects chunks of {stated} bytes in {geometry.parts} parts, and "
            f"{given}: this layout is not supported, and nothing is kept"
        )


class EndedJob(msgspec.Struct):
    """A job of vLLM's that has ended on this rank."""

    job_id: int
    number: int
    ok: bool
    report: Report
    seconds: float


class RankWorker:
    """Copies for one rank. Called from vLLM's worker thread only; the copier has its own."""

    def __init__(
        self,
        caches: Any,
        share: RankShare,
        *,
        gds: Gds = Gds.OFF,
        folders: Sequence[Path] = (),
        attach: Callable[[Path], HostRegion],
        find_region: Callable[[], Path | None] = lambda: None,
        open_copier: OpenCopier | None = None,
    ) -> None:
        self._caches, self._share = caches, share
        self.steps = EngineSteps()
        """Told by whoever is told of the engine's steps."""
        self._least_slots = 0
        """What a full batch may need at once."""
        self._find_region = find_region
        self._open_copier = open_copier or self._device_copiers(gds, folders)
        self._copier: DeviceCopier | None = None
        self._attach = attach
        self._region: HostRegion | None = None
        self._opened: tuple[str, RecordGeometry] | None = None
        self._numbers: dict[int, tuple[int, TransferKind]] = {}
        """The worker job of each job under way, and what kind of job it is."""
        self._writes_first = writes_first()
        self._overtaken: set[int] = set()
        """Jobs whose blocks the engine may have written to before they were copied out."""
        self._ended: list[EndedJob] = []
        self._said = ""
        """The last reason for a failure that was logged."""

    # -- jobs ------------------------------------------------------------------------------

    def mark(self) -> object:
        """Called when the engine is about to compute: whether to begin loads before it has, and
        after what. None where it may yet write to the blocks that it has found for them."""
        copier = self._copier
        return copier.jobs.mark() if self._writes_first and copier is not None else None

    def begin(
        self,
        kind: TransferKind,
        job_id: int,
        worker_job: WorkerJob,
        blocks: DeviceBlocks,
        mark: object = None,
    ) -> None:
        """Copy blocks out of the device, or into it as they arrive in the region, after what the
        engine had given its device to do when the mark was taken, or has by now. Reported later,
        like everything that goes wrong."""
        slots, files = worker_job.slots, worker_job.files
        if any(slot == NO_SLOT and at not in files for at, slot in enumerate(slots)):
            self._fail(job_id, worker_job, Outcome.DROPPED)
            return
        try:
            copier = self._open(worker_job.region, worker_job.geometry)
            if kind is TransferKind.STORE and not self._share.writes:
                report = Report(1, reads_files=self._reads_files)
                self._ended.append(EndedJob(job_id, worker_job.number, True, report, 0.0))
                return
            self._numbers[job_id] = (worker_job.number, kind)
            if self._region is not None:
                self._region.refresh([slot for slot in slots if slot != NO_SLOT])
            copier.jobs.submit(
                CopyJob(
                    id=job_id,
                    kind=kind,
                    keys=worker_job.keys,
                    slots=slots,
                    blocks=blocks,
                    deadline=worker_job.deadline,
                    files=files,
                ),
                mark,
            )
        except (KVTierError, OSError, RuntimeError, ValueError) as error:
            if str(error) != self._said:  # else once a request, for ever
                self._said = str(error)
                logger.warning(
                    "a %s of %d blocks failed: %s", kind.value, len(worker_job.keys), error
                )
            self.abandon(job_id, worker_job)

    def _fail(self, job_id: int, worker_job: WorkerJob, outcome: Outcome) -> None:
        failures = dict.fromkeys(range(len(worker_job.keys)), outcome)
        report = Report(1, failures, reads_files=self._reads_files)
        self._ended.append(EndedJob(job_id, worker_job.number, False, report, 0.0))

    @property
    def _reads_files(self) -> bool:
        return self._copier is not None and self._copier.reads_files

    def give_up(self, number: int) -> None:
        """Wait no longer for what has not arrived of a worker job's load."""
        for job_id, (each, _) in self._numbers.items():
            if each == number and self._copier is not None:
                self._copier.jobs.give_up(job_id)

    def abandon(self, job_id: int, worker_job: WorkerJob) -> None:
        """Report that a job failed which the copier does not have."""
        self._numbers.pop(job_id, None)
        self._fail(job_id, worker_job, Outcome.IO_ERROR)

    # -- results ---------------------------------------------------------------------------

    def poll(self) -> list[EndedJob]:
        """Jobs that ended since the last call."""
        if not (self._numbers or self._ended):
            return []
        ended, self._ended = self._ended, []
        if self._copier is not None:
            ended += [self._report(result) for result in self._copier.jobs.poll()]
        return ended

    def _report(self, result: CopyResult) -> EndedJob:
        number, _ = self._numbers.pop(result.id)
        outcomes = result.outcomes
        if result.id in self._overtaken:
            self._overtaken.remove(result.id)
            outcomes = [Outcome.DROPPED] * len(outcomes)
        failures = {index: outcome for index, outcome in enumerate(outcomes) if not outcome.ok}
        report = Report(
            1,
            failures,
            result.bytes_moved,
            result.busy_seconds,
            result.bytes_read,
            result.read_seconds,
            self._reads_files,
            self._copier is None or self._copier.pinned,
        )
        ok = not failures
        return EndedJob(result.id, number, ok, report, result.seconds)

    def release_blocks(self, job_ids: Collection[int]) -> None:
        """The engine is about to write to device blocks of these jobs: return when it may. Where it
        may have done so already, what was not copied out by its last step is lost, and nobody need
        wait for it."""
        known = self._numbers
        lost = {
            each
            for each in job_ids
            if self._writes_first and each in known and known[each][1] is TransferKind.STORE
        }
        self._overtaken |= lost
        if self._copier is not None:
            for each in lost:
                self._copier.jobs.give_up(each)
        self.wait(set(job_ids) - lost)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs no longer touch device blocks."""
        if self._copier is not None:
            self._copier.jobs.wait(job_ids)

    # -- the region ------------------------------------------------------------------------

    def make_ready(self, group_bytes: tuple[int, ...], parts: int, least_slots: int) -> None:
        """Before the engine serves: open its region, and return when copies are as fast as the
        start should wait for. What this cannot do the first worker job does, or fails at."""
        try:
            path = self._find_region()
            if path is None:
                logger.info("CPU memory is opened with the first request")
                return
            self._least_slots = least_slots
            self.steps.begin_anew()
            with contextlib.closing(self._attach(path)) as region:
                geometry = RecordGeometry(region.namespace, group_bytes, parts)
            if not self._open(str(path), geometry).make_ready(READY_S):
                logger.warning("the engine serves before its copies are as fast as they will be")
        except (KVTierError, OSError, RuntimeError, ValueError) as error:
            logger.warning("CPU memory cannot be opened before there are requests: %s", error)

    def _open(self, name: str, geometry: RecordGeometry) -> DeviceCopier:
        if self._copier is not None and self._opened == (name, geometry):
            return self._copier
        self.close()
        layout = self._share.layout(self._caches, geometry)
        self._region = self._attach(Path(name))
        self._opened = (name, geometry)
        self._copier = self._open_copier(layout, self._region, geometry.digest)
        return self._copier

    def close(self) -> None:
        """End the copier and let go of the region."""
        if self._copier is not None:
            self._copier.close()
            self._ended += [self._report(result) for result in self._copier.jobs.poll()]
            self._copier = None
        if self._region is not None:
            self._region.close()
            self._region = None

    def _device_copiers(self, gds: Gds, folders: Sequence[Path]) -> OpenCopier:
        """How copiers are opened for the device that the KV tensors are on.

        Raises MediumError if that is to read from disks directly, and cannot.
        """
        device = self._caches.tensors[0].tensor.device
        index = device.index or 0

        def attempt(folder: Path) -> str | None:
            if device.type != "cuda":
                return f"the KV tensors are on a {device.type} device"
            return probe(folder, device=index)

        access = DirectAccess(gds, folders, attempt, lambda: KvikioDriver(index))
        if gds is Gds.REQUIRE:
            access.works()
        if device.type == "cuda":
            cuda_device.build_kernels(index)

        def open_copier(layout: DeviceLayout, region: HostRegion, namespace: bytes) -> DeviceCopier:
            if device.type == "cpu":
                records = RankRecords(layout, region, namespace)
                return CpuCopier(records, host_arrays(self._caches))
            if device.type != "cuda":
                raise ValueError(f"KV tensors on a {device.type} device are not supported")
            plan = PinPlan(
                self.steps,
                region.pinning_order(),
                self._least_slots,
                partial(region.note_pinned, self._share.rank),
                region.watch,
            )
            # What has to be regrouped goes by way of host memory, as all its neighbours then do.
            no_files = access.mode is Gds.OFF or layout.knows_heads
            open_direct = None if no_files else lambda: access.open(layout, namespace)
            return cuda_device.open_copier(
                layout, region, namespace, index=index, plan=plan, open_direct=open_direct
            )

        return open_copier


def writes_first() -> bool:
    """Whether the engine writes to blocks that have changed hands before it asks for what is still
    to be copied out of them.

    vLLM's second model runner does: it zeroes blocks, copies others into them and carries states
    on, and then calls its connector. On CUDA it is the one that runs.
    """
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return False
    config = get_current_vllm_config_or_none()
    return config is not None and bool(config.use_v2_model_runner)


def blocks_of(spec: Any) -> DeviceBlocks:
    """vLLM's description of device blocks as plain numbers."""
    ids = np.asarray(spec.block_ids, dtype=np.int64)
    return DeviceBlocks(ids, list(spec.group_sizes), list(spec.block_indices))
