"""All that kvtier touches of vLLM without a promise, an entry a class or module of vLLM's.

`kvtier doctor --vllm`, the start of an engine and `make vllm-drill` compare the table with the
sources of a vLLM (source_check.py). A test compares it with the files of this folder.
"""

from __future__ import annotations

import sys

import msgspec

Version = tuple[int, int]
"""The first two numbers of a version."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOADING = f"{_CONNECTOR}.v1.offloading"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"


class TouchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A class or a module of vLLM's, and what kvtier relies on in it."""

    target: str
    """`module:Class`, or a module."""
    members: tuple[str, ...]
    """Names that must be there. With parentheses: a function whose parameters begin with these."""
    used_by: str
    """The file of this folder that touches it."""
    why: str
    without_it: str
    """What would go wrong."""
    since: Version = (0, 0)
    """Only from this version on; in all of them, if none is said."""
    until: Version = (sys.maxsize, 0)
    """Only up to this version: later ones need it no more."""
    derived: bool = False
    """A class of kvtier derives from it: it must ask for no method that is not in `members`."""
    upstream: str = ""
    """The issue, if there is one."""


_BASE_CLASSES = (
    TouchPoint(
        target=f"{_CONNECTOR}.v1.offloading_connector:OffloadingConnector",
        members=(
            "__init__(vllm_config, role, kv_cache_config)",
            *("connector_scheduler", "connector_worker"),
            "bind_gpu_block_pool(gpu_block_pool)",
            "on_new_request(request)",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "build_connector_meta(scheduler_output)",
            "update_connector_output(connector_output)",
            "request_finished(request, block_ids)",
            "request_finished_all_groups(request, block_ids)",
            *("has_pending_push_work()", "reset_cache()", "get_kv_connector_stats()"),
            *("get_finished(finished_req_ids)", "get_transfer_results(finished_req_ids)"),
            "build_prom_metrics(vllm_config, metric_types)",
        ),
        derived=True,
        used_by="interfaces.py",
        why="KVTierConnector derives from it: it asks kvtier's manager and worker",
        without_it="a connector written anew, with all that vLLM's does for windows and states",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base:OffloadingManager",
        members=(
            *("lookup(key, req_context)", "get_load_source(key, req_context)"),
            *("prepare_load(keys, req_context)", "complete_load(keys, req_context)"),
            *("prepare_store(keys, req_context)", "complete_store(keys, req_context, success)"),
            *("on_new_request(req_context)", "on_request_finished(req_context)"),
            *("on_schedule_end(context)", "has_pending_work()", "reset_cache()"),
            *("take_events()", "get_stats()", "shutdown()"),
        ),
        derived=True,
        used_by="interfaces.py",
        why="VllmManager derives from it, and answers from the tiers",
        without_it="nothing is found or stored",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base:OffloadingSpec",
        members=(
            *("get_manager()", "get_worker(kv_caches)", "build_metric_definitions(extra_config)"),
            *("config", "extra_config", "blocks_per_chunk"),
        ),
        derived=True,
        used_by="interfaces.py",
        why="KVTierSpec derives from it, and opens the stack",
        without_it="vLLM does not find kvtier's manager and worker",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base",
        members=(
            *("LoadStoreSpec", "LookupResult", "OffloadingCounterMetadata"),
            *("OffloadingGaugeMetadata", "OffloadingHistogramMetadata", "PrepareStoreOutput"),
            "RequestOffloadingContext",
        ),
        used_by="interfaces.py",
        why="what manager and worker are asked and answer, and how metrics are declared",
        without_it="nothing can be said to vLLM's side",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.worker:OffloadingConnectorWorker",
        members=(
            "__init__(spec, vllm_config, kv_cache_config)",
            *("register_kv_caches(kv_caches)", "handle_preemptions(kv_connector_metadata)"),
            *("start_kv_transfers(metadata)", "prepare_store_kv(metadata)"),
            *("get_finished(finished_req_ids)", "build_connector_worker_meta()", "shutdown()"),
            *("worker", "vllm_config", "_load_jobs", "_unsubmitted_store_jobs"),
        ),
        derived=True,
        used_by="worker.py",
        why="vLLM's worker asserts that no transfer ever fails",
        without_it="a load that fails ends the engine",
        upstream=f"{_ISSUES}39732",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.common:OffloadingWorkerMetadata",
        members=("completed_jobs", "transfer_stats", "mark_completed(job_id)", "aggregate(other)"),
        derived=True,
        used_by="worker.py",
        why="it carries the outcome of each errand to the scheduler",
        without_it="blocks would count as stored that are not: wrong answers",
    ),
)

