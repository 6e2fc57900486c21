"""The connector that vLLM loads: its offloading connector, with kvtier's tiers behind it.

--kv-transfer-config '{"kv_connector": "KVTierConnector",
  "kv_connector_module_path": "kvtier.vllm", "kv_role": "kv_both",
  "kv_connector_extra_config": {"stack": "stack.yaml"}}'
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import vllm

from kvtier.config import StackConfig
from kvtier.guard import guarded
from kvtier.system.calls import WaitBound
from kvtier.types import Namespace
from kvtier.vllm import deferrals, metrics, unsupported_modes
from kvtier.vllm.events import DescribedEvents, place_of
from kvtier.vllm.hooks import cache_groups, config, engine, interfaces, scheduler, worker
from kvtier.vllm.hooks.block_pool import AllocatedBlocks
from kvtier.vllm.hooks.idle_requests import IdleRequests
from kvtier.vllm.hooks.versions import check_version, warn_if_untested
from kvtier.vllm.identity import namespace_facts
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.protocol import Report
from kvtier.vllm.settings import (
    SPEC,
    crosses_degrees,
    hash_warning,
    read_copies,
    read_flag,
    settle,
    unread,
    write_namespace,
)

logger = logging.getLogger(__name__)

_PAUSE_S = 0.001
"""An engine that spins while it waits for copies takes the GIL from the threads that copy."""
_SETTLE_S = 30.0
"""A pause, or an end, waits no longer for copies: as long as a copier does (`JobQueue`), and until
its threads have reported."""
_HANGS = "copies from or to the device have not ended within %g s: the engine goes on without them"


class _EngineCache:
    """Whether vLLM's own prefix cache may hold wrong blocks. What a new request computes from these
    must not be stored."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._filled = self._stale = False
        self.misread = False
        """Sessions may have left wrong blocks there, and may go on doing so."""

    def fill(self) -> None:
        """Blocks are computed, or loaded by some connector."""
        self._filled = self.enabled

    def weights_changed(self) -> None:
        """What it holds was computed with other weights."""
        if self._filled and not self._stale:
            logger.warning(
                "other weights were read, and vLLM's own prefix cache may have blocks of those "
                "before: nothing is stored until it is reset"
            )
        self._stale = self._filled

    def reset(self) -> None:
        """It was emptied."""
        self._filled = self._stale = False

    @property
    def trusted(self) -> bool:
        """Whether what a new request computes may be stored."""
        return not (self._stale or self.misread)


