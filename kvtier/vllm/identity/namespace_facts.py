"""What makes one engine's KV bytes interchangeable with another's: the facts of its namespace."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from kvtier.errors import ConfigError
from kvtier.record.record import VERSION as RECORD_VERSION
from kvtier.types import ANY_DEGREE
from kvtier.weight_fingerprints import (
    BY_LENGTH,
    fingerprint_folder,
    fingerprint_weights,
    folder_of,
    weights_of,
    whole_name,
)

_ATTENTION_LIBRARIES = ("flashinfer-python", "flashinfer-cubin", "flash-attn", "amd-aiter")
"""vLLM's choice of a backend follows from which of these are there, and with it the order of bytes
within a block that is larger than those of the backend."""
_INSTRUCTIONS = ("avx512", "avx512_bf16", "amx_tile")
"""Those of x86 by which vLLM chooses what it loads and how it lays out blocks on a CPU."""
_STABLE_HASHES = ("sha256", "sha256_cbor")
_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""How images and the like become embeddings: vLLM hashes what was given, not what became of it."""
_KERNELS = {"moe_backend": "auto", "linear_backend": "auto", "linear_backend_per_quant": None}
"""Which kernels multiply: of quantized models some round what is multiplied to four or eight bits,
and some do not."""
_EXACT = {
    "use_trtllm_attention": None,
    "disable_flashinfer_q_quantization": False,
    "use_prefill_query_quantization": False,
    "indexer_sparse_logits": False,
    "use_non_causal": False,
}
"""How exactly attention is computed, and whether it looks ahead."""
_EXPERTS = {"enable_mixed_moe_lora_format": False, "enable_moe_shared_loras": False}
"""How adapters of experts are read."""
_ROUNDED = {"enable_stochastic_rounding": False}
"""Whether states are rounded at random."""
_HASHED = {"prefix_match_unit": None}
"""How many tokens are hashed at once, where that is not a block."""
_ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DISABLED_KERNELS",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_USE_DEEP_GEMM",
    "XHS_VIDEO_JPEG_QUALITY",
)
"""How the names of variables begin of which no configuration tells: they choose the order of bytes
within a block, how exactly it is computed or what a video becomes, or that what is computed is no
answer at all. (That of `VLLM_KV_CACHE_LAYOUT` is in the configuration by now.)"""


def facts_of(
    vllm_config: Any,
    blocks_per_chunk: int,
    weights: str | None = None,
    group_tokens: Sequence[int] = (),
    *,
    any_degree: bool = False,
) -> dict[str, str]:
    """The facts of an engine's namespace, from its configuration and its weights; `weights` is what
    its user calls them, in place of a fingerprint, `group_tokens` say how many tokens are in a
    block of each cache group, and of `any_degree` engines of all tensor-parallel sizes share it."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    configured = configuration_of(model.hf_config)
    by_length = any(word in configured for word in BY_LENGTH)
    several = len(set(group_tokens)) > 1
    return {
        "model": whole_name(str(model.model)),
        "model_config": _digest(configured),
        "implementation": _implementation(model, vllm_config.load_config),
        "longest_prompt": _longest_prompt(model) if by_length else "any",
        "media": _media(model.multimodal_config),
        "adapters": _adapters(vllm_config.lora_config, model.dtype),
        "weights": f"called {weights}" if weights else fingerprint_weights(vllm_config),
        "dtype": str(model.dtype),
        "quantization": _stated(model, "quantization", "quantization_config")
        + _chosen(vllm_config.kernel_config, _KERNELS),
        "kv_dtype": _stated(cache, "cache_dtype", "kv_cache_dtype_skip_layers"),
        "state": _stated(
            cache,
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
            "use_replayssm",
            "replayssm_buffer_len",
            "use_kda_recoverssm",
        )
        + f",{vllm_config.mamba_config.backend.name}"
        + _chosen(vllm_config.mamba_config, _ROUNDED),
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "block_tokens": str(cache.block_size),
        **({"group_tokens": ",".join(map(str, group_tokens))} if several else {}),
        "chunk_blocks": str(blocks_per_chunk),
        "record": str(RECORD_VERSION),
        "hash": str(cache.prefix_caching_hash_algo) + _chosen(cache, _HASHED),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "default"),
        "tensor_parallel": ANY_DEGREE if any_degree else str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "context_parallel": _stated(
            parallel,
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "dcp_kv_cache_interleave_size",
        ),
        "speculative": _speculative(vllm_config, weights),
        "attention": _attention(vllm_config.attention_config),
        "environment": environment_of(os.environ),
        "additional": _additional(vllm_config.additional_config),
        "platform": _platform(),
        "engine": f"vllm {vllm.__version__}",
    }


def configuration_of(hf_config: Any) -> str:
    """A model's configuration; the name by which it was read stands in it, too."""
    text = str(hf_config.to_json_string(use_diff=False))
    named = json.loads(text)
    name = named.get("_name_or_path")
    if not isinstance(name, str) or whole_name(name) == name:
        return text
    named["_name_or_path"] = whole_name(name)
    return json.dumps(named, indent=2, sort_keys=True) + "\n"  # as it is written otherwise


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stated(config: Any, *names: str) -> str:
    """These settings, as far as this version of vLLM has them."""
    return ",".join(str(getattr(config, name, None)) for name in names)