_TYPES = (
    TouchPoint(
        target=f"{_OFFLOADING}.common:OffloadingConnectorMetadata",
        members=("load_jobs", "store_jobs", "jobs_to_flush"),
        used_by="worker.py",
        why="what workers are told with a step, and which load is not awaited any longer",
        without_it="a load that is slower than computing is awaited",
    ),
    TouchPoint(
        target=f"{_CONNECTOR}.v1.base:KVConnectorTransferResults",
        members=("finished_sending", "finished_recving", "failed_recving"),
        used_by="worker.py",
        why="names the requests whose loads have failed",
        without_it="what was not loaded would be taken for loaded: wrong answers",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.metrics:OffloadingConnectorStats",
        members=(
            "increase_counter(counter_name, counter_increase_value, labelvalues)",
            "set_gauge(gauge_name, gauge_value, labelvalues)",
            "observe_histogram(histogram_name, histogram_value, labelvalues)",
            "is_empty()",
        ),
        used_by="interfaces.py",
        why="kvtier's counters travel in it to vLLM's /metrics",
        without_it="no metrics",
    ),
    TouchPoint(
        target="vllm.v1.metrics.cache_hit_source:CacheHitSource",
        members=("HOST", "DISK", "EXTERNAL_UNSPECIFIED"),
        used_by="interfaces.py",
        why="says from which tier tokens were loaded",
        without_it="vLLM's own count of cached tokens by source says less",
    ),
    TouchPoint(
        target="vllm.distributed.kv_events",
        members=("BlockStored", "BlockRemoved"),
        used_by="interfaces.py",
        why="the tiers' events in vLLM's words",
        without_it="no events",
    ),
    TouchPoint(
        target="vllm.v1.core.kv_cache_utils",
        members=(
            "resolve_dcp_kv_block_size(spec, dcp_world_size)",
            "generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)",
            *("maybe_convert_block_hash(hash_bytes)", "to_event_extra_keys(extra_keys)"),
            "resolve_block_hashes(block_hashes, hash_block_size, block_size)",
        ),
        used_by="interfaces.py",
        why="ranks that share a context hold a part of each block; and events name what is in a "
        "block as vLLM's own events do",
        without_it="nothing is found where ranks share a context, and routers match no events",
    ),
    TouchPoint(
        target="vllm._custom_ops",
        members=("swap_blocks_batch(src_ptrs, dst_ptrs, sizes)",),
        used_by="interfaces.py",
        why="on CUDA many small pieces are copied in one call",
        without_it="loads and stores of small pages are several times as slow",
    ),
)

_CONFIGURATION = (
    TouchPoint(
        target=f"{_CONNECTOR}.factory:KVConnectorFactory",
        members=(
            "create_connector(config, role, kv_cache_config)",
            "register_connector(name, module_path, class_name)",
            "_registry",
        ),
        used_by="config.py",
        why="a connector below a MultiConnector is given a copy of the configuration, while vLLM "
        "reads the policy for failed loads in the original; and its counters are read by its name",
        without_it="below a MultiConnector failed loads fail requests, and the API server ends",
    ),
    TouchPoint(
        target="vllm.config:VllmConfig",
        members=("_resolve_mm_embedding_inputs()", "use_v2_model_runner()"),
        used_by="config.py",
        why="with any connector that loads, vLLM lets clients send embeddings in place of images",
        without_it="a request that leaves its embeddings out ends the engine",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.config",
        members=("build_offloading_config(vllm_config, kv_cache_config)",),
        used_by="cache_groups.py",
        why="vLLM's own reading of its settings says how large chunks are, and who writes them",
        without_it="the tiers' block size is not known before the worker has its tensors",
    ),
    TouchPoint(
        target="vllm.distributed.utils",
        members=("get_pp_indices(num_hidden_layers, pp_rank, pp_size)",),
        used_by="cache_groups.py",
        why="of a pipeline the scheduler is told of the first rank's layers alone",
        without_it="where another rank has more layers, each load and store fails",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:GroupOffloadConfig",
        members=(
            *("group_idx", "kv_cache_spec", "tokens_per_block", "tokens_per_chunk"),
            *("hashes_per_chunk", "sliding_window_size_in_chunks", "is_eagle_group"),
            "kv_event_group_spec",
        ),
        used_by="cache_groups.py",
        why="vLLM asks of windows for a chunk more than it keeps, and with drafts for one less",
        without_it="prompts of models with windows or drafts are not found",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig",
        members=(
            *("kv_group_configs", "blocks_per_chunk", "offload_prompt_only"),
            *("supports_partial_tail", "retention_interval"),
        ),
        used_by="cache_groups.py",
        why="of hybrid models vLLM would store what is behind the last whole chunk",
        without_it="a request's max_offload_tokens may end the engine",
    ),
)