class KVTierConnector(interfaces.OffloadingConnector):  # type: ignore[misc]
    """Keeps KV cache in the tiers of a stack. Works alone and under MultiConnector."""

    connector_worker: Any
    connector_scheduler: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _share_log()
        if multiprocessing.parent_process() is not None:  # not in a program of the user's
            engine.end_without_garbage_collection()
        check_version(vllm.__version__)
        stack = settle(vllm_config, kv_cache_config)
        # Else another connector brings prompts from engine to engine.
        self._hands_over = len(config.transfer_configs(vllm_config)) == 1
        self._without_hits = unsupported_modes.computes_whole_prompts(vllm_config)
        self._mixes_adapters = unsupported_modes.mixes_adapters(vllm_config)
        self._misreads_sessions = unsupported_modes.misreads_sessions(vllm_config, kv_cache_config)
        self._block_tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
        self._pool: Any = None
        self._allocated: AllocatedBlocks | None = None
        self._events: DescribedEvents | None = None
        self.paused = False
        self._settling = WaitBound(_SETTLE_S, _HANGS)
        """The engine is; its scheduler says so."""
        self.ending = engine.Ending(stack.drain.seconds)
        self._spins = not engine.has_own_process()
        self._counted = True
        """Nothing has been asked for since its counters were told."""
        self._waits = False
        """It spins, and this step computes nothing."""
        self._computed = True
        """Since its weights changed last; if not, nothing is kept that others make wrong."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        by_tier = read_flag(extra, "kv_events_by_tier")
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._engine_cache = _EngineCache(enabled=vllm_config.cache_config.enable_prefix_caching)
        if role.name == "SCHEDULER":
            warn_if_untested(vllm.__version__)
            engine.end_with_parent()
            engine.install()
            self._introduce(vllm_config, kv_cache_config, stack)
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker = worker.FailureTolerantWorker(
                self.connector_worker.spec, vllm_config, kv_cache_config
            )
        if self.connector_scheduler is not None:
            self._begin_scheduling(vllm_config, by_tier)

    @staticmethod
    def _introduce(vllm_config: Any, kv_cache_config: Any, stack: StackConfig) -> None:
        """State which engine this is, before the scheduler's side is built."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        warning = hash_warning(vllm_config, stack)
        limits = unsupported_modes.warnings(vllm_config)
        for each in (*unread(extra), *([warning] if warning else ()), *limits):
            logger.warning("%s", each)
        payloads, blocks, parts = cache_groups.chunk_sizes(
            vllm_config, kv_cache_config, read_copies(extra)
        )
        tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
        across = crosses_degrees(extra)
        if stack.across_degrees and not across:
            logger.warning(
                "across_degrees: engines of other tensor-parallel sizes find nothing of this one, "
                "nor it of theirs: %s",
                cache_groups.bound_to_degree(vllm_config, kv_cache_config),
            )
        facts = namespace_facts.facts_of(
            vllm_config, blocks, extra.get("weights"), tokens, any_degree=across
        )
        namespace = Namespace(facts=facts, group_bytes=payloads, parts=None if across else parts)
        write_namespace(extra, namespace)

    def _begin_scheduling(self, vllm_config: Any, by_tier: bool) -> None:
        side = self.connector_scheduler
        cache_groups.correct_groups(side)
        if (unit := cache_groups.unfound_decode_unit(side)) is not None:
            logger.warning(
                "what is decoded is kept, but not found again: this model's windows or states "
                "are kept at the end of prompts alone. Let vLLM keep more of them, with "
                "--prefix-cache-retention-interval, a multiple of %d tokens",
                unit,
            )
        shapes = cache_groups.group_shapes(side)
        manager = self._manager
        manager.keep(shapes, partial(scheduler.incomplete_chunks, side))
        events = vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            places = [place_of(medium, by_tier=by_tier) for medium in manager.media]
            kinds = scheduler.event_kinds(side)
            self._events = DescribedEvents(manager.known_as, manager.holders, kinds, places)
            scheduler.track_events(side, self._events)

    # -- the workers' side -------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.connector_worker.get_transfer_results(finished_req_ids)

    @guarded(lambda: None)
    def get_handshake_metadata(self) -> None:
        """The last that vLLM asks its workers before it serves: the scheduler's side is there."""
        if self.connector_worker is not None:
            self.connector_worker.make_ready()

    # -- the scheduler's side: requests --------------------------------------------------------

    @cached_property
    def _idle_requests(self) -> IdleRequests:
        return IdleRequests(self.connector_scheduler)

    @cached_property
    def _manager(self) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.manager

    @cached_property
    def _chain(self) -> ChainManager:
        """The manager of the chain, of which no exception comes out."""
        manager: ChainManager = self._manager.chain_manager
        return manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._pool = gpu_block_pool
        self._allocated = AllocatedBlocks(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        name = request.request_id
        if request.lora_request is not None:
            self._manager.remember_adapter(name, request.lora_request)
        if request.resumable:
            self._begin_session()
        # The keys of some do not tell all, and what a session computes may be wrong.
        if request.resumable or (self._mixes_adapters and request.lora_request is None):
            self._manager.keep_nothing(name)
        super().on_new_request(request)
        if self._hands_over and deferrals.is_handed_over(request.kv_transfer_params):
            self._chain.expect(name)
        if not self._engine_cache.trusted:
            self._chain.keep_no_more(name)
        if request.kv_transfer_params or request.kv_hints is not None:
            self._heed_hints(request)
        if (self._manager.prefetches.on or self._manager.queries.on) and not self._without_hits:
            self._prefetch(request)

    def _begin_session(self) -> None:
        cache = self._engine_cache
        if self._misreads_sessions and cache.enabled and not cache.misread:
            cache.misread = True
            self._chain.keep_no_more()
            logger.warning(
                "a session, to whose input more is added, may be computed wrong by vLLM as this "
                "engine is configured, and others may find that in vLLM's own prefix cache: "
                "nothing is kept from now on"
            )

    @guarded(lambda: None)
    def _heed_hints(self, request: Any) -> None:
        """A router may know how the request's blocks will be used."""
        self._manager.hints.said(request.request_id, *scheduler.hints_of(request))

    @guarded(lambda: None)
    def _prefetch(self, request: Any) -> None:
        """Find and bring up what the request will ask for while it waits for its turn."""
        waits = scheduler.waiting_request(
            self.connector_scheduler, request, self._pool, by_priority=self._by_priority
        )
        if waits is not None:
            self._chain.find(request.request_id, waits.ends)
            if self._manager.prefetches.on:
                self._manager.ahead.came(request.request_id, waits)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name, side = request.request_id, self.connector_scheduler
        self._idle_requests.forget(name)
        found: tuple[int | None, bool]
        if self._manager.awaits_adapter(name):
            self._chain.defer(name)
            return None, False
        if self._without_hits:
            found = side.get_num_new_matched_tokens(request, num_computed_tokens, 0)
            return found
        state = scheduler.request_state(side, request)
        limit = scheduler.load_limit(state, request, num_computed_tokens)
        self._chain.begin_lookup(name, num_computed_tokens, limit, self._may_lack_blocks(request))
        ends, loading = scheduler.key_positions(state.req_context), scheduler.loading_keys(side)
        if self._chain.still_deferred(name, ends, loading):
            self._chain.defer(name)
            return None, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None:
            self._chain.defer(name, loading)
        else:
            self._chain.mark_used(name, ends)
        if junction := self._chain.junction(name):
            scheduler.keep_state_at(request, junction)
        return found

    def _may_lack_blocks(self, request: Any) -> bool:
        # As many again, because loads under way have some reserved.
        needed = sum(-(-request.num_tokens // tokens) for tokens in self._block_tokens)
        return self._pool is None or self._pool.get_num_free_blocks() < 2 * needed

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._engine_cache.fill()
        stop = 0 if num_external_tokens else request.num_tokens
        self._chain.scheduled(request.request_id, request.num_computed_tokens, stop)
        if num_external_tokens or self._hands_over:  # else another connector may load it
            prompt = partial(scheduler.prompt_of, request)
            self._chain.explain(request.request_id, num_external_tokens, prompt)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        name = request.request_id
        self._idle_requests.forget(name)
        if request.status.name == "FINISHED_ERROR":  # amid its prompt, perhaps
            self._chain.keep_no_more(name)
        if self._manager.hints.any_of(name):
            self._end_with_hints(request)
        found = self._hands_over and self._chain.hands_over(name)
        held, answer = super().request_finished(request, block_ids)
        if found and answer is None:
            answer = deferrals.handover_answer(request.kv_transfer_params)
        return held, answer

    @guarded(lambda: None)
    def _end_with_hints(self, request: Any) -> None:
        ends = scheduler.all_key_positions(self.connector_scheduler, request)
        self._manager.hints.ended(request.request_id, ends, request.num_prompt_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids)

    # -- the scheduler's side: steps -----------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._idle_requests.all_rest(scheduler_output, self._allocated):
            meta = interfaces.OffloadingConnectorMetadata({}, {}, set())
            self._manager.on_schedule_end()
        else:
            meta = self._find_transfers(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        meta.decoding = tokens if tokens == len(scheduler_output.num_scheduled_tokens) else 0
        computes = tokens > 0
        self._computed |= computes
        self._waits = self._spins and not computes
        meta.given_up = self._manager.step_began(scheduler_output)
        return meta

    def _find_transfers(self, scheduler_output: Any) -> Any:
        """Let vLLM's side find out what there is to be stored and loaded."""
        side = self.connector_scheduler
        if self._allocated is not None:
            self._allocated.tell(side, scheduler_output)
        step = self._idle_requests.leave_out(scheduler_output)
        meta = super().build_connector_meta(scheduler.corrected_step(side, step))
        self._idle_requests.looked_at(step)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None and not connector_output.invalid_block_ids:
            return  # no worker has anything to say
        if mistakes := getattr(meta, "mistakes", 0):
            self._manager.meter.mistook(mistakes)
        reports: Mapping[int, Report] = getattr(meta, "reports", {})
        side = self.connector_scheduler
        with scheduler.manager_locked(side):
            foreign = connector_output.invalid_block_ids  # of another connector, beside this one
            if foreign:
                self._chain.distrust_stores()
            for number, report in reports.items():
                request = self._manager.report(number, report)
                if request is not None:
                    scheduler.store_again(side, request)
                    self._idle_requests.wake(request)
        super().update_connector_output(connector_output)

    def get_kv_connector_stats(self) -> Any:
        # Asked at the end of every step, in their order; and that alone is.
        if self.connector_scheduler is not None:
            self._manager.load.ended()
            if self._waits and self._manager.copying():
                time.sleep(_PAUSE_S)
        return super().get_kv_connector_stats()

    def take_events(self) -> Any:
        return super().take_events() if self._manager.has_events else ()

    # -- the scheduler's side: pauses, resets, other weights, the end --------------------------

    def has_pending_push_work(self) -> bool:
        # An engine that pauses, goes to sleep or ends waits until there is none. Its device is at
        # rest when nothing is copied; what waits for a disk or a bucket is written later.
        settling = self.paused or self.ending.drained
        copies = self._settling.holds(settling and self._copies())
        return copies if settling else bool(super().has_pending_push_work())

    def _copies(self) -> bool:
        return scheduler.has_jobs(self.connector_scheduler) or bool(self._manager.copying())

    @guarded(lambda: False)
    def needs_step(self, asked: bool) -> bool:
        """Whether an engine that its caller steps has to be stepped though nothing is asked of it
        any more: what was computed last is being stored, or is to be counted."""
        if asked or not self._spins:
            self._counted = not asked
            return False
        if self._copies():
            return True
        if self._counted:
            return False
        self._counted = True
        self._manager.meter.tell_now()
        return True

    def reset_cache(self) -> Any:
        self._idle_requests.wake_all()
        with scheduler.resettable(self.connector_scheduler):
            done = super().reset_cache()
        worker.finish_stores()
        return done

    def weights_changed(self) -> None:
        """The workers were called to take other weights, or a part of them."""
        if self._computed:
            with scheduler.manager_locked(self.connector_scheduler):
                self._manager.reset_cache()
        self._engine_cache.weights_changed()
        self._computed = False

    def engine_cache_reset(self) -> None:
        """vLLM's own prefix cache was emptied."""
        self._engine_cache.reset()
        if self._events is not None:
            self._events.announce_again()

    # -- the frontend --------------------------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, *arguments: Any) -> Any:
        engine.end_without_garbage_collection()
        # In this process __init__ has never run: say whose metrics these are.
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(SPEC)
        types = metrics.latest_gauges(metric_types)
        return super().build_prom_metrics(vllm_config, types, *arguments)


config.register(KVTierConnector)


def _share_log() -> None:
    """Log where vLLM does, with its times and levels. Python knows vLLM's own logger only: it would
    print kvtier's warnings bare, and nothing below them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.hasHandlers():
        return  # somebody has said where to
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
