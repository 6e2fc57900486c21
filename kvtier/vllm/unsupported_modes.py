"""What an engine cannot do as it is configured: what is refused at start, and what is not kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import vllm
from vllm.platforms import current_platform

from kvtier.errors import ConfigError
from kvtier.vllm.hooks import cache_groups
from kvtier.vllm.hooks.versions import numbers_of

_NOT_UNIQUE = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
_WITHOUT = "leave it out, or serve without kvtier"


class _Refusal(NamedTuple):
    """One mode: the setting by which it is chosen, why it is refused, and what to do."""

    applies: bool
    setting: str
    reason: str
    hint: str = _WITHOUT


def refuse(
    vllm_config: Any,
    kv_cache_config: Any,
    transfers: Sequence[Any],
    environment: Mapping[str, str],
) -> None:
    """Raise ConfigError for an engine in which blocks would be lost or wrong, or would end it.
    `transfers` are the transfer configurations of kvtier's connector and of the one above it."""
    for each in itertools.chain(
        _of_processes(vllm_config.parallel_config, transfers, environment),
        _of_caches(vllm_config),
        _of_models(vllm_config, kv_cache_config),
    ):
        if each.applies:
            raise ConfigError(each.setting, each.reason, each.hint)


def _of_processes(
    ranks: Any, transfers: Sequence[Any], environment: Mapping[str, str]
) -> Iterator[_Refusal]:
    machines = ranks.nnodes_within_dp
    yield _Refusal(
        environment.get(_NOT_UNIQUE, "0") not in ("", "0"),
        _NOT_UNIQUE,
        "lets a request have the id of one that has just ended; vLLM's offloading takes it for "
        "that one, and the engine ends",
        "unset it, or serve without kvtier",
    )
    yield _Refusal(
        any(each.kv_role == "kv_producer" for each in transfers),
        "kv_transfer_config.kv_role",
        "an engine that only stores is not supported: vLLM gives its blocks to others while steps "
        "still write to them",
        'write "kv_both"',
    )
    yield _Refusal(
        ranks.enable_fault_tolerance,
        "--enable-fault-tolerance",
        "an engine that goes on after a step that failed takes for computed what that step was to "
        "compute, and awaits copies of it for ever",
    )
    yield _Refusal(
        ranks.world_size > 1 and _is_launched_by_rank(ranks.distributed_executor_backend),
        "distributed_executor_backend",
        "with external_launcher (torchrun) each rank has a scheduler of its own, and all must "
        "decide alike in each step; the end of a load is not the same step for all",
        'write "mp", or serve without kvtier',
    )
    yield _Refusal(
        machines > 1,
        "nnodes",
        f"ranks of one engine on {machines} machines have no CPU memory in common",
        "keep the ranks of each engine on one machine (data parallel ranks may be on others)",
    )
    yield _Refusal(
        ranks.decode_context_parallel_size > 1
        and transfers[-1].has_connector("NixlConnector")
        and numbers_of(vllm.__version__) < (0, 33),
        "--decode-context-parallel-size",
        "beside NixlConnector, workers of vLLM 0.32 change how ranks share a context, and tell "
        "their scheduler nothing of it",
        "install vLLM 0.33, or leave one of the two out",
    )


def _is_launched_by_rank(executor: object) -> bool:
    if isinstance(executor, type):  # one's own
        return any(each.__name__ == "ExecutorWithExternalLauncher" for each in executor.__mro__)
    return executor == "external_launcher"


