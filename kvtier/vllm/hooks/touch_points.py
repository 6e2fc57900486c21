"""All that kvtier touches of vLLM without a promise, an entry a class or module of vLLM's.

`kvtier doctor --vllm`, the start of an engine and `make vllm-drill` compare the table with the
sources of a vLLM (versions.py). A test compares it with the files of this folder.
"""

from __future__ import annotations

import sys

import msgspec

Version = tuple[int, int]
"""The first two numbers of a version."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOADING = f"{_CONNECTOR}.v1.offloading"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"


class TouchPoint(msgspec.Struct, frozen=True):
    """A class or a module of vLLM's, and what kvtier relies on in it."""

    target: str
    """`module:Class`, or a module."""
    members: str
    """Names that must be there, with spaces between. With parentheses: a function whose parameters
    begin with these."""
    used_by: str
    """The file of this folder that touches it."""
    why: str
    """What it is for, or what would go wrong without it."""
    since: Version = (0, 0)
    """Only from this version on; in all of them, if none is said."""
    until: Version = (sys.maxsize, 0)
    """Only up to this version: later ones need it no more."""
    derived: bool = False
    """A class of kvtier derives from it: it must ask for no method that is not in `members`."""
    upstream: str = ""
    """The issue, if there is one."""

    @property
    def names(self) -> set[str]:
        """The members, without parameters."""
        return {each.partition("(")[0] for each in self.members.split()}


_BASE_CLASSES = (
    TouchPoint(
        f"{_CONNECTOR}.v1.offloading_connector:OffloadingConnector",
        "__init__(vllm_config,role,kv_cache_config) connector_scheduler connector_worker "
        "bind_gpu_block_pool(gpu_block_pool) on_new_request(request) "
        "get_num_new_matched_tokens(request,num_computed_tokens) "
        "update_state_after_alloc(request,blocks,num_external_tokens) "
        "build_connector_meta(scheduler_output) update_connector_output(connector_output) "
        "request_finished(request,block_ids) request_finished_all_groups(request,block_ids) "
        "has_pending_push_work() reset_cache() get_kv_connector_stats() "
        "get_finished(finished_req_ids) get_transfer_results(finished_req_ids) "
        "build_prom_metrics(vllm_config,metric_types)",
        used_by="interfaces.py",
        why="KVTierConnector derives from it, and so has all that it does for windows and states",
        derived=True,
    ),
    TouchPoint(
        "vllm.v1.kv_offload.base:OffloadingManager",
        "lookup(key,req_context) get_load_source(key,req_context) "
        "prepare_load(keys,req_context) complete_load(keys,req_context) "
        "prepare_store(keys,req_context) complete_store(keys,req_context,success) "
        "on_new_request(req_context) on_request_finished(req_context) on_schedule_end(context) "
        "has_pending_work() reset_cache() take_events() get_stats() shutdown()",
        used_by="interfaces.py",
        why="VllmManager derives from it, and answers from the tiers",
        derived=True,
    ),
    TouchPoint(
        "vllm.v1.kv_offload.base:OffloadingSpec",
        "get_manager() get_worker(kv_caches) build_metric_definitions(extra_config) "
        "config extra_config blocks_per_chunk",
        used_by="interfaces.py",
        why="KVTierSpec derives from it, and opens the stack",
        derived=True,
    ),
    TouchPoint(
        "vllm.v1.kv_offload.tiering.base:SecondaryTierManager",
        "__init__(offloading_spec,primary_kv_view,tier_type,backpressure_detector) "
        "block_size_bytes lookup(key,req_context) touch(keys,req_context) "
        "submit_store(job_metadata) submit_load(job_metadata) get_finished_jobs() "
        "has_pending_work() on_new_request(req_context) on_request_finished(req_context) "
        "on_schedule_end(context) drain_jobs() shutdown()",
        used_by="tiering.py",
        why="KVTierSecondary derives from it, and keeps what vLLM's own CPU tier holds",
        derived=True,
    ),
    TouchPoint(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker",
        "__init__(spec,vllm_config,kv_cache_config) register_kv_caches(kv_caches) "
        "handle_preemptions(kv_connector_metadata) start_kv_transfers(metadata) "
        "prepare_store_kv(metadata) get_finished(finished_req_ids) "
        "build_connector_worker_meta() shutdown() "
        "worker vllm_config _load_jobs _unsubmitted_store_jobs",
        used_by="worker.py",
        why="it asserts that no transfer ever fails: a load that fails would end the engine",
        derived=True,
        upstream=f"{_ISSUES}39732",
    ),
    TouchPoint(
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata",
        "completed_jobs transfer_stats mark_completed(job_id) aggregate(other)",
        used_by="worker.py",
        why="carries the outcome of each worker_job to the scheduler: else blocks would count as "
        "stored that are not, and give wrong answers",
        derived=True,
    ),
)

