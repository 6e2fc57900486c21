"""The connector that vLLM loads: its offloading connector, with kvtier's tiers behind it.

--kv-transfer-config '{"kv_connector": "KVTierConnector",
  "kv_connector_module_path": "kvtier.vllm", "kv_role": "kv_both",
  "kv_connector_extra_config": {"stack": "stack.yaml"}}'
"""

from __future__ import annotations

import logging
import time
from functools import cached_property, partial
from typing import Any

import vllm

from kvtier.config import StackConfig
from kvtier.settings import Persistence
from kvtier.system.calls import WaitBound
from kvtier.types import Namespace
from kvtier.vllm import deferrals, metrics, unsupported_modes
from kvtier.vllm.engine_settings import SPEC, settle
from kvtier.vllm.events import DescribedEvents
from kvtier.vllm.guard import guarded
from kvtier.vllm.hooks import (
    cache_groups,
    construction,
    engine_calls,
    engine_endings,
    event_tracker,
    failure_tolerant_worker,
    interfaces,
    orphaned_engine,
    request_hints,
    request_states,
    scheduler_steps,
    waiting_queue,
)
from kvtier.vllm.hooks.block_allocation import AllocatedBlocks
from kvtier.vllm.hooks.idle_requests import IdleRequests
from kvtier.vllm.hooks.versions import check_version, warn_if_untested
from kvtier.vllm.identity import namespace_facts
from kvtier.vllm.protocol import Report
from kvtier.vllm.settings import unread

logger = logging.getLogger(__name__)

_PAUSE_S = 0.001
"""An engine that spins while it waits for copies takes the GIL from the threads that copy."""
_SETTLE_S = 30.0
"""A pause, or an end, waits no longer for copies: as long as a copier does (`JobQueue`), and until
its threads have reported."""
_HANGS = "copies from or to the device have not ended within %g s: the engine goes on without them"


