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
from kvtier.vllm.hooks import cache_groups
from kvtier.vllm.protocol import Errand, Report


class ErrandSpec(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """An errand, in the class that vLLM's jobs carry."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand


@dataclass
class ErrandMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What vLLM's workers tell its scheduler, and what became of our errands, by number."""

    reports: dict[int, Report] = field(default_factory=dict)
    mistakes: int = 0
    """Exceptions caught at the border, on all ranks."""

    def aggregate(self, other: Any) -> Any:
        theirs = super().aggregate(other)
        reports = dict(self.reports)
        for number, report in getattr(other, "reports", {}).items():
            before = reports.get(number)
            reports[number] = report if before is None else before.merge(report)
        return ErrandMetadata(
            completed_jobs=theirs.completed_jobs,
            transfer_stats=theirs.transfer_stats,
            reports=reports,
            mistakes=self.mistakes + getattr(other, "mistakes", 0),
        )


class FailureTolerantWorker(OffloadingConnectorWorker):  # type: ignore[misc]
    """vLLM's worker without its assertions: what fails is reported, once, like what succeeds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unsubmitted_store_jobs: list[tuple[int, Any, Any]] = []
        self._storing: set[int] = set()
        self._told = ErrandMetadata()
        """What has ended since vLLM asked last."""
        self.failed_requests: set[str] = set()
        """Of those that `get_finished` has told of last."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        set_scales(self.vllm_config)

    def make_ready(self) -> None:
        """Return when the first requests will find what they use."""
        payloads, blocks, parts = cache_groups.chunk_sizes(self.vllm_config, self.kv_cache_config)
        chunk = blocks * min(cache_groups.block_tokens(self.vllm_config, self.kv_cache_config))
        batch = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.worker.make_ready(payloads, parts, len(payloads) * -(-batch // chunk))

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
            # At a reset all loads are among them. Requests keep the blocks that theirs go to.
            self.worker.release_blocks(flushed - self._load_jobs.keys())
        if kv_connector_metadata.load_jobs:
            self.worker.begin_step()

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        self.worker.steps.began(getattr(metadata, "decoding", 0))
        self._submit_stores()
        for job_id, entry in metadata.load_jobs.items():
            self._load_jobs[job_id] = entry.req_id
            self.worker.submit_load(job_id, entry.src_spec, entry.dst_spec)
        self.worker.end_step()
        given_up: int | None = getattr(metadata, "given_up", None)
        if given_up is not None:
            self.worker.give_up(given_up)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What the worker's side of a connector answers after a step."""
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, self.failed_requests)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.worker.steps.ended()
        received, told = set[str](), self._told
        self.failed_requests = set()
        for ended in self.worker.take_ended():
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

    def build_connector_worker_meta(self) -> Any:
        if not self._told.reports:
            return None
        told, self._told = self._told, ErrandMetadata()
        told.mistakes = guard.untold()
        return told


def set_scales(vllm_config: Any) -> None:
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
    for connector in getattr(group, "sub_connectors", [group]):
        worker = getattr(connector, "connector_worker", None)
        if isinstance(worker, FailureTolerantWorker):
            worker.finish_stores()
