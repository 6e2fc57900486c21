"""A stack of kvtier's below vLLM's own CPU tier, as a secondary tier of vLLM's tiering.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [{"type": "KVTierSecondary", "module_path": "kvtier.vllm.secondary",
                           "stack": "stack.yaml"}]}

vLLM copies between the device and its own CPU memory; this tier copies between that and the slots
of the stack's cpu tier, through which blocks pass on their way. Each chunk of vLLM's is one record:
the copier takes its checksum on the way in, and proves it on the way out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import vllm

from kvtier import config as stack_config
from kvtier.device.copier import CopyResult
from kvtier.device.host_copies import HostCopies, HostCopy
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.errors import ConfigError
from kvtier.guard import guarded
from kvtier.interfaces.handler import RegionHandler
from kvtier.interfaces.mover import TransferKind
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, Presence
from kvtier.vllm import unsupported_modes
from kvtier.vllm.hooks import cache_groups, config, engine, interfaces, tiering
from kvtier.vllm.hooks.versions import check_version, warn_if_untested
from kvtier.vllm.identity import namespace_facts
from kvtier.vllm.identity.prompts import salted
from kvtier.vllm.settings import check_first_tier, engine_name, hash_warning

logger = logging.getLogger(__name__)

_IDLE_S = 0.05
"""An engine that has not stepped for so long is idle: a thread calls the chain in its place."""


class _Job(msgspec.Struct):
    """A job of vLLM's under way; `keys` has its keys by those of the tiers."""

    keys: Mapping[BlockKey, bytes]
    request: str


