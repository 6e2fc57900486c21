"""What vLLM's `--kv-transfer-config` says, and what is settled there before vLLM's own connector is
constructed.

The connector calls `settle` first. It refuses an engine that cannot be served, and writes into
vLLM's configuration what vLLM's side has to know.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from kvtier import config as stack_config
from kvtier.errors import ConfigError
from kvtier.interfaces.backend import backend
from kvtier.settings import Persistence
from kvtier.types import Namespace
from kvtier.vllm.identity import namespace_facts

logger = logging.getLogger(__name__)

SPEC = {"spec_name": "KVTierSpec", "spec_module_path": "kvtier.vllm.spec"}
"""Tells vLLM's connector to build kvtier's spec."""
_SETTINGS = (
    "stack",
    "blocks_per_chunk",
    "block_size",
    "weights",
    "offload_prompt_only",
    "canonical_layout",
    "kv_events_by_tier",
    "self_describing_kv_events",
)
"""kvtier's, and those of vLLM's offloading connector that do not belong to a tier."""
_ENGINE, _ALONE, _NAMESPACE = "kvtier_engine", "kvtier_alone", "kvtier_namespace"
_STACK, _ACROSS, _COPIES = "kvtier_stack", "kvtier_across_degrees", "kvtier_copies"
_WRITTEN = (*SPEC, _NAMESPACE, _ENGINE, _ALONE, _STACK, _ACROSS, _COPIES)
"""What the connector writes there itself."""
_IGNORED = {"sync_load_budget_bytes": "requests wait for their loads"}
"""What vLLM's connector could do, and what is done instead: a load must not fail there."""


def settle(vllm_config: Any, kv_cache_config: Any) -> stack_config.StackConfig:
    """Refuse an engine that cannot be served, and settle what vLLM's side and kvtier's both read.
    Returns the stack."""
    from kvtier.vllm import unsupported_modes
    from kvtier.vllm.hooks import cache_groups, config

    transfers = config.transfer_configs(vllm_config)
    unsupported_modes.refuse(vllm_config, kv_cache_config, transfers, os.environ)
    for transfer in transfers:
        transfer.kv_load_failure_policy = "recompute"  # a request does not end with its load
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra.update(SPEC)
    extra[_ENGINE] = str(vllm_config.kv_transfer_config.engine_id)
    extra[_ALONE] = vllm_config.parallel_config.distributed_executor_backend == "uni"
    for name, instead in _IGNORED.items():
        if extra.pop(name, 0):
            logger.warning("%s is ignored: %s", name, instead)
    stack = read_stack(extra)
    extra[_ACROSS] = (
        stack.across_degrees and cache_groups.bound_to_degree(vllm_config, kv_cache_config) is None
    )
    extra[_COPIES] = cache_groups.copies_of_shares(
        vllm_config, kv_cache_config, any_degree=extra[_ACROSS]
    )
    tokens = cache_groups.block_tokens(vllm_config, kv_cache_config)
    _set_chunk(extra, stack.chunk_tokens, tokens, cache_groups.most_blocks(kv_cache_config))
    return stack


def _set_chunk(extra: dict[str, Any], wanted: int, tokens: list[int], most: int | None) -> None:
    """Set how many of the engine's blocks make a chunk: what the user says, or `wanted` tokens."""
    asked = [name for name in ("blocks_per_chunk", "block_size") if name in extra]
    if "blocks_per_chunk" in asked:
        blocks = whole_number(extra, "blocks_per_chunk")
    elif asked:
        blocks = whole_number(extra, "block_size") // tokens[0]
    else:
        blocks = wanted // tokens[0] if len(set(tokens)) == 1 else 1
    if most is not None and blocks > most:
        for name in asked:
            logger.warning(
                "%s is ignored: of this model, %d is the most that can be kept whole", name, most
            )
            del extra[name]
        asked, blocks = [], most
    if not asked:
        extra["blocks_per_chunk"] = max(1, blocks)


