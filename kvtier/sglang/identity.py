"""What makes the pages of one SGLang engine interchangeable with another's, and what is refused
because it would not be known."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.record.record import VERSION as RECORD_VERSION
from kvtier.sglang import TESTED
from kvtier.weight_fingerprints import BY_LENGTH, weights_of, whole_name

logger = logging.getLogger(__name__)

weights_changed = threading.Event()
"""Whether this process has taken other weights since it started."""
_WATCHED = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's WeightUpdater: all ways by which a running engine takes other weights."""
_CALLS = {
    "batch_exists": ("keys", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "clear": (),
}
"""What SGLang calls of a storage backend, and how."""
_SETTINGS = (
    *("load_format", "model_loader_extra_config", "model_impl", "json_model_override_args"),
    *("quantization", "quantization_param_path"),
    *("modelopt_quant", "rl_quant_profile", "torchao_config", "enable_tf32_matmul"),
    *("kv_cache_dtype", "attention_backend", "prefill_attention_backend"),
    *("decode_attention_backend", "dsa_prefill_backend", "dsa_decode_backend", "dsa_topk_backend"),
    *("dsv4_prefill_backend", "flashinfer_mla_disable_ragged", "triton_attention_reduce_in_fp32"),
    *("fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend"),
    *("moe_runner_backend", "moe_a2a_backend", "flashinfer_mxfp4_moe_precision"),
    *("enable_w4a4_mxfp4_megamoe", "enable_fused_qk_norm_rope", "enable_quant_communications"),
    *("enable_deterministic_inference", "dllm_algorithm", "speculative_algorithm"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
)
"""SGLang's settings that change what is in a page."""
_STATE_SETTINGS = (
    *("mamba_ssm_dtype", "mamba_backend", "mamba_radix_cache_strategy"),
    *("enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds"),
    *("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"),
    *("linear_attn_verify_backend", "enable_linear_replayssm", "linear_replayssm_cache_len"),
    *("enable_linear_replayssm_spec", "qsa_indexer_dtype"),
)
"""Those that change what is in a page of another pool than the KV cache's."""


def check_version(interface: type) -> str:
    """The version of SGLang; raises ConfigError for one that calls its storage in another way."""
    found = version("sglang")
    if found in TESTED:
        return found
    moved = [name for name, names in _CALLS.items() if _arguments(interface, name) != names]
    if moved:
        raise ConfigError(
            "sglang",
            f"{found} is installed, which calls its storage in another way: {', '.join(moved)}",
            f"install {TESTED[-1]}, or a kvtier that knows this one",
        )
    logger.warning("SGLang %s was never tested with this kvtier; tested are %s", found, TESTED)
    return found


def _arguments(interface: type, name: str) -> tuple[str, ...] | None:
    method = getattr(interface, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)[1:]


def watch_weights(updater: type, *, attached_late: bool) -> None:
    """Notice from now on when this process takes other weights; raises ConfigError if it has, or
    may have."""
    if attached_late or weights_changed.is_set():
        raise ConfigError(
            "--hicache-storage-backend",
            "kvtier was attached to an engine that runs, which may have taken other weights",
            "start the engine with --hicache-storage-backend dynamic",
        )
    for name in _WATCHED:  # for each rank of a process anew, which changes nothing
        setattr(updater, name, _noticed(getattr(updater, name)))


def _noticed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        if not weights_changed.is_set():
            weights_changed.set()  # it may fail halfway
            logger.warning("other weights: kvtier keeps and finds nothing until the next start")
        return method(*arguments, **named)

    return call


def refuse(arguments: Any, model: Any) -> None:
    """Raise ConfigError for an engine whose keys do not tell enough of its pages."""
    if arguments.enable_lora:
        raise ConfigError(
            "--enable-lora",
            "SGLang's keys name an adapter by name and path, and other files may be there later",
            "serve adapters by an engine without kvtier",
        )
    if model.is_multimodal:
        raise ConfigError(
            "--model-path",
            "this model sees images or hears, and that was not tried",
            "serve it by an engine without kvtier",
        )


def refuse_pools(ranks: Any, others: Mapping[str, Any]) -> None:
    """Raise ConfigError for pools beside the KV cache that ranks would mistake for each other's."""
    if others and ranks.is_mla_model and ranks.tp_size > 1:
        raise ConfigError(
            "--tp-size",
            f"replicas share the KV cache of this model, but perhaps not {', '.join(others)}",
            "serve this model by an engine without kvtier, or without tensor parallelism",
        )


def facts_of_pools(arguments: Any, others: Mapping[str, Any]) -> dict[str, str]:
    """Those of an engine that has other pools beside its KV cache, by their names."""
    if not others:
        return {}
    facts = {f"pool_{name}": _kind_of(pool) for name, pool in others.items()}
    return facts | {"state_settings": _chosen(arguments, _STATE_SETTINGS)}


def _kind_of(pool: Any) -> str:
    """What a page of a pool is: `get_page_buffer_meta` names its pieces."""
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    dtypes = " ".join(str(each.dtype) for each in buffers)
    _, sizes = pool.get_page_buffer_meta(np.arange(pool.page_size))
    pieces = " ".join(map(str, sizes))
    kind = f"{type(pool).__name__} {pool.layout} {pool.storage_format_tag}"
    return f"{kind}, {pool.page_size} tokens of {dtypes}, in {pieces} bytes"


def facts_of(
    arguments: Any, model: Any, ranks: Any, pool: Any, weights: str | None
) -> dict[str, str]:
    """The facts of an engine's namespace; `weights` is what its user calls them."""
    load = SimpleNamespace(
        load_format=getattr(arguments.load_format, "value", arguments.load_format),
        download_dir=arguments.download_dir,
        model_loader_extra_config=arguments.model_loader_extra_config,
    )
    return {
        "model": whole_name(arguments.model_path),
        "model_config": _configuration(model),
        "weights": f"called {weights}" if weights else _fingerprints(arguments, load),
        "dtype": str(model.dtype),
        "kv_dtype": str(pool.dtype),
        "kv_layout": f"{type(pool).__name__} {pool.layout} {pool.storage_format_tag}",
        "block_tokens": str(pool.page_size),
        "chunk_blocks": "1",
        "record": str(RECORD_VERSION),
        "hash": "sglang page hashes",
        # Replicas of MLA models hold the same, and one of them stores it for all.
        "tensor_parallel": _rank("any" if ranks.is_mla_model else ranks.tp_rank, ranks.tp_size),
        "pipeline_parallel": _rank(ranks.pp_rank, ranks.pp_size),
        "context_parallel": _rank(ranks.attn_cp_rank, ranks.attn_cp_size),
        "settings": _chosen(arguments, _SETTINGS),
        "platform": _platform(arguments.device),
        "engine": f"sglang {version('sglang')}",
    }


def _rank(rank: int | str, size: int) -> str:
    return "1" if size == 1 else f"{size} rank {rank}"


def _configuration(model: Any) -> str:
    """A digest of a model's configuration, without the name by which it was read."""
    text = model.hf_config.to_json_string(use_diff=False)
    configured = json.loads(text)
    configured.pop("_name_or_path", None)
    if not any(word in text for word in BY_LENGTH):
        configured.pop("context_len", None)
    return hashlib.sha256(json.dumps(configured, sort_keys=True).encode()).hexdigest()[:32]


def _fingerprints(arguments: Any, load: Any) -> str:
    """Those of the weights of the model, and of one that guesses ahead."""
    models = [(arguments.model_path, arguments.revision)]
    draft = arguments.speculative_draft_model_path
    if draft and draft != arguments.model_path:
        models.append((draft, arguments.speculative_draft_model_revision))
    named = [SimpleNamespace(model=name, revision=at, seed=0) for name, at in models]
    return " ".join(weights_of(each, load) for each in named)


def _chosen(arguments: Any, settings: Sequence[str]) -> str:
    said = {name: getattr(arguments, name, None) for name in settings}
    chosen = [f"{name}={value}" for name, value in said.items() if value not in (None, False, "")]
    return " ".join(chosen) or "default"


def _platform(device: str) -> str:
    import torch

    if device == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name())