def _of_caches(vllm_config: Any) -> Iterator[_Refusal]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    media = model.multimodal_config
    yield _Refusal(
        current_platform.is_cpu()
        and cache.cache_dtype in ("float16", "bfloat16")
        and model.dtype.itemsize > 2,
        "--kv-cache-dtype",
        "on a CPU a model in 32 bits writes 32 bits all the same, so that each block lies across "
        "others, and the last ones beyond the KV cache's end",
        "leave it out, or take --dtype bfloat16",
    )
    yield _Refusal(
        cache.cache_dtype.endswith("per_token_head"),
        "--kv-cache-dtype",
        "such layers set the scales in their blocks when they first compute something, and would "
        "overwrite those of blocks that were loaded before",
        "take fp8, or leave it out",
    )
    yield _Refusal(
        vllm_config.attention_config.hisparse_config is not None,
        "attention_config.hisparse_config",
        "with HiSparse the KV cache is in vLLM's own host memory, which kvtier does not know",
    )
    yield _Refusal(
        media is not None and not media.mm_processor_cache_gb and not cache.enable_prefix_caching,
        "--mm-processor-cache-gb",
        "with neither a cache for processed images nor one for prefixes, vLLM only counts images, "
        "so that equal numbers do not mean equal images",
        "leave it out, or leave vLLM's prefix caching on",
    )


def _of_models(vllm_config: Any, kv_cache_config: Any) -> Iterator[_Refusal]:
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    yield _Refusal(
        not model.is_chunked_prefill_supported,
        "--model",
        "this model computes prompts as a whole only (because it pools over all tokens, say), so "
        "that nothing that is kept could be used",
        "serve without kvtier",
    )
    specs = cache_groups.layer_specs(kv_cache_config)
    yield _Refusal(
        any(getattr(spec, "non_causal", False) for spec in specs),
        "--model",
        "tokens of this model's prompts attend to later ones, so that no prompt can begin with "
        "what was computed for another",
        "serve without kvtier",
    )
    yield _Refusal(
        bool(vllm_config.aux_output_config.enabled),
        "--enable-return-routed-experts",
        "answers tell by which experts each token was computed, which nobody knows of a token that "
        "was loaded",
    )
    yield _Refusal(
        model.rswa_window is not None
        and not transfer.kv_connector_extra_config.get("offload_prompt_only", True),
        "kv_connector_extra_config.offload_prompt_only",
        "tokens that this model decodes attend to fewer others than they would in a prompt",
        "leave it out: prompts are kept",
    )


def warnings(vllm_config: Any) -> Iterator[str]:
    """What an engine's user has to know of what is not kept or not prevented, a sentence each."""
    if computes_whole_prompts(vllm_config):
        yield (
            "prompts are computed as a whole only, because vLLM's MLA for this CPU (without AMX) "
            "cannot do else: nothing that is kept can be used here"
        )
    if _allows_missing_embeddings(vllm_config):
        yield (
            "clients may send embeddings in place of images, and a request that leaves them out "
            "ends the engine: see docs/reference/vllm.md, Embeddings from clients"
        )
    if mixes_adapters(vllm_config):
        yield (
            "of requests without a LoRA adapter nothing is kept: vLLM's operators for CPUs compute "
            "them wrong in a step that has others with one"
        )


def computes_whole_prompts(vllm_config: Any) -> bool:
    """Whether the engine cannot compute a prompt from its middle on: vLLM's plain MLA for CPUs does
    not look at the tokens before, and vLLM turns its own prefix cache off."""
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    return bool(current_platform.is_cpu() and vllm_config.model_config.use_mla and not chunked)


def mixes_adapters(vllm_config: Any) -> bool:
    """Whether requests without a LoRA adapter are computed with that of others in the same step:
    vLLM's operators for CPUs take the last of all adapters for none."""
    return bool(current_platform.is_cpu() and vllm_config.lora_config is not None)


def misreads_sessions(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a session may leave wrong blocks in vLLM's own prefix cache. States have seen tokens
    of an answer that are dropped before the session goes on. And where an answer ends amid drafts
    that were right, 0.32 may take for computed what comes next."""
    specs = cache_groups.layer_specs(kv_cache_config)
    return vllm_config.speculative_config is not None or any(map(cache_groups.is_recurrent, specs))


def _allows_missing_embeddings(vllm_config: Any) -> bool:
    """Whether clients may send embeddings, and leave them out: with another connector beside
    kvtier's that may be meant so."""
    media, embeddings = vllm_config.model_config.multimodal_config, vllm_config.ec_transfer_config
    elsewhere = embeddings is not None and embeddings.is_ec_consumer
    return media is not None and media.allow_missing_mm_embeddings and not elsewhere