class KVTierSecondary(tiering.SecondaryTierManager):  # type: ignore[misc]
    """Keeps what vLLM's CPU tier holds in the tiers of a stack.

    All methods may be called by several threads. None waits for a transfer but `drain_jobs` and
    `shutdown`, and no exception leaves one but the constructor, which refuses an engine that cannot
    be served.
    """

    medium = tiering.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        stack: str | Mapping[str, Any],
        weights: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_version(vllm.__version__)
        warn_if_untested(vllm.__version__)
        read = stack_config.load(stack)
        namespace = _namespace(offloading_spec, self.block_size_bytes, read, weights)
        self._load_seconds = max(tier.load_deadline.seconds for tier in read.tiers)
        self._stack = Stack.open(
            read,
            namespace,
            serving=True,
            engine=engine_name(read, offloading_spec.config.parallel),
        )
        self._chain = self._stack.chain
        try:
            self._copies = self._open_copies(primary_kv_view)
        except BaseException:
            self._stack.close()
            raise
        self._lock = threading.RLock()
        self._jobs: dict[int, _Job] = {}
        self._finished: list[Any] = []
        self._failed: dict[str, set[bytes]] = {}
        """What a request asks for no more: its load has failed once."""
        self._epoch = b""
        self._stale = False
        """Other weights were read, and vLLM's own caches may have blocks of those before."""
        self._stepped = 0.0
        self._closed = threading.Event()
        self._idle = threading.Thread(target=self._poll_idle, name="kvtier-idle", daemon=True)
        self._idle.start()
        engine.end_with_parent()
        engine.install()
        logger.info("KV cache is kept, and found again: %s", self._stack.summary())

    def _open_copies(self, view: memoryview) -> HostCopies:
        """Between vLLM's chunks, as blocks of one group, and slots of the cpu tier."""
        pages = np.frombuffer(view, np.uint8).reshape(-1, self.block_size_bytes)
        chunks, size = pages.shape
        tensor = DeviceTensor(pages.ctypes.data, chunks, size, size)
        layout = DeviceLayout((tensor,), ((PageRef(0, size),),))
        host, namespace = self._stack.host, self._stack.namespace
        assert isinstance(host, RegionHandler), "the cpu tier comes first"
        return HostCopies(self._chain, host, namespace, layout, [pages])

    # -- lookups ---------------------------------------------------------------------------------

    @guarded(lambda: interfaces.LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        results = interfaces.LookupResult
        if self._stale or key in self._failed.get(req_context.req_id, ()):
            return results.MISS
        with self._lock:
            self._stepped = time.monotonic()
            (found,) = self._chain.lookup(salted([key], self._epoch))
        if found is Presence.PENDING:
            return results.RETRY
        return results.HIT if found is Presence.HIT else results.MISS

    @guarded(lambda: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        with self._lock:
            self._chain.touch(salted(list(keys), self._epoch))

    # -- jobs ------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, TransferKind.STORE)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, TransferKind.LOAD)

    def _submit(self, asked: Any, kind: TransferKind) -> None:
        with self._lock:
            if not self._begin(asked, kind):
                if kind is TransferKind.LOAD:  # else the request would ask for it for ever
                    self._failed.setdefault(asked.req_context.req_id, set()).update(asked.keys)
                self._finish(asked.job_id, ok=False)

    @guarded(lambda: False)
    def _begin(self, asked: Any, kind: TransferKind) -> bool:
        """Begin a job; it ends at once if there is nothing to be copied."""
        keys, request = list(asked.keys), asked.req_context.req_id
        known = salted(keys, self._epoch)
        places = dict(zip(known, asked.chunk_ids, strict=True))
        if self._stale and kind is TransferKind.STORE:
            places = {}
        deadline = time.monotonic() + self._load_seconds
        self._jobs[asked.job_id] = _Job(dict(zip(known, keys, strict=True)), request)
        copy = self._copies.begin(asked.job_id, kind, places, request, deadline)
        if copy.ended:
            self._end(copy)
        return True

    def get_finished_jobs(self) -> Iterable[Any]:
        with self._lock:
            self._collect()
            finished, self._finished = self._finished, []
        return finished

    def _collect(self) -> None:
        for result in self._copies.copier.jobs.poll():
            if not self._take(result):
                self._finish(result.id, ok=False)

    @guarded(lambda: False)
    def _take(self, result: CopyResult) -> bool:
        self._end(self._copies.end(result))
        return True

    def _end(self, copy: HostCopy) -> None:
        """Tell vLLM how a job has ended."""
        job = self._jobs[copy.number]
        if copy.ticket is None:
            self._finish(copy.number, ok=not copy.failed, result=copy.result)
            return
        came = copy.copied
        if lost := job.keys.keys() - came:
            logger.warning(
                "%d of %d blocks for request %s could not be loaded (%s): they are recomputed",
                len(lost),
                len(job.keys),
                job.request,
                copy.why,
            )
            self._failed.setdefault(job.request, set()).update(job.keys[key] for key in lost)
        came_by = [job.keys[key] for key in copy.reserved if key in came]
        self._finish(copy.number, ok=not lost, result=copy.result, came=came_by)

    def _finish(
        self,
        number: int,
        *,
        ok: bool,
        result: CopyResult | None = None,
        came: Collection[bytes] = (),
    ) -> None:
        self._jobs.pop(number, None)
        self._finished.append(
            tiering.JobResult(
                job_id=number,
                success=ok,
                successful_keys=came if came and not ok else None,
                transfer_time=result.seconds if result else None,
                transfer_bytes=result.bytes_moved if result else None,
            )
        )

    # -- requests and steps ----------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        return interfaces.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:
        with self._lock:
            self._stepped = time.monotonic()
            self._poll()

    @guarded(lambda: None)
    def _poll(self) -> None:
        self._copies.poll_chain()

    def _poll_idle(self) -> None:
        while not self._closed.wait(_IDLE_S):
            with self._lock:
                idle = time.monotonic() - self._stepped > _IDLE_S
                if idle and not self._closed.is_set():
                    self._poll()

    def has_pending_work(self) -> bool:
        """Whether vLLM has to ask for finished jobs. What the stack still writes needs no steps."""
        return bool(self._jobs or self._finished)

    @guarded(lambda: None)
    def weights_changed(self) -> None:
        """The workers were called to take other weights: nothing stored so far is served any more.
        Until vLLM resets its own caches, what it hands over may be of the weights before; later
        blocks are for this run only."""
        with self._lock:
            self._stale, self._epoch = True, os.urandom(16)
            self._chain.clear()

    # -- the end ---------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """vLLM resets its caches, and calls this for nothing else."""
        with self._lock:
            under_way = list(self._jobs)
        self._copies.copier.jobs.wait(under_way)
        with self._lock:
            self._collect()
            self._stale = False

    @guarded(lambda: None)
    def shutdown(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._idle.join()
        with self._lock:
            self._copies.copier.close()
            self._collect()
            self._stack.close()
            del self._copies  # it has a view of vLLM's memory, which vLLM is about to unmap


def _namespace(
    spec: Any, chunk_bytes: int, stack: stack_config.StackConfig, weights: str | None
) -> Namespace:
    """What makes vLLM's chunks interchangeable; raises ConfigError for an engine in which blocks
    would be wrong, or of which they do not tell enough."""
    vllm_config, kv_cache_config = config.under_construction()
    _refuse(vllm_config, kv_cache_config, stack)
    if warning := hash_warning(vllm_config, stack):
        logger.warning("%s", warning)
    tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
    facts = namespace_facts.facts_of(vllm_config, spec.blocks_per_chunk, weights, tokens)
    ranks = spec.config.parallel
    facts["door"] = (
        f"secondary tier, {ranks.world_size} of {spec.config.worker_kv_bytes_per_block}"
        f"{' canonical' if spec.config.canonical_layout else ''}"
    )
    return Namespace(facts=facts, group_bytes=(chunk_bytes,))


def _refuse(vllm_config: Any, kv_cache_config: Any, stack: stack_config.StackConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    unsupported_modes.refuse(vllm_config, kv_cache_config, [transfer], os.environ)
    instead = "serve with kvtier's connector, which knows of them"
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "--enable-lora",
            "vLLM names an adapter to its tiers by name alone, and other files may have that later",
            instead,
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or cache_groups.most_blocks(kv_cache_config) is not None:
        raise ConfigError(
            "--model",
            "this one keeps windows or states, of which vLLM may hand a tier incomplete chunks",
            instead,
        )
    check_first_tier(stack)
