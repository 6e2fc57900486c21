"""Everything here that is private to vLLM or differs between its versions; nothing else may be.

Supported are 0.31, 0.32 (the reference) and 0.33. vLLM's own offloading connector asserts that no
transfer ever fails; the worker class below takes the place of its worker and lets them fail, one
by one, and the metadata carries what became of each errand to the scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from kvtier.core.offers import Shape
from kvtier.vllm.protocol import Errand, Report

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.31 has none
    CacheHitSource = None

__all__ = [
    "CacheHitSource",
    "LookupResult",
    "Medium",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "TransferResult",
]

logger = logging.getLogger(__name__)


def batched_copy() -> Callable[[Any, Any, Any, bool], None]:
    """vLLM's own copy of many pieces in one call: tensors of sources, targets and sizes."""
    from vllm import _custom_ops

    copy: Callable[[Any, Any, Any, bool], None] = _custom_ops.swap_blocks_batch
    return copy


# -- configuration -----------------------------------------------------------------------------


def register(connector: type) -> None:
    """Let vLLM find a connector by its name alone, too.

    So it looks for those below a MultiConnector when their counters come from another process, and
    the server ends if it does not find one.
    """
    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)


def block_tokens(kv_cache_config: Any) -> list[int]:
    """Tokens a block, of every cache group."""
    return [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]


def is_recurrent(kv_cache_config: Any) -> bool:
    """Whether some group keeps a state instead of one entry a token (Mamba and its kin)."""
    return any(
        "Mamba" in type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups
    )


def chunk_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[tuple[int, ...], int, int]:
    """The payload of a chunk of every cache group, all ranks together; its blocks; its parts.

    Groups that are not offloaded have no chunks: they are given the largest size, which no block
    will ever have.
    """
    config = build_offloading_config(vllm_config, kv_cache_config)
    blocks: int = config.cache.blocks_per_chunk
    parts = 1 if ranks_alike(config) else config.parallel.world_size
    scale = blocks * parts
    sizes = {
        group.group_id: scale * _page_bytes(kv_cache_config.kv_cache_groups[group.group_id])
        for group in config.groups
    }
    largest = max(sizes.values())
    count = len(kv_cache_config.kv_cache_groups)
    return tuple(sizes.get(group, largest) for group in range(count)), blocks, parts


def ranks_alike(config: Any) -> bool:
    """Whether all ranks hold the same KV cache: the latent one of MLA, under tensor parallelism."""
    return bool(config.replicated_layout and not config.canonical_layout)


def _page_bytes(group: Any) -> int:
    """One block of all layers of a group on one rank, without padding."""
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", None)
    if layers:
        return sum(_unpadded(layers[name]) for name in group.layer_names)
    return _unpadded(spec) * len(group.layer_names)


def _unpadded(spec: Any) -> int:
    size = getattr(spec, "unpadded_page_size_bytes", None)
    if size is None:
        size = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
    return int(size)


def group_shapes(connector: Any) -> dict[int, Shape]:
    """How the cache groups that are offloaded keep a prompt, as the scheduler's side knows them."""
    return {
        group.group_idx: Shape(
            group.tokens_per_chunk,
            group.sliding_window_size_in_chunks,
            "Mamba" in type(group.kv_cache_spec).__name__,
        )
        for group in connector.connector_scheduler.config.kv_group_configs
    }


def set_recompute_policy(vllm_config: Any) -> None:
    """A failed load means that the request is recomputed, not that it ends with an error."""
    for config in (vllm_config, _enclosing_config()):
        if config is not None:
            config.kv_transfer_config.kv_load_failure_policy = "recompute"


def _enclosing_config() -> Any:
    """The configuration of the MultiConnector that is constructing this connector, if one is.

    It gives its connectors copies, and the scheduler reads the policy in the original, to which
    nothing else leads.
    """
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        names = frame.f_locals
        maker = type(names.get("self")).__name__
        if maker == "MultiConnector" and frame.f_code.co_name == "__init__":
            return names["vllm_config"]
    return None


# -- requests ----------------------------------------------------------------------------------


def positions(context: Any) -> Mapping[bytes, int]:
    """A request's keys with the token after each, in order, group by group."""
    ends: Mapping[bytes, int] = context._offload_key_positions
    return ends


