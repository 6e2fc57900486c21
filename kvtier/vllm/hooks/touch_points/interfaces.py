"""What kvtier's classes derive from, and how vLLM constructs them."""

from __future__ import annotations

from kvtier.vllm.hooks.touch_points.point import OFFLOADING, TouchPoint

INTERFACES = (
    TouchPoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector",
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
            "lookup(key, req_context)",
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
        target="vllm.v1.kv_offload.base:OffloadingManager",
        members=("get_load_source(key, req_context)",),
        since=(0, 32),
        used_by="interfaces.py",
        why="vLLM asks from where a block is loaded",
        without_it="vLLM's own count of cached tokens by source says less",
    ),
    TouchPoint(
        target="vllm.v1.kv_offload.base:OffloadingWorker",
        members=(
            "submit_store(job_id, src_spec, dst_spec)",
            "submit_load(job_id, src_spec, dst_spec)",
            *("get_finished()", "wait(job_ids)", "shutdown()"),
        ),
        derived=True,
        used_by="interfaces.py",
        why="VllmWorker derives from it, and copies",
        without_it="nothing is loaded or stored",
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
            *("LoadStoreSpec", "Locality", "LookupResult", "Medium", "OffloadingCounterMetadata"),
            *("OffloadingEvent", "OffloadingGaugeMetadata", "OffloadingHistogramMetadata"),
            *("PrepareStoreOutput", "RequestOffloadingContext", "TransferResult"),
        ),
        used_by="interfaces.py",
        why="what manager and worker are asked and answer, and how metrics are declared",
        without_it="nothing can be said to vLLM's side",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.metrics:OffloadingConnectorStats",
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
        since=(0, 32),
        used_by="interfaces.py",
        why="says from which tier tokens were loaded",
        without_it="vLLM's own count of cached tokens by source says less",
    ),
    TouchPoint(
        target="vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
        members=(
            "create_connector(config, role, kv_cache_config)",
            "register_connector(name, module_path, class_name)",
            "_registry",
        ),
        used_by="construction.py",
        why="a connector below a MultiConnector is given a copy of the configuration, while vLLM "
        "reads the policy for failed loads in the original; and its counters are read by its name",
        without_it="below a MultiConnector failed loads fail requests, and the API server ends",
    ),
    TouchPoint(
        target="vllm.config.parallel:ParallelConfig",
        members=("_allow_auto_resolve_cp_interleave_size",),
        used_by="construction.py",
        why="beside Nixl 0.31 and 0.32 change how ranks share a context, and tell only workers",
        without_it="blocks of one layout could be loaded into the other: wrong answers",
    ),
    TouchPoint(
        target="vllm.config:VllmConfig",
        members=("_resolve_mm_embedding_inputs()", "use_v2_model_runner()"),
        used_by="embedding_inputs.py",
        why="with any connector that loads, vLLM lets clients send embeddings in place of images",
        without_it="a request that leaves its embeddings out ends the engine",
    ),
    TouchPoint(
        target=f"{OFFLOADING}.config",
        members=("build_offloading_config(vllm_config, kv_cache_config)",),
        used_by="cache_groups.py",
        why="vLLM's own reading of its settings says how large chunks are, and who writes them",
        without_it="the tiers' block size is not known before the worker has its tensors",
    ),
    TouchPoint(
        target="vllm.distributed.utils",
        members=("get_pp_indices(num_hidden_layers, pp_rank, pp_size)",),
        used_by="pipeline_layers.py",
        why="of a pipeline the scheduler is told of the first rank's layers alone",
        without_it="where another rank has more layers, each load and store fails",
    ),
    TouchPoint(
        target="vllm.v1.core.kv_cache_utils",
        members=("resolve_dcp_kv_block_size(spec, dcp_world_size)",),
        used_by="cache_groups.py",
        why="ranks that share a context hold a part of each block",
        without_it="chunks of such engines have the wrong number of tokens: nothing is found",
    ),
)
