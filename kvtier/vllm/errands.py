"""vLLM's worker, of which a transfer may fail.

Its offloading connector asserts that none ever does. The class below takes the place of its worker
and lets them fail, one by one; the metadata carries what became of each errand to the scheduler.
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

from kvtier.vllm import guard
from kvtier.vllm.protocol import Errand, Report
from kvtier.vllm.recount import Job, Orders, Said, Unheard


class ErrandSpec(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """An errand, in the class that vLLM's jobs carry."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand


@dataclass
class ErrandMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What vLLM's workers tell its scheduler, and what became of our errands."""

    reports: dict[int, Report] = field(default_factory=dict)
    mistakes: int = 0
    """Exceptions caught at the border, on all ranks."""

    def aggregate(self, other: Any) -> Any:
        base = super().aggregate(other)
        reports = dict(self.reports)
        for number, report in getattr(other, "reports", {}).items():
            mine = reports.get(number)
            reports[number] = report if mine is None else mine.merge(report)
        return ErrandMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            reports=reports,
            mistakes=self.mistakes + getattr(other, "mistakes", 0),
        )


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What the worker's side of a connector answers after a step."""
    return KVConnectorTransferResults(sent, received, failed)


class FailureTolerantWorker(OffloadingConnectorWorker):  # type: ignore[misc]
    """vLLM's worker without its assertions: what fails is reported, once, like what succeeds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connector_worker_meta = ErrandMetadata()
        self._unsubmitted_store_jobs: list[tuple[int, Any, Any]] = []
        self._storing: set[int] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._unheard = Unheard()
        self.failed_requests: set[str] = set()
        """Of those that `get_finished` has told of last."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        _set_scales(self.vllm_config)

    def _submit_stores(self) -> None:
        jobs, self._unsubmitted_store_jobs = self._unsubmitted_store_jobs, []
        for job_id, source, target in jobs:
            self._storing.add(job_id)
            self.worker.submit_store(job_id, source, target)

    def finish_stores(self) -> None:
        """Return when what was given to be stored has left the device."""
        self.worker.wait(self._storing)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        flushed = kv_connector_metadata.jobs_to_flush
        for job_id in flushed or ():
            entry = kv_connector_metadata.store_jobs.pop(job_id, None)
            if entry is not None:
                self._unsubmitted_store_jobs.append((job_id, entry.src_spec, entry.dst_spec))
        self._submit_stores()
        if flushed:
            self.worker.make_way(flushed)
        if kv_connector_metadata.load_jobs:
            self.worker.begin_step()

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        self._submit_stores()
        for job_id, entry in metadata.load_jobs.items():
            self._load_jobs[job_id] = entry.req_id
            self.worker.submit_load(job_id, entry.src_spec, entry.dst_spec)
        self.worker.end_step()
        orders: Orders | None = getattr(metadata, "orders", None)
        if orders is not None:
            self._unheard.begin(orders)
            if orders.given_up is not None:
                self.worker.give_up(orders.given_up)
            if orders.again is not None:
                self._say_again(orders.again)

    def _say_again(self, given: dict[int, Job]) -> None:
        """Account for these jobs: steps of theirs were lost on the way here, or on the way back."""
        known = {*self._storing, *self._load_jobs}
        known.update(number for number, *_ in self._unsubmitted_store_jobs)
        for said in self._unheard.take():
            known.update(said.metadata.completed_jobs)
            self._connector_worker_meta = self._connector_worker_meta.aggregate(said.metadata)
            self._received |= said.received
            self._failed |= said.failed
        for number, job in given.items():
            if number not in known:
                if job.request is not None:
                    self._load_jobs[number] = job.request
                self.worker.abandon(number, job.errand)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        meta = self._connector_worker_meta
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        for ended in self.worker.take_ended():
            request = self._load_jobs.pop(ended.job_id, None)
            self._storing.discard(ended.job_id)
            meta.mark_completed(ended.job_id)
            meta.reports[ended.number] = ended.report
            if ended.ok:
                stats = meta.transfer_stats
                (stats.store if request is None else stats.load).record(
                    ended.report.bytes_moved, ended.seconds
                )
            if request is not None:
                received.add(request)
                if not ended.ok:
                    failed.add(request)
        if meta.completed_jobs:
            self._unheard.keep(Said(meta, received, failed))
        self.failed_requests = failed
        return set(), received

    def build_connector_worker_meta(self) -> Any:
        meta = self._connector_worker_meta
        if not meta.completed_jobs:
            return None
        self._connector_worker_meta = ErrandMetadata()
        meta.mistakes = guard.untold()
        return meta


def _set_scales(vllm_config: Any) -> None:
    """Let layers that keep scales in their KV cache set all of them now, and not when they first
    compute something: what was loaded until then would be scaled wrong."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        attention: Any = getattr(layer, "impl", None)
        if getattr(attention, "_is_per_token_head_quant", False):
            attention._ensure_scale_caches(layer.kv_cache)


def finish_stores() -> None:
    """Let the worker copy out what it was given, if it lives in this process.

    An engine that is one process may sleep right after a reset, and its device's memory is gone
    then. One of several processes has waited for all jobs before.
    """
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    for connector in getattr(group, "_connectors", [group]):
        worker = getattr(connector, "connector_worker", None)
        if isinstance(worker, FailureTolerantWorker):
            worker.finish_stores()