def _chosen(config: Any, unless: Mapping[str, object]) -> str:
    """Those of these settings that are others than these."""
    said = {name: getattr(config, name, usual) for name, usual in unless.items()}
    return "".join(f" {name}={is_}" for name, is_ in said.items() if is_ != unless[name])


def _longest_prompt(model: Any) -> str:
    """For how long prompts a model was made, which was before `auto` found out how long ones there
    is memory for; and whether it looks at far tokens in another way, if that was said."""
    auto = model.original_max_model_len == -1
    length = model.get_and_verify_max_len(-1) if auto else model.max_model_len
    said = {**model.try_get_generation_config(), **model.override_generation_config}
    tuned = said.get("attn_temperature_tuning")
    return str(length) if tuned is None else f"{length} attn_temperature_tuning={tuned}"


def _implementation(model: Any, load: Any) -> str:
    """Whose code computes the model; that which lies beside the weights may change without them."""
    said = _stated(model, "model_impl", "model_class_overrides", "code_revision") + _plugins()
    folder = folder_of(model, load) if model.trust_remote_code else None
    return said if folder is None else f"{said} {fingerprint_folder(folder, ('*.py',))}"


def _plugins() -> str:
    """Others' plugins of vLLM's: they may put models of their own in the place of vLLM's."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = {
        f" {plugin.name}={plugin.dist.version}"
        for plugin in metadata.entry_points(group="vllm.general_plugins")
        if plugin.dist is not None
        and not plugin.value.startswith(("vllm.", "kvtier."))
        and (allowed is None or plugin.name in allowed.split(","))
    }
    return "".join(sorted(found))


def environment_of(variables: Mapping[str, str]) -> str:
    """What these say of how blocks are computed and laid out."""
    said = [f"{name}={variables[name]}" for name in sorted(variables)]
    return " ".join(each for each in said if each.startswith(_ENVIRONMENT)) or "default"


def _additional(config: Any) -> str:
    """What models and platforms read that is in no other configuration; as a digest, because
    anything may stand there."""
    if isinstance(config, Mapping):
        return _digest(json.dumps(config, sort_keys=True, default=str)) if config else "none"
    return str(config.compute_hash())


def _media(config: Any) -> str:
    if config is None:
        return "none"
    settings = {name: getattr(config, name, None) for name in _MEDIA}
    return json.dumps(settings, sort_keys=True, default=str)


def _adapters(config: Any, dtype: object) -> str:
    """How much of LoRA adapters is applied; keys name each by its files."""
    if config is None:
        return "whole"
    said = []
    if config.target_modules is not None:
        said.append(f"only {sorted(config.target_modules)}")
    if config.lora_dtype not in ("auto", dtype):
        said.append(f"as {config.lora_dtype}")
    if config.enable_tower_connector_lora:
        said.append("to images, too")
    said += _chosen(config, _EXPERTS).split()
    return ", ".join(said) or "whole"


def _speculative(vllm_config: Any, weights: str | None) -> str:
    """Which model guesses ahead, and its weights: its blocks are kept beside the other's."""
    config = vllm_config.speculative_config
    if config is None:
        return "none"
    how = _stated(config, "quantization", "kv_cache_dtype", "attention_backend")
    said = f"{config.method} {whole_name(str(config.model))} {how}"
    draft, target = config.draft_model_config, vllm_config.model_config
    if draft is None or (draft.model, draft.revision) == (target.model, target.revision):
        return said
    said += f" {_digest(configuration_of(draft.hf_config))}"
    if weights:
        return f"{said} {draft.revision}"
    load = getattr(config, "draft_load_config", None) or vllm_config.load_config
    return f"{said} {weights_of(draft, load)}"


def _attention(config: Any) -> str:
    """Which backend writes the blocks, where the user chose one; vLLM's own choice follows from
    the other facts, and from the libraries that it finds."""
    chosen = {"all": config.backend, **config.backend_per_kind}
    names = [f"{kind}={backend.name}" for kind, backend in sorted(chosen.items()) if backend]
    found = [f"{name}={version}" for name, version in _versions(_ATTENTION_LIBRARIES)]
    return " ".join([*names, f"index={config.indexer_kv_dtype}", *found]) + _chosen(config, _EXACT)


def _versions(distributions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of these that are installed."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _platform() -> str:
    """On the CPU the order of bytes within a block follows the instruction set: torch names the
    widest it uses, and vLLM asks for more."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        asked = {name: getattr(torch.cpu, f"_is_{name}_supported", bool) for name in _INSTRUCTIONS}
        more = [name for name, supported in asked.items() if supported()]
        widest = torch.backends.cpu.get_cpu_capability()
        return " ".join(["cpu", platform.machine(), widest, *more])
    return str(current_platform.get_device_name())


def check_hash(algorithm: str, *, persistent: bool) -> str | None:
    """A warning about the hash algorithm; raises ConfigError where it cannot work at all."""
    stable = algorithm in _STABLE_HASHES or "PYTHONHASHSEED" in os.environ
    if persistent and not stable:
        raise ConfigError(
            "--prefix-caching-hash-algo",
            f"{algorithm} gives other keys in every process, so nothing kept would be found again",
            "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED, or give every "
            "tier persistence: discard",
        )
    if persistent and algorithm == "sha256":
        return (
            "--prefix-caching-hash-algo sha256 hashes pickles, which may differ for equal "
            "content: use sha256_cbor to find all that is kept"
        )
    return None