_TYPES = (
    TouchPoint(
        "vllm.v1.kv_offload.base",
        "LoadStoreSpec LookupResult OffloadingCounterMetadata OffloadingGaugeMetadata "
        "OffloadingHistogramMetadata PrepareStoreOutput RequestOffloadingContext",
        used_by="interfaces.py",
        why="what the manager is asked and answers, and how metrics are declared",
    ),
    TouchPoint(
        "vllm.v1.kv_offload.tiering.base",
        "JobResult Medium",
        used_by="tiering.py",
        why="how a secondary tier's jobs end, and where it keeps blocks",
    ),
    TouchPoint(
        f"{_OFFLOADING}.common:OffloadingConnectorMetadata",
        "load_jobs store_jobs jobs_to_flush",
        used_by="worker.py",
        why="what workers are told with a step, and which load is not awaited any longer",
    ),
    TouchPoint(
        f"{_CONNECTOR}.v1.base:KVConnectorTransferResults",
        "finished_sending finished_recving failed_recving",
        used_by="worker.py",
        why="names the requests whose loads failed: else what was not loaded would count as loaded",
    ),
    TouchPoint(
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats",
        "increase_counter(counter_name,counter_increase_value,labelvalues) "
        "set_gauge(gauge_name,gauge_value,labelvalues) "
        "observe_histogram(histogram_name,histogram_value,labelvalues) is_empty()",
        used_by="interfaces.py",
        why="kvtier's counters travel in it to vLLM's /metrics",
    ),
    TouchPoint(
        "vllm.v1.metrics.cache_hit_source:CacheHitSource",
        "HOST DISK EXTERNAL_UNSPECIFIED",
        used_by="interfaces.py",
        why="vLLM counts cached tokens by the tier that they came from",
    ),
    TouchPoint(
        "vllm.distributed.kv_events",
        "BlockStored BlockRemoved",
        used_by="interfaces.py",
        why="the tiers' events in vLLM's words",
    ),
    TouchPoint(
        "vllm.v1.core.kv_cache_utils",
        "resolve_dcp_kv_block_size(spec,dcp_world_size) "
        "generate_block_hash_extra_keys(request,start_token_idx,end_token_idx,start_mm_idx) "
        "to_event_extra_keys(extra_keys) maybe_convert_block_hash(hash_bytes) "
        "resolve_block_hashes(block_hashes,hash_block_size,block_size)",
        used_by="interfaces.py",
        why="events name what is in a block as vLLM's own events do, so that routers can match "
        "them; and ranks that share a context hold a part of each block",
    ),
)