_SCHEDULER = (
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=(
            *("config", "manager", "_req_status", "_jobs", "_chunks_being_loaded"),
            *("_block_id_to_pending_jobs", "_current_batch_load_jobs"),
            *("_current_batch_jobs_to_flush", "_current_batch_allocated_block_ids"),
            "_events_tracker",
            "get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)",
        ),
        used_by="scheduler.py",
        why="which keys a request has and what is under way for it; which blocks a step writes to; "
        "vLLM's tracker of events, which forgets nothing and knows no adapters nor resets",
        without_it="hits are decided on without their costs, steps go through all requests and "
        "wait for stores, a second reset is refused, and events name blocks wrongly",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_manager_locked()",),
        since=(0, 33),
        used_by="scheduler.py",
        why="0.33 may call the manager from two threads, under this lock",
        without_it="kvtier's own calls could meet vLLM's",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:RequestOffloadState",
        members=(
            *("req", "req_context", "config", "group_states"),
            *("max_load_tokens", "max_offload_tokens", "update_offload_keys()"),
            "update_block_id_groups(new_block_id_groups)",
        ),
        used_by="scheduler.py",
        why="a request's keys and limits, also while it waits",
        without_it="nothing is prefetched while requests wait, and limits are not heeded",
    ),
    TouchPoint(
        target=f"{_OFFLOADING}.scheduler:RequestGroupState",
        members=("block_ids", "next_stored_chunk_idx", "offload_keys"),
        used_by="scheduler.py",
        why="chunks with holes are left out, recomputed ones stored, decoded ones not looked at",
        without_it="chunks of windows would be stored with blocks of others: wrong answers",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base:ReqContext",
        members=("req_id", "_offload_key_positions"),
        used_by="scheduler.py",
        why="the token at which each key of a request ends",
        without_it="a hit is decided on block by block",
    ),
    TouchPoint(
        target="vllm.v1.request:Request",
        members=(
            *("request_id", "lora_request", "resumable", "mm_features", "kv_transfer_params"),
            *("num_tokens()", "num_prompt_tokens", "block_hashes", "all_token_ids", "status"),
            *("priority", "arrival_time", "num_computed_tokens", "skip_reading_prefix_cache"),
            *("kv_hints", "shared_prefix_boundary"),
        ),
        used_by="scheduler.py",
        why="what a request is and when its turn comes; routers say in hints which blocks will be "
        "used again; and vLLM keeps states and windows where a prompt diverges from others",
        without_it="nothing is prefetched, hints are not heeded, and what prompts share is not "
        "found again for models with windows or states",
        upstream=f"{_ISSUES}53421",
    ),
    TouchPoint(
        target="vllm.v1.kv_hints.protocol:KvHintsEnvelope",
        members=("actions",),
        used_by="scheduler.py",
        why="the actions of hints",
        without_it="hints are not heeded; `kv_transfer_params` are",
    ),
    TouchPoint(
        target="vllm.v1.kv_hints.protocol:KvHintAction",
        members=("action_type", "action_version", "payload"),
        used_by="scheduler.py",
        why="the actions of hints",
        without_it="hints are not heeded; `kv_transfer_params` are",
    ),
    TouchPoint(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        members=(
            *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
            *("total_num_scheduled_tokens", "finished_req_ids", "preempted_req_ids"),
            "kv_cache_block_copies",
        ),
        used_by="idle_requests.py",
        why="vLLM's side is told only of requests that may have something to store",
        without_it="a step with hundreds of requests takes a millisecond or two longer",
    ),
    TouchPoint(
        target="vllm.v1.core.sched.output:CachedRequestData",
        members=("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"),
        used_by="idle_requests.py",
        why="vLLM's side is told only of requests that may have something to store",
        without_it="a step with hundreds of requests takes a millisecond or two longer",
    ),
    TouchPoint(
        target="vllm.v1.core.block_pool:BlockPool",
        members=(
            "get_new_blocks(num_blocks)",
            "cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks)",
            "cache_partial_block(request, block)",
            "get_cached_block(block_hash, kv_cache_group_ids)",
            *("evict_blocks(block_ids)", "get_num_free_blocks()"),
        ),
        used_by="block_pool.py",
        why="which blocks a step gives out, and what vLLM's own cache has; a request that is "
        "preempted for another in its step leaves blocks there that it has not computed",
        without_it="others are computed from such blocks, and stored: wrong answers",
    ),
)

