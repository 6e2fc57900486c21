"""What an engine cannot do as it is configured: what is refused, not kept, or not used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import vllm
from vllm.platforms import current_platform

from kvtier.errors import ConfigError
from kvtier.vllm.hooks import cache_groups
from kvtier.vllm.hooks.versions import numbers_of

_NOT_UNIQUE = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"


def refuse(vllm_config: Any, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for an engine in which something of ours would be lost, or would end it."""
    if vllm_config.parallel_config.enable_fault_tolerance:
        raise ConfigError(
            "--enable-fault-tolerance",
            "an engine that goes on after a step that failed takes for computed what that step was "
            "to compute, and awaits copies of it for ever",
            "leave it out, or serve without kvtier",
        )
    if environment.get(_NOT_UNIQUE, "0") not in ("", "0"):
        raise ConfigError(
            _NOT_UNIQUE,
            "lets a request have the id of one that has just ended; vLLM's offloading takes it for "
            "that one, and the engine ends",
            "unset it, or serve without kvtier",
        )


def to_be_told(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Those of which its user has to know, a sentence each."""
    if prefills_whole_only(vllm_config):
        yield (
            "prompts are computed as a whole only, because this model pools over all tokens, or "
            "vLLM's MLA for this CPU (without AMX) cannot do else: nothing that is kept can be "
            "used here"
        )
    if looks_ahead(kv_cache_config):
        yield (
            "tokens of this model's prompts see those that come later, so that no prompt can begin "
            "with what was computed for another: nothing is kept"
        )
    if returns_experts(vllm_config):
        yield (
            "answers tell by which experts each token was computed, which nobody knows of what was "
            "loaded: nothing that is kept is used here (--enable-return-routed-experts)"
        )
    if awaits_embeddings(vllm_config):
        yield (
            "clients may send embeddings in place of images, and a request that leaves them out "
            "ends the engine: see docs/reference/vllm.md, Embeddings from clients"
        )
    if blurs_adapters(vllm_config):
        yield (
            "of requests without a LoRA adapter nothing is kept: vLLM's operators for CPUs compute "
            "them wrong in a step that has others with one"
        )


def uses_nothing(vllm_config: Any) -> bool:
    """Whether no request can make use of what is kept."""
    return prefills_whole_only(vllm_config) or returns_experts(vllm_config)


def prefills_whole_only(vllm_config: Any) -> bool:
    """Whether the engine cannot compute a prompt from its middle on.

    Models that pool over all tokens of a prompt, or its first, need all of them in one step; vLLM's
    plain MLA for CPUs does not look at the tokens before. vLLM turns its own prefix cache and
    chunked prefill off for both.
    """
    model = vllm_config.model_config
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    blind = bool(current_platform.is_cpu() and model.use_mla and not chunked)
    return blind or not model.is_chunked_prefill_supported


def looks_ahead(kv_cache_config: Any) -> bool:
    """Whether tokens of a prompt see those that come later: what is computed of its beginning is of
    no use to a prompt that goes on otherwise. vLLM turns its own prefix cache off."""
    specs = cache_groups.layer_specs(kv_cache_config)
    return any(getattr(spec, "non_causal", False) for spec in specs)


def decodes_otherwise(vllm_config: Any) -> bool:
    """Whether decoded tokens see less than they would in a prompt (R-SWA): they are not to be found
    there. vLLM turns its own prefix cache off."""
    return vllm_config.model_config.rswa_window is not None


def returns_experts(vllm_config: Any) -> bool:
    """Whether answers tell by which experts each token was computed. Nobody knows that of blocks
    that were loaded, and the engine would end."""
    return bool(vllm_config.aux_output_config.enabled)


def overflows(vllm_config: Any) -> bool:
    """Whether blocks are written beyond their ends: vLLM's operators for CPUs write as wide as they
    compute, whatever was said of the KV cache."""
    narrow = vllm_config.cache_config.cache_dtype in ("float16", "bfloat16")
    return bool(
        current_platform.is_cpu() and narrow and vllm_config.model_config.dtype.itemsize > 2
    )


def awaits_embeddings(vllm_config: Any) -> bool:
    """Whether clients may send embeddings, and leave them out: with another connector beside ours
    that may be meant so."""
    media, embeddings = vllm_config.model_config.multimodal_config, vllm_config.ec_transfer_config
    elsewhere = embeddings is not None and embeddings.is_ec_consumer
    return media is not None and media.allow_missing_mm_embeddings and not elsewhere


def blurs_adapters(vllm_config: Any) -> bool:
    """Whether requests without a LoRA adapter are computed with that of others in the same step:
    vLLM's operators for CPUs take the last of all adapters for none."""
    return bool(current_platform.is_cpu() and vllm_config.lora_config is not None)


def misreads_sessions(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether vLLM may go on with a session from what is not there, and leave that in its own
    prefix cache: 0.31 leaves a block the name that it has by a token which is dropped; of an answer
    that ends amid drafts which were right, versions before 0.33 take for computed what comes next,
    unless they schedule ahead; and states have seen the tokens by then that are dropped."""
    version = numbers_of(vllm.__version__)
    drafts = vllm_config.speculative_config is not None and version < (0, 33)
    ahead = vllm_config.scheduler_config.async_scheduling
    kinds = {type(spec).__name__ for spec in cache_groups.layer_specs(kv_cache_config)}
    states = any("Mamba" in kind for kind in kinds)
    return version < (0, 32) or (drafts and not ahead) or states


def numbers_media(vllm_config: Any) -> bool:
    """Whether vLLM names images and the like by counting them, which says nothing of what they are.

    It does so where neither of its own caches needs to know them again.
    """
    media = vllm_config.model_config.multimodal_config
    caches = vllm_config.cache_config.enable_prefix_caching
    return media is not None and not media.mm_processor_cache_gb and not caches
