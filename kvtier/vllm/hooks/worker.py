"""vLLM's `OffloadingConnectorWorker`, without its assertions that no transfer ever fails.

`FailureTolerantWorker` takes its place and lets transfers fail one by one. `WorkerJobMetadata`
carries the outcome of each job to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvtier import guard
from kvtier.interfaces.mover import TransferKind
from kvtier.vllm.hooks import cache_groups
from kvtier.vllm.protocol import Report, WorkerJob
from kvtier.vllm.settings import crosses_degrees, read_copies
from kvtier.vllm.worker import RankWorker, blocks_of


class WorkerJobSpec(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A worker job, in the class that vLLM's jobs carry."""

    def __init__(self, worker_job: WorkerJob) -> None:
        self.worker_job = worker_job


@dataclass
class WorkerJobMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What vLLM's workers tell its scheduler, and the reports on worker jobs, by number."""

    reports: dict[int, Report] = field(default_factory=dict)
    mistakes: int = 0
    """Exceptions caught at the border, on all ranks."""

    def aggregate(self, other: Any) -> Any:
        theirs = super().aggregate(other)
        reports = dict(self.reports)
        for number, report in getattr(other, "reports", {}).items():
            before = reports.get(number)
            reports[number] = report if before is None else before.merge(report)
        return WorkerJobMetadata(
            completed_jobs=theirs.completed_jobs,
            transfer_stats=theirs.transfer_stats,
            reports=reports,
            mistakes=self.mistakes + getattr(other, "mistakes", 0),
        )


class FailureTolerantWorker(OffloadingConnectorWorker):  # type: ignore[misc]
    """Reports each transfer once, whether it succeeded or failed. vLLM's methods expect an
    `OffloadingWorker` of its own; these go to kvtier's worker directly."""

    worker: Any
    """The rank's `RankWorker`, once its KV caches are known."""
    _rank: RankWorker
    """The same, of which no exception comes out."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unsubmitted_store_jobs: list[tuple[int, Any, Any]] = []
        self._storing: set[int] = set()
        self._mark: object = None
        """What the loads of this step come after, if not after all that the engine has given its
        device to do."""
        self._told = WorkerJobMetadata()
        """What has ended since vLLM asked last."""
        self.failed_requests: set[str] = set()
        """Of those that `get_finished` has told of last."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if crosses_degrees(self.spec.extra_config):
            groups = [group.group_id for group in self.spec.config.groups]
            self.spec.heads = cache_groups.head_shapes(
                self.vllm_config, self.kv_cache_config, groups, kv_caches
            )
        super().register_kv_caches(kv_caches)
        self._rank = guard.never_raising(self.worker)

    def make_ready(self) -> None:
        """Return when the first requests will find what they use."""
        payloads, blocks, parts = cache_groups.chunk_sizes(
            self.vllm_config, self.kv_cache_config, read_copies(self.spec.extra_config)
        )
        chunk = blocks * min(cache_groups.block_tokens(self.vllm_config, self.kv_cache_config))
        batch = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._rank.make_ready(payloads, parts, len(payloads) * -(-batch // chunk))

    def _submit_stores(self) -> None:
        jobs, self._unsubmitted_store_jobs = self._unsubmitted_store_jobs, []
        for job_id, source, target in jobs:
            self._storing.add(job_id)
            self._begin(TransferKind.STORE, job_id, target.worker_job, source, None)

    def _begin(
        self, kind: TransferKind, job_id: int, worker_job: WorkerJob, device: Any, mark: object
    ) -> None:
        """Whatever happens, the job ends and is reported."""
        if not self._begun(kind, job_id, worker_job, device, mark):
            self.worker.abandon(job_id, worker_job)

    @guard.guarded(lambda: False)
    def _begun(
        self, kind: TransferKind, job_id: int, worker_job: WorkerJob, device: Any, mark: object
    ) -> bool:
        self.worker.begin(kind, job_id, worker_job, blocks_of(device), mark)
        return True

    def finish_stores(self) -> None:
        """Return when what was given to be stored has left the device."""
        self._rank.wait(self._storing)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        flushed = kv_connector_metadata.jobs_to_flush
        for job_id in flushed or ():
            entry = kv_connector_metadata.store_jobs.pop(job_id, None)
            if entry is not None:
                self._unsubmitted_store_jobs.append((job_id, entry.src_spec, entry.dst_spec))
        self._submit_stores()
        if flushed:
            # At a reset all loads are among them. Requests keep the blocks that theirs go to.
            self._rank.release_blocks(flushed - self._load_jobs.keys())
        if kv_connector_metadata.load_jobs:
            self._mark = self._rank.mark()

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        self.worker.steps.began(getattr(metadata, "decoding", 0))
        self._submit_stores()
        for job_id, entry in metadata.load_jobs.items():
            self._load_jobs[job_id] = entry.req_id
            worker_job, device = entry.src_spec.worker_job, entry.dst_spec
            self._begin(TransferKind.LOAD, job_id, worker_job, device, self._mark)
        self._mark = None
        given_up: int | None = getattr(metadata, "given_up", None)
        if given_up is not None:
            self._rank.give_up(given_up)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What the worker's side of a connector answers after a step."""
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, self.failed_requests)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.worker.steps.ended()
        received, told = set[str](), self._told
        self.failed_requests = set()
        for ended in self._rank.poll() or ():
            request = self._load_jobs.pop(ended.job_id, None)
            self._storing.discard(ended.job_id)
            told.mark_completed(ended.job_id)
            told.reports[ended.number] = ended.report
            if ended.ok:
                stats = told.transfer_stats
                (stats.store if request is None else stats.load).record(
                    ended.report.bytes_moved, ended.seconds
                )
            if request is not None:
                received.add(request)
                if not ended.ok:
                    self.failed_requests.add(request)
        return set(), received

    def shutdown(self) -> None:
        if self.worker is not None:
            self._rank.close()

    def build_connector_worker_meta(self) -> Any:
        if not self._told.reports:
            return None
        told, self._told = self._told, WorkerJobMetadata()
        told.mistakes = guard.untold()
        return told


def finish_stores() -> None:
    """Wait until the worker has copied out what it was given, if it lives in this process.

    An engine that is one process may sleep right after a reset, and its device's memory is gone
    then. An engine of several processes has waited for all jobs before.
    """
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    for connector in getattr(group, "sub_connectors", [group]):
        worker = getattr(connector, "connector_worker", None)
        if isinstance(worker, FailureTolerantWorker):
            worker.finish_stores()
