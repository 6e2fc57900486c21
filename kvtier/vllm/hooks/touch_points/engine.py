"""What kvtier reads of vLLM's engine, its requests and its events, and which calls it wraps."""

from __future__ import annotations

from kvtier.vllm.hooks.touch_points.point import ISSUES, TouchPoint

ENGINE = (
    TouchPoint(
        target="vllm.v1.core.block_pool:BlockPool",
        members=(
            "get_new_blocks(num_blocks)",
            "cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks)",
            "cache_partial_block(request, block)",
            *("evict_blocks(block_ids)", "get_num_free_blocks()"),
        ),
        used_by="block_allocation.py",
        why="which blocks a step gives out; and a request that makes way for another in its step "
        "leaves blocks in vLLM's own cache that it has not computed",
        without_it="others are computed from such blocks, and stored: wrong answers",
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
        why="the same",
        without_it="the same",
    ),
    TouchPoint(
        target="vllm.v1.request:Request",
        members=(
            *("request_id", "lora_request", "resumable", "mm_features", "kv_transfer_params"),
            *("num_tokens()", "num_prompt_tokens", "block_hashes", "all_token_ids", "status"),
            "shared_prefix_boundary",
        ),
        used_by="request_states.py",
        why="what a request is; and vLLM keeps states and windows where a prompt parts from others",
        without_it="what prompts share is not found again for models with windows or states",
    ),
    TouchPoint(
        target="vllm.v1.request:Request",
        members=(
            *("priority", "arrival_time", "num_computed_tokens"),
            "skip_reading_prefix_cache",
        ),
        used_by="waiting_queue.py",
        why="in which order vLLM serves those that wait, and which of them load nothing",
        without_it="nothing is prefetched while requests wait, or in another order",
    ),
    TouchPoint(
        target="vllm.v1.request:Request",
        members=("kv_hints",),
        since=(0, 32),
        used_by="request_hints.py",
        why="routers say in hints which blocks will be used again, and which never",
        without_it="hints are not heeded; `kv_transfer_params` are",
        upstream=f"{ISSUES}53421",
    ),
    TouchPoint(
        target="vllm.v1.kv_hints.protocol:KvHintsEnvelope",
        members=("actions",),
        since=(0, 32),
        used_by="request_hints.py",
        why="the same",
        without_it="the same",
    ),
    TouchPoint(
        target="vllm.v1.kv_hints.protocol:KvHintAction",
        members=("action_type", "action_version", "payload"),
        since=(0, 32),
        used_by="request_hints.py",
        why="the same",
        without_it="the same",
    ),
    TouchPoint(
        target="vllm.v1.core.block_pool:BlockPool",
        members=("get_cached_block(block_hash, kv_cache_group_ids)",),
        used_by="waiting_queue.py",
        why="what the engine's own cache has need not be prefetched",
        without_it="blocks are prefetched that nobody will ask for",
    ),
    TouchPoint(
        target="vllm.v1.engine.core:EngineCore",
        members=(
            *("scheduler", "collective_rpc(method)", "reset_prefix_cache()", "_reset_caches()"),
            *("add_lora(lora_request)", "remove_lora(lora_id)"),
        ),
        used_by="engine_calls.py",
        why="vLLM tells no connector that weights are read, adapters come and go, or its own cache "
        "is reset",
        without_it="blocks of other weights, or of another adapter, would be served",
        upstream=f"{ISSUES}9744, {ISSUES}42125",
    ),
    TouchPoint(
        target="vllm.v1.core.sched.scheduler:Scheduler",
        members=("connector", "set_pause_state(pause_state)"),
        used_by="engine_calls.py",
        why="an engine that is paused waits only for copies from and to its device",
        without_it="a pause, or sleep, would wait for disks and buckets",
    ),
    TouchPoint(
        target="vllm.v1.engine.core:EngineCoreProc",
        members=(
            *("scheduler", "vllm_config", "is_running()", "_handle_shutdown()"),
            "_send_abort_outputs(aborted_reqs)",
        ),
        used_by="engine_endings.py",
        why="an engine that is told to end does so in order, before its server kills it",
        without_it="it would write down all that waits for a slow disk, and be killed amid that",
    ),
    TouchPoint(
        target="vllm.v1.core.sched.scheduler:Scheduler",
        members=(
            "get_num_unfinished_requests()",
            "finish_requests(request_ids, finished_status)",
        ),
        used_by="engine_endings.py",
        why="requests that are served until the kill are aborted before it",
        without_it="the engine would be killed with them, and close nothing",
    ),
    TouchPoint(
        target="vllm.v1.request:RequestStatus",
        members=("FINISHED_ABORTED",),
        used_by="engine_endings.py",
        why="likewise",
        without_it="likewise",
    ),
    TouchPoint(
        target="vllm.v1.engine.llm_engine:LLMEngine",
        members=("engine_core", "has_unfinished_requests()"),
        used_by="engine_endings.py",
        why="an engine without a process of its own is stepped by its caller alone",
        without_it="what its last requests store would stay on the device",
    ),
    TouchPoint(
        target="vllm.v1.engine.async_llm:AsyncLLM",
        members=("engine_core", "output_handler", "shutdown()"),
        used_by="engine_endings.py",
        why="the task that reads an engine's answers ends before what it reads from is closed",
        without_it="some ends would leave a traceback in the log",
    ),
    TouchPoint(
        target="vllm.v1.engine.core_client:BackgroundResources",
        members=("__call__()",),
        used_by="engine_endings.py",
        why="likewise",
        without_it="likewise",
    ),
    TouchPoint(
        target="vllm.utils.async_utils",
        members=("cancel_task_threadsafe(task)",),
        used_by="engine_endings.py",
        why="likewise",
        without_it="likewise",
    ),
    TouchPoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector",
        members=("sub_connectors()",),
        used_by="engine_calls.py",
        why="kvtier's connector may be one of several",
        without_it="below a MultiConnector it would not be told of the above",
    ),
    TouchPoint(
        target="vllm.distributed.kv_events",
        members=("BlockStored", "BlockRemoved"),
        used_by="event_tracker.py",
        why="the tiers' events in vLLM's words",
        without_it="no events",
    ),
    TouchPoint(
        target="vllm.v1.core.kv_cache_utils",
        members=(
            "generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)",
            *("maybe_convert_block_hash(hash_bytes)", "to_event_extra_keys(extra_keys)"),
            "resolve_block_hashes(block_hashes, hash_block_size, block_size)",
        ),
        used_by="event_tracker.py",
        why="events name what is in a block as vLLM's own events do",
        without_it="routers cannot match them",
    ),
)