_CONFIGURATION = (
    TouchPoint(
        f"{_CONNECTOR}.factory:KVConnectorFactory",
        "create_connector(config,role,kv_cache_config) "
        "register_connector(name,module_path,class_name) _registry",
        used_by="config.py",
        why="a connector below a MultiConnector is given a copy of the configuration, while vLLM "
        "reads the policy for failed loads in the original; and its counters are read by its name",
    ),
    TouchPoint(
        "vllm.config:VllmConfig",
        "_resolve_mm_embedding_inputs() use_v2_model_runner()",
        used_by="config.py",
        why="with any connector that loads, vLLM lets clients send embeddings in place of images: "
        "a request that leaves them out would end the engine",
    ),
    TouchPoint(
        f"{_OFFLOADING}.config",
        "build_offloading_config(vllm_config,kv_cache_config)",
        used_by="cache_groups.py",
        why="how large chunks are, and which ranks write them, before workers have their tensors",
    ),
    TouchPoint(
        "vllm.config:ModelConfig",
        "get_total_num_kv_heads()",
        used_by="cache_groups.py",
        why="ranks of another number can load blocks only where heads are divided among them",
    ),
    TouchPoint(
        "vllm.v1.kv_cache_interface:AttentionSpec",
        "num_kv_heads kv_quant_mode num_head_slots state_content_bytes tokens_per_state",
        used_by="cache_groups.py",
        why="likewise: and where each head's bytes lie in a page",
    ),
    TouchPoint(
        "vllm.distributed.utils",
        "get_pp_indices(num_hidden_layers,pp_rank,pp_size)",
        used_by="cache_groups.py",
        why="of a pipeline the scheduler is told of the first rank's layers alone",
    ),
    TouchPoint(
        f"{_OFFLOADING}.scheduler:GroupOffloadConfig",
        "group_idx kv_cache_spec tokens_per_block tokens_per_chunk hashes_per_chunk "
        "sliding_window_size_in_chunks is_eagle_group kv_event_group_spec",
        used_by="cache_groups.py",
        why="vLLM asks of windows for a chunk more than it keeps, and with drafts for one less: "
        "such prompts would not be found",
    ),
    TouchPoint(
        f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig",
        "kv_group_configs blocks_per_chunk offload_prompt_only supports_partial_tail "
        "retention_interval",
        used_by="cache_groups.py",
        why="of hybrid models vLLM would store what is behind the last whole chunk, and end with a "
        "request whose max_offload_tokens end before it",
    ),
)

_SCHEDULER = (
    TouchPoint(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        "config manager _req_status _jobs _chunks_being_loaded _block_id_to_pending_jobs "
        "_current_batch_load_jobs _current_batch_jobs_to_flush _current_batch_allocated_block_ids "
        "_events_tracker "
        "get_num_new_matched_tokens(request,num_computed_tokens,max_num_new_tokens)",
        used_by="scheduler.py",
        why="which keys a request has, what is under way for it and which blocks a step writes to; "
        "and vLLM's tracker of events forgets nothing, and knows no adapters nor resets",
    ),
    TouchPoint(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        "_manager_locked()",
        used_by="scheduler.py",
        why="0.33 may call the manager from two threads, under this lock",
        since=(0, 33),
    ),
    TouchPoint(
        f"{_OFFLOADING}.scheduler:RequestOffloadState",
        "req req_context config group_states max_load_tokens max_offload_tokens "
        "update_offload_keys() update_block_id_groups(new_block_id_groups)",
        used_by="scheduler.py",
        why="a request's keys and limits, also while it waits: else nothing would be prefetched",
    ),
    TouchPoint(
        f"{_OFFLOADING}.scheduler:RequestGroupState",
        "block_ids next_stored_chunk_idx offload_keys",
        used_by="scheduler.py",
        why="incomplete chunks are left out, and recomputed ones stored: else windows would be "
        "stored with blocks of others, and give wrong answers",
    ),
    TouchPoint(
        "vllm.v1.kv_offload.base:ReqContext",
        "req_id _offload_key_positions",
        used_by="scheduler.py",
        why="the token at which each key of a request ends, by which a hit is decided as a whole",
    ),
    TouchPoint(
        "vllm.v1.request:Request",
        "request_id lora_request resumable mm_features kv_transfer_params kv_hints num_tokens() "
        "num_prompt_tokens num_computed_tokens block_hashes all_token_ids status priority "
        "arrival_time skip_reading_prefix_cache shared_prefix_boundary prompt_token_ids cache_salt",
        used_by="scheduler.py",
        why="what a request is and when its turn comes; and vLLM keeps states and windows where a "
        "prompt diverges from others, which only kvtier knows of those in a tier",
        upstream=f"{_ISSUES}53421",
    ),
    TouchPoint(
        "vllm.v1.kv_hints.protocol:KvHintsEnvelope",
        "actions",
        used_by="scheduler.py",
        why="routers say in hints which blocks will be used again, and which never",
    ),
    TouchPoint(
        "vllm.v1.kv_hints.protocol:KvHintAction",
        "action_type action_version payload",
        used_by="scheduler.py",
        why="routers say in hints which blocks will be used again, and which never",
    ),
    TouchPoint(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "finished_req_ids preempted_req_ids kv_cache_block_copies",
        used_by="idle_requests.py",
        why="vLLM's side is told only of requests that may have something to store: else a step of "
        "hundreds takes a millisecond or two longer",
    ),
    TouchPoint(
        "vllm.v1.core.sched.output:CachedRequestData",
        "req_ids new_block_ids num_computed_tokens resumed_req_ids",
        used_by="idle_requests.py",
        why="the part of a step's output that is told of running requests",
    ),
    TouchPoint(
        "vllm.v1.core.block_pool:BlockPool",
        "get_new_blocks(num_blocks) "
        "cache_full_blocks(request,blocks,num_cached_blocks,num_full_blocks) "
        "cache_partial_block(request,block) get_cached_block(block_hash,kv_cache_group_ids) "
        "evict_blocks(block_ids) get_num_free_blocks()",
        used_by="block_pool.py",
        why="which blocks a step gives out, and what vLLM's own cache has; a request that is "
        "preempted in its step leaves blocks there that it has not computed: wrong answers",
    ),
)