class KVTierConnector(interfaces.OffloadingConnector):  # type: ignore[misc]
    """Keeps KV cache in the tiers of a stack. Works alone and under MultiConnector."""

    connector_worker: Any
    connector_scheduler: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _share_log()
        check_version(vllm.__version__)
        stack = settle(vllm_config, kv_cache_config)
        # Else another connector brings prompts from engine to engine.
        self._hands_over = len(construction.transfer_configs(vllm_config)) == 1
        self._without_hits = unsupported_modes.uses_nothing(vllm_config)
        self._looks_ahead = unsupported_modes.looks_ahead(kv_cache_config)
        self._numbers_media = unsupported_modes.numbers_media(vllm_config)
        self._blurs_adapters = unsupported_modes.blurs_adapters(vllm_config)
        self._misreads_sessions = unsupported_modes.misreads_sessions(vllm_config, kv_cache_config)
        self._block_tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
        self._pool: Any = None
        self._given: AllocatedBlocks | None = None
        self.paused = False
        self._settling = WaitBound(_SETTLE_S, _HANGS)
        """The engine is; its scheduler says so."""
        self.ending = engine_endings.Ending(stack.drain.seconds)
        self._spins = not orphaned_engine.has_own_process()
        self._counted = True
        """Nothing has been asked for since its counters were told."""
        self._waits = False
        """It spins, and this step computes nothing."""
        self._computed = True
        """Since its weights changed last; if not, nothing is kept that others make wrong."""
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._has_cache = vllm_config.cache_config.enable_prefix_caching
        self._cache_filled = self._cache_stale = False
        """Whether vLLM's own prefix cache may hold blocks, and whether some of these may be wrong:
        nothing is stored then of requests that come, until it is reset."""
        self._spoilt = False
        """Sessions may have left wrong ones there, and may go on doing so."""
        if role.name == "SCHEDULER":
            warn_if_untested(vllm.__version__)
            orphaned_engine.end_with_parent()
            engine_calls.listen()
            engine_endings.listen()
            self._introduce(vllm_config, kv_cache_config, stack)
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker = failure_tolerant_worker.FailureTolerantWorker(
                self.connector_worker.spec, vllm_config, kv_cache_config
            )
        if self.connector_scheduler is not None:
            cache_groups.correct_groups(self)
            if (unit := cache_groups.loses_decoded(self)) is not None:
                logger.warning(
                    "what is decoded is kept, but not found again: this model's windows or states "
                    "are kept at the end of prompts alone. Let vLLM keep more of them, with "
                    "--prefix-cache-retention-interval, a multiple of %d tokens",
                    unit,
                )
            shapes = cache_groups.group_shapes(self)
            self._manager.keep(shapes, partial(request_states.with_holes, self))
            if event_tracker.describes_events(vllm_config):
                events = DescribedEvents(self._manager.known_as, event_tracker.event_kinds(self))
                event_tracker.track_events(self, events)

    @staticmethod
    def _introduce(vllm_config: Any, kv_cache_config: Any, stack: StackConfig) -> None:
        """Say who this engine is, before the scheduler's side is built."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        for setting in unread(extra):
            logger.warning("%s", setting)
        persistent = any(
            getattr(tier, "persistence", Persistence.KEEP) is Persistence.KEEP
            for tier in stack.tiers
        )
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        if warning := namespace_facts.check_hash(algorithm, persistent=persistent):
            logger.warning("%s", warning)
        for limit in unsupported_modes.to_be_told(vllm_config, kv_cache_config):
            logger.warning("%s", limit)
        payloads, blocks, parts = cache_groups.chunk_sizes(vllm_config, kv_cache_config)
        tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
        facts = namespace_facts.facts_of(vllm_config, blocks, extra.get("weights"), tokens)
        namespace = Namespace(facts=facts, group_bytes=payloads, parts=parts)
        extra["kvtier_namespace"] = namespace.to_json().decode()

    # -- the workers' side -------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.connector_worker.get_transfer_results(finished_req_ids)

    @guarded(lambda: None)
    def get_handshake_metadata(self) -> None:
        """The last that vLLM asks its workers before it serves: the scheduler's side is there."""
        if self.connector_worker is not None:
            self.connector_worker.make_ready()

    # -- the scheduler's side ------------------------------------------------------------------

    @cached_property
    def _idle_requests(self) -> IdleRequests:
        return IdleRequests(self.connector_scheduler)

    @cached_property
    def _manager(self) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._pool = gpu_block_pool
        self._given = AllocatedBlocks(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._manager.remember_adapter(request.request_id, request.lora_request)
        if self._keeps_nothing_of(request):
            self._manager.keep_nothing(request.request_id)
        super().on_new_request(request)
        request_states.heed_whole_chunks(self, request)
        if self._hands_over and deferrals.is_handed_over(request.kv_transfer_params):
            self._manager.expect(request.request_id)
        if self._cache_stale or self._spoilt:
            self._manager.keep_no_more(request.request_id)
        self._heed_hints(request)
        if self._manager.ahead.on and not self._without_hits:
            self._prefetch(request)

    @guarded(lambda: None)
    def _heed_hints(self, request: Any) -> None:
        """Others may know how its blocks will be used."""
        self._manager.hints.said(request.request_id, *request_hints.said_of(request))

    @guarded(lambda: None)
    def _prefetch(self, request: Any) -> None:
        """It waits: what it will ask for is to be here by then."""
        waits = waiting_queue.as_it_waits(self, request, self._pool, by_priority=self._by_priority)
        if waits is not None:
            self._manager.ahead.came(request.request_id, waits)

    def _keeps_nothing_of(self, request: Any) -> bool:
        """Whether the keys of a request do not tell all, or what it computes may be wrong."""
        if request.resumable and self._misreads_sessions and self._has_cache and not self._spoilt:
            self._spoilt = True
            self._manager.keep_no_more()
            logger.warning(
                "a session, to whose input more is added, may be computed wrong by vLLM as this "
                "engine is configured, and others may find that in vLLM's own prefix cache: "
                "nothing is kept from now on"
            )
        return bool(
            self._looks_ahead
            or request.resumable
            or (self._numbers_media and request.mm_features)
            or (self._blurs_adapters and request.lora_request is None)
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._idle_requests.forget(request.request_id)
        if self._manager.awaits_adapter(request.request_id):
            self._manager.put_off(request.request_id)
            return None, False
        if self._without_hits:
            return request_states.without_hits(self, request, num_computed_tokens)
        limit = request_states.load_limit(self, request, num_computed_tokens)
        scarce = self._may_lack_blocks(request)
        self._manager.asks(request.request_id, num_computed_tokens, limit, scarce)
        ends, loading = request_states.prompt_ends(self, request), request_states.being_loaded(self)
        if self._manager.still_waits(request.request_id, ends, loading):
            self._manager.put_off(request.request_id)
            return None, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if found[0] is None:
            self._manager.put_off(request.request_id, loading)
        else:
            self._manager.uses(request.request_id, ends)
        request_states.part_at(request, self._manager.junction(request.request_id))
        return found

    def _may_lack_blocks(self, request: Any) -> bool:
        # As many again, because loads under way have some reserved.
        needed = sum(-(-request.num_tokens // tokens) for tokens in self._block_tokens)
        return self._pool is None or self._pool.get_num_free_blocks() < 2 * needed

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # With what is computed, or loaded, be it by another connector.
        self._cache_filled = self._has_cache
        stop = 0 if num_external_tokens else request.num_tokens
        self._manager.scheduled(request.request_id, request.num_computed_tokens, stop)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._idle_requests.forget(request.request_id)
        if request.status.name == "FINISHED_ERROR":  # amid its prompt, perhaps
            self._manager.keep_no_more(request.request_id)
        if self._manager.hints.any_of(request.request_id):
            self._end_with_hints(request)
        found = self._hands_over and self._manager.hands_over(request.request_id)
        held, answer = super().request_finished(request, block_ids)
        if found and answer is None:
            answer = deferrals.handover_answer(request.kv_transfer_params)
        return held, answer

    @guarded(lambda: None)
    def _end_with_hints(self, request: Any) -> None:
        request_hints.make_keys(self, request)
        ends = request_states.prompt_ends(self, request)
        self._manager.hints.ended(request.request_id, ends, request.num_prompt_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._idle_requests.all_rest(scheduler_output, self._given):
            meta = scheduler_steps.nothing_to_transfer()
            self._manager.on_schedule_end()
        else:
            meta = self._look_at(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        meta.decoding = tokens if tokens == len(scheduler_output.num_scheduled_tokens) else 0
        computes = tokens > 0
        self._computed |= computes
        self._waits = self._spins and not computes
        meta.given_up = self._manager.step_began(scheduler_output)
        return meta

    def _look_at(self, scheduler_output: Any) -> Any:
        """Have vLLM's side find out what there is to be stored and loaded."""
        if self._given is not None:
            self._given.tell(self.connector_scheduler, scheduler_output)
        step = self._idle_requests.leave_out(scheduler_output)
        meta = super().build_connector_meta(scheduler_steps.read_as_0_33(self, step))
        self._idle_requests.looked_at(step)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None and not connector_output.invalid_block_ids:
            return  # no worker has anything to say
        self._manager.mistook(getattr(meta, "mistakes", 0))
        reports: dict[int, Report] = getattr(meta, "reports", {})
        with scheduler_steps.manager_locked(self):
            foreign = connector_output.invalid_block_ids  # of another connector, beside this one
            if foreign:
                self._manager.distrust_stores()
            for number, report in reports.items():
                request = self._manager.report(number, report)
                if request is not None:
                    request_states.store_again(self, request)
                    self._idle_requests.wake(request)
        super().update_connector_output(connector_output)

    def get_kv_connector_stats(self) -> Any:
        # Asked at the end of every step, in their order; and that alone is.
        if self.connector_scheduler is not None:
            self._manager.step_ended()
            if self._waits and self._manager.copying():
                time.sleep(_PAUSE_S)
        return super().get_kv_connector_stats()

    def take_events(self) -> Any:
        return super().take_events() if self._manager.has_events else ()

    def has_pending_push_work(self) -> bool:
        # An engine that pauses, goes to sleep or ends waits until there is none. Its device is at
        # rest when nothing is copied; what waits for a disk or a bucket is written later.
        settling = self.paused or self.ending.drained
        copies = self._settling.holds(settling and self._copies())
        return copies if settling else bool(super().has_pending_push_work())

    def _copies(self) -> bool:
        return request_states.has_jobs(self) or bool(self._manager.copying())

    @guarded(lambda: False)
    def lingers(self, asked: bool) -> bool:
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
        self._manager.tell_now()
        return True

    def reset_cache(self) -> Any:
        self._idle_requests.wake_all()
        with scheduler_steps.resettable(self):
            done = super().reset_cache()
        failure_tolerant_worker.finish_stores()
        return done

    def weights_changed(self) -> None:
        """The workers were called to take other weights, or a part of them."""
        if self._computed:
            with scheduler_steps.manager_locked(self):
                self._manager.reset_cache()
        if self._cache_filled and not self._cache_stale:
            logger.warning(
                "other weights were read, and vLLM's own prefix cache may have blocks of those "
                "before: nothing is stored until it is reset"
            )
        self._computed, self._cache_stale = False, self._cache_filled

    def engine_forgot(self) -> None:
        """vLLM's own prefix cache was emptied."""
        self._cache_filled = self._cache_stale = False

    @guarded(lambda: None)
    def reads_adapter(self, adapter: Any) -> None:
        """The workers are about to read an adapter."""
        self._manager.adapters.read(adapter)

    @guarded(lambda: None)
    def lets_go_of_adapter(self, number: int) -> None:
        """The workers are about to let go of one."""
        self._manager.adapters.removed(number)

    # -- the frontend --------------------------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, *arguments: Any) -> Any:
        # In this process __init__ has never run: say whose metrics these are.
        engine_endings.end_quietly()
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(SPEC)
        types = metrics.latest_gauges(metric_types)
        return super().build_prom_metrics(vllm_config, types, *arguments)


construction.register(KVTierConnector)


def _share_log() -> None:
    """Say things where vLLM does, with its times and levels. Python knows vLLM's own logger only:
    of ours it would print warnings bare, and nothing below them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.hasHandlers():
        return  # somebody has said where to
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
