"""What kvtier reads and corrects in the two sides of vLLM's offloading connector."""

from __future__ import annotations

from kvtier.vllm.hooks.touch_points.point import ISSUES, OFFLOADING, TouchPoint

OFFLOADING_SIDES = (
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=(
            *("config", "manager", "_req_status", "_jobs", "_chunks_being_loaded"),
            "get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)",
        ),
        used_by="request_states.py",
        why="which keys a request has, how far it may load, and what is under way for it",
        without_it="hits are looked up block by block, and decided on without their costs",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_current_batch_load_jobs",),
        until=(0, 32),
        used_by="scheduler_steps.py",
        why="a load right after a reset that preempts; and all blocks of a request that another "
        "connector loads are taken for more of them",
        without_it="the first ends the engine; of the second blocks are stored under wrong keys",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_current_batch_jobs_to_flush",),
        used_by="scheduler_steps.py",
        why="a reset may come right after another, before workers were told what to finish",
        without_it="it is refused while transfers are under way",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_manager_locked()",),
        since=(0, 33),
        used_by="scheduler_steps.py",
        why="0.33 may call the manager from two threads, under this lock",
        without_it="kvtier's own calls could meet vLLM's",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_current_batch_allocated_block_ids",),
        used_by="block_allocation.py",
        why="vLLM takes all blocks of a request that begins for given out anew, also those found",
        without_it="where prompts begin alike, steps wait for stores, or these are dropped",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=(
            *("_block_id_to_pending_jobs", "_current_batch_load_jobs"),
            *("_current_batch_jobs_to_flush", "_current_batch_allocated_block_ids"),
        ),
        used_by="idle_requests.py",
        why="a step in which vLLM's side has nothing to do is not shown to it",
        without_it="each step goes through all running requests",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_events_tracker",),
        used_by="event_tracker.py",
        why="vLLM's tracker keeps what it told for ever, and knows no adapters nor resets",
        without_it="events name blocks wrongly, and memory grows",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:RequestOffloadState",
        members=(
            *("req", "req_context", "config", "group_states"),
            *("max_load_tokens", "max_offload_tokens", "update_offload_keys()"),
            "update_block_id_groups(new_block_id_groups)",
        ),
        used_by="request_states.py",
        why="a request's keys and limits; its hashes are gone through when there is a whole chunk",
        without_it="each step of a long request goes through all of its hashes",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:RequestOffloadState",
        members=("update_offload_keys()",),
        used_by="waiting_queue.py",
        why="the keys of a request that waits; vLLM itself makes them when it first looks them up",
        without_it="nothing is prefetched while requests wait",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        members=("_req_status",),
        used_by="waiting_queue.py",
        why="the same",
        without_it="the same",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base:ReqContext",
        members=("req_id", "_offload_key_positions"),
        used_by="request_states.py",
        why="the token at which each key of a request ends",
        without_it="a hit is decided on block by block",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:RequestGroupState",
        members=("block_ids", "next_stored_chunk_idx", "offload_keys"),
        used_by="request_states.py",
        why="chunks with holes are left out, recomputed ones stored, decoded ones not looked at",
        without_it="chunks of windows would be stored with blocks of others: wrong answers",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.scheduler:GroupOffloadConfig",
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
        target=f"{OFFLOADING}.scheduler:SchedulerOffloadConfig",
        members=(
            *("kv_group_configs", "blocks_per_chunk", "offload_prompt_only"),
            *("supports_partial_tail", "retention_interval"),
        ),
        used_by="cache_groups.py",
        why="of hybrid models vLLM would store what is behind the last whole chunk",
        without_it="a request's max_offload_tokens may end the engine",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.worker:OffloadingConnectorWorker",
        members=(
            "__init__(spec, vllm_config, kv_cache_config)",
            *("register_kv_caches(kv_caches)", "handle_preemptions(kv_connector_metadata)"),
            *("start_kv_transfers(metadata)", "prepare_store_kv(metadata)"),
            *("get_finished(finished_req_ids)", "build_connector_worker_meta()", "shutdown()"),
            *("worker", "vllm_config", "_load_jobs", "_unsubmitted_store_jobs"),
        ),
        derived=True,
        used_by="failure_tolerant_worker.py",
        why="vLLM's worker asserts that no transfer ever fails",
        without_it="a load that fails ends the engine",
        upstream=f"{ISSUES}39732",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.common:OffloadingWorkerMetadata",
        members=("completed_jobs", "transfer_stats", "mark_completed(job_id)", "aggregate(other)"),
        derived=True,
        used_by="failure_tolerant_worker.py",
        why="it carries what became of each errand to the scheduler",
        without_it="blocks would count as stored that are not: wrong answers",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.common:OffloadingConnectorMetadata",
        members=("load_jobs", "store_jobs", "jobs_to_flush"),
        used_by="failure_tolerant_worker.py",
        why="what workers are told with a step, and which load is not awaited any longer",
        without_it="a load that is slower than computing is awaited",
    ),
    TouchPoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults",
        members=("finished_sending", "finished_recving", "failed_recving"),
        used_by="failure_tolerant_worker.py",
        why="names the requests whose loads have failed",
        without_it="what was not loaded would be taken for loaded: wrong answers",
    ),
    TouchPoint(
        target="vllm.distributed.kv_transfer",
        members=("get_kv_transfer_group()", "has_kv_transfer_group()"),
        used_by="failure_tolerant_worker.py",
        why="an engine that is one process may sleep right after a reset",
        without_it="stores would read memory of the device that is gone",
    ),
    TouchPoint(
        target="vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
        members=("_is_per_token_head_quant", "_ensure_scale_caches(kv_cache)"),
        used_by="failure_tolerant_worker.py",
        why="such layers set the scales in their KV cache when they first compute something",
        without_it="what was loaded until then would be scaled wrong",
    ),
)