_ENGINE = (
    TouchPoint(
        target="vllm.v1.engine.core:EngineCore",
        members=(
            *("scheduler", "collective_rpc(method)", "reset_prefix_cache()", "_reset_caches()"),
            *("add_lora(lora_request)", "remove_lora(lora_id)"),
        ),
        used_by="engine.py",
        why="vLLM tells no connector that weights are read, adapters come and go, or its own cache "
        "is reset",
        without_it="blocks of other weights, or of another adapter, would be served",
        upstream=f"{_ISSUES}9744, {_ISSUES}42125",
    ),
    TouchPoint(
        target="vllm.v1.core.sched.scheduler:Scheduler",
        members=(
            *("connector", "set_pause_state(pause_state)", "get_num_unfinished_requests()"),
            "finish_requests(request_ids, finished_status)",
        ),
        used_by="engine.py",
        why="an engine that is paused waits only for copies from and to its device; one that is "
        "told to end aborts what it would be killed with",
        without_it="a pause, or sleep, would wait for disks; at a kill nothing would be closed",
    ),
    TouchPoint(
        target="vllm.v1.engine.core:EngineCoreProc",
        members=(
            *("scheduler", "vllm_config", "is_running()", "_handle_shutdown()"),
            "_send_abort_outputs(aborted_reqs)",
        ),
        used_by="engine.py",
        why="an engine that is told to end does so in order, before its server kills it",
        without_it="it would write down all that waits for a slow disk, and be killed amid that",
    ),
    TouchPoint(
        target="vllm.v1.request:RequestStatus",
        members=("FINISHED_ABORTED",),
        used_by="engine.py",
        why="requests that would be served until the kill are aborted before it",
        without_it="the engine would be killed with them, and close nothing",
    ),
    TouchPoint(
        target="vllm.v1.engine.llm_engine:LLMEngine",
        members=("engine_core", "has_unfinished_requests()"),
        used_by="engine.py",
        why="an engine without a process of its own is stepped by its caller alone",
        without_it="what its last requests store would stay on the device",
    ),
    TouchPoint(
        target=f"{_CONNECTOR}.v1.multi_connector:MultiConnector",
        members=("sub_connectors()",),
        used_by="engine.py",
        why="kvtier's connector may be one of several",
        without_it="below a MultiConnector it would not be told of the above",
    ),
    TouchPoint(
        target="vllm.distributed.kv_transfer",
        members=("get_kv_transfer_group()", "has_kv_transfer_group()"),
        used_by="worker.py",
        why="an engine that is one process may sleep right after a reset",
        without_it="stores would read memory of the device that is gone",
    ),
)

TOUCH_POINTS = (*_BASE_CLASSES, *_TYPES, *_CONFIGURATION, *_SCHEDULER, *_ENGINE)