def whole_number(extra: Mapping[str, Any], name: str) -> int:
    """A setting that vLLM reads as a number, too; raises ConfigError if it is none."""
    try:
        return int(extra[name])
    except (TypeError, ValueError):
        raise ConfigError(
            f"kv_connector_extra_config.{name}", f"is {extra[name]!r}", "give a whole number"
        ) from None


def read_stack(extra: MutableMapping[str, Any]) -> stack_config.StackConfig:
    """The stack that `kv_connector_extra_config` names: a YAML file, or the same inline.

    A process reads it once: all parts of an engine see one stack, whatever becomes of the file.
    """
    read: stack_config.StackConfig | None = extra.get(_STACK)
    if read is not None:
        return read
    source = extra.get("stack")
    if not isinstance(source, str | Mapping):
        raise ConfigError(
            "kv_connector_extra_config.stack",
            "is missing" if source is None else f"is {source!r}",
            "give the path of a stack's YAML file, or its content as JSON",
        )
    extra[_STACK] = stack_config.load(source)
    return read_stack(extra)


def check_first_tier(stack: stack_config.StackConfig) -> None:
    """Refuse a stack whose first tier the engine's memory cannot be copied to and from."""
    first = stack.tiers[0].kind
    if not backend(first).mapped:
        raise ConfigError(
            "$.tiers[0].kind",
            f"is {first}, which the engine's workers cannot reach",
            "put a tier of kind cpu first",
        )


def engine_name(stack: stack_config.StackConfig, parallel: Any) -> str | None:
    """The name of a data-parallel rank's engine; None for the stack's own."""
    index = parallel.data_parallel_index
    # Of a dense model each rank is told that there is no other; its index it keeps.
    several = parallel.data_parallel_size > 1 or index > 0
    return f"{stack.name}-dp{index}" if several else None


def hash_warning(vllm_config: Any, stack: stack_config.StackConfig) -> str | None:
    """A warning about the hash algorithm; raises ConfigError where nothing kept would be found."""
    persistent = any(
        getattr(tier, "persistence", Persistence.KEEP) is Persistence.KEEP for tier in stack.tiers
    )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return namespace_facts.check_hash(algorithm, persistent=persistent)


def write_namespace(extra: dict[str, Any], namespace: Namespace) -> None:
    """Hand the engine's namespace on to the spec."""
    extra[_NAMESPACE] = namespace.to_json().decode()


def read_flag(extra: Mapping[str, Any], name: str) -> bool:
    """A setting that is true or false, and false if it is not there."""
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(
            f"kv_connector_extra_config.{name}", f"is {value!r}", "give true or false"
        )
    return value


def read_namespace(extra: Mapping[str, Any]) -> Namespace:
    """What `write_namespace` wrote."""
    try:
        return Namespace.from_json(extra[_NAMESPACE].encode())
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(_NAMESPACE, f"cannot be read: {error}") from error


def read_engine(extra: Mapping[str, Any]) -> tuple[str, bool]:
    """Which engine scheduler and workers are of, and whether they are one process."""
    return str(extra.get(_ENGINE, "")), bool(extra.get(_ALONE, False))


def crosses_degrees(extra: Mapping[str, Any]) -> bool:
    """Whether engines of other tensor-parallel sizes share this one's namespace."""
    return bool(extra.get(_ACROSS, False))


def read_copies(extra: Mapping[str, Any]) -> int:
    """How many ranks hold the same share of every block."""
    return int(extra.get(_COPIES, 1))


def unread(extra: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that nobody will read."""
    said = []
    for name in extra:
        if name not in (*_SETTINGS, *_WRITTEN):
            near = difflib.get_close_matches(name, _SETTINGS, 1)
            hint = f'did you mean "{near[0]}"?' if near else "tiers are set in the stack"
            said.append(f"kv_connector_extra_config.{name} is not known, and ignored: {hint}")
    return said