_ENGINE = (
    TouchPoint(
        "vllm.v1.engine.core:EngineCore",
        "scheduler collective_rpc(method) reset_prefix_cache() _reset_caches() "
        "add_lora(lora_request) remove_lora(lora_id)",
        used_by="engine.py",
        why="vLLM tells no connector that weights are read, adapters come and go, or its own cache "
        "is reset: blocks of other weights, or of another adapter, would be served",
        upstream=f"{_ISSUES}9744, {_ISSUES}42125",
    ),
    TouchPoint(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "connector set_pause_state(pause_state) get_num_unfinished_requests() "
        "finish_requests(request_ids,finished_status)",
        used_by="engine.py",
        why="a pause, or sleep, would wait for disks and buckets; and an engine that is told to "
        "end aborts requests that would run until it is killed",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCoreProc",
        "scheduler vllm_config is_running() _handle_shutdown() _send_abort_outputs(aborted_reqs)",
        used_by="engine.py",
        why="an engine that is told to end would write down all that waits for a slow disk, and be "
        "killed amid that",
    ),
    TouchPoint(
        "vllm.v1.request:RequestStatus",
        "FINISHED_ABORTED",
        used_by="engine.py",
        why="requests that would be served until the kill are aborted before it",
    ),
    TouchPoint(
        "vllm.v1.engine.llm_engine:LLMEngine",
        "engine_core has_unfinished_requests()",
        used_by="engine.py",
        why="an engine without a process of its own is stepped by its caller alone: what its last "
        "requests store would stay on the device",
    ),
    TouchPoint(
        f"{_CONNECTOR}.v1.multi_connector:MultiConnector",
        "sub_connectors()",
        used_by="engine.py",
        why="kvtier's connector may be one of several",
    ),
    TouchPoint(
        "vllm.v1.kv_offload.tiering.manager:TieringOffloadingManager",
        "secondary_tiers",
        used_by="engine.py",
        why="kvtier's tier below vLLM's own CPU tier has to learn of other weights, too",
    ),
    TouchPoint(
        "vllm.distributed.kv_transfer",
        "get_kv_transfer_group() has_kv_transfer_group()",
        used_by="worker.py",
        why="an engine that is one process may sleep right after a reset: stores would read memory "
        "of the device that is gone",
    ),
)

TOUCH_POINTS = (*_BASE_CLASSES, *_TYPES, *_CONFIGURATION, *_SCHEDULER, *_ENGINE)