def prefills_whole_only(vllm_config: Any) -> bool:
    """Whether the engine cannot compute a prompt from its middle on.

    Models that pool over all tokens of a prompt, or its first, need all of them in one step; vLLM's
    plain MLA for CPUs does not look at the tokens before. vLLM turns its own prefix cache and
    chunked prefill off for both.
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    blind = bool(current_platform.is_cpu() and model.use_mla and not chunked)
    return blind or not model.is_chunked_prefill_supported


def numbers_media(vllm_config: Any) -> bool:
    """Whether vLLM names images and the like by counting them, which says nothing of what they are.

    It does so where neither of its own caches needs to know them again.
    """
    media = vllm_config.model_config.multimodal_config
    caches = vllm_config.cache_config.enable_prefix_caching
    return media is not None and not media.mm_processor_cache_gb and not caches


def load_limit(connector: Any, request: Any, computed: int) -> int:
    """The token up to which a request may load: its own limit, or its end."""
    most = connector.connector_scheduler._req_status[request.request_id].max_load_tokens
    tokens: int = request.num_tokens
    return tokens if most is None else min(tokens, computed + most)


def without_hits(connector: Any, request: Any, computed: int) -> tuple[int | None, bool]:
    """What the scheduler's side answers if it finds nothing."""
    scheduler = connector.connector_scheduler
    answer: tuple[int | None, bool] = scheduler.get_num_new_matched_tokens(request, computed, 0)
    return answer


def keep_whole_chunks_only(connector: Any) -> None:
    """Leave out what vLLM keeps of a hybrid model's prompt behind its last whole chunk: it is never
    found here, and a request whose `max_offload_tokens` end before it would end the engine."""
    scheduler = connector.connector_scheduler
    scheduler.config = scheduler.config._replace(supports_partial_tail=False)


@contextlib.contextmanager
def resettable(connector: Any) -> Iterator[None]:
    """Allow for a reset right after another, before the workers were told what to finish."""
    scheduler = connector.connector_scheduler
    before, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
    try:
        yield
    finally:
        scheduler._current_batch_jobs_to_flush |= before


def store_again(connector: Any, request: str) -> None:
    """After a failed load: let the recomputed chunks be stored, as if nothing had been found."""
    status = connector.connector_scheduler._req_status.get(request)
    for group in status.group_states if status is not None else ():
        group.next_stored_chunk_idx = 0


def note_taken(connector: Any, blocks: Any) -> None:
    """A request has these blocks now, whoever loads what into them: what is still to be copied out
    of them goes first. 0.31 and 0.32 look only at those that we load ourselves."""
    taken = connector.connector_scheduler._current_batch_allocated_block_ids
    taken.update(block.block_id for group in blocks.blocks for block in group if block.block_id)


def read_as_0_33(connector: Any, scheduled: Any) -> Any:
    """A step's output without what 0.31 and 0.32 get wrong: all blocks of a session that goes on
    they take for more of them, and a load right after a reset's preemption ends the engine."""
    scheduler = connector.connector_scheduler
    for new in scheduled.scheduled_new_reqs:
        for group in scheduler._req_status[new.req_id].group_states:
            group.block_ids.clear()
    loads = {job.req_id for job in scheduler._current_batch_load_jobs.values()}
    preempted = scheduled.preempted_req_ids or set()
    if loads.isdisjoint(preempted):
        return scheduled
    return dataclasses.replace(scheduled, preempted_req_ids=preempted - loads)


@contextlib.contextmanager
def manager_locked(connector: Any) -> Iterator[None]:
    """0.33 guards the manager with a lock; earlier ones call it from one thread only."""
    locked = getattr(connector.connector_scheduler, "_manager_locked", None)
    with locked() if locked is not None else contextlib.nullcontext():
        yield


# -- errands across processes --------------------------------------------------------------------


class ErrandSpec(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """An errand, in the class that vLLM's jobs carry."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand


@dataclass
class ErrandMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What vLLM's workers tell its scheduler, and what became of our errands."""

    reports: dict[int, Report] = field(default_factory=dict)

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
        self.failed_requests: set[str] = set()

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
            self.worker.wait(flushed)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        self._submit_stores()
        for job_id, entry in metadata.load_jobs.items():
            self._load_jobs[job_id] = entry.req_id
            self.worker.submit_load(job_id, entry.src_spec, entry.dst_spec)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        meta = self._connector_worker_meta
        received: set[str] = set()
        self.failed_requests = set()
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
                    self.failed_requests.add(request)
        return set(), received

    def build_connector_worker_meta(self) -> Any:
        meta = self._connector_worker_meta
        if not meta.completed_jobs:
            return None
        self._connector_worker_meta = ErrandMetadata()
        return meta


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
