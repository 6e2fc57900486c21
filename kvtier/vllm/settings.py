"""What vLLM's `--kv-transfer-config` says."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from kvtier import config as stack_config
from kvtier.errors import ConfigError
from kvtier.types import Namespace

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
"""Ours, and those of vLLM's offloading connector that do not belong to a tier."""
_ENGINE, _ALONE, _STACK = "kvtier_engine", "kvtier_alone", "kvtier_stack"
_OURS = ("spec_name", "spec_module_path", "kvtier_namespace", _ENGINE, _ALONE, _STACK)
"""What the connector writes there itself."""


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


def check_role(role: str | None) -> None:
    """Raise ConfigError for an engine that only stores: vLLM then gives blocks to others while
    steps that write to them are still under way."""
    if role == "kv_producer":
        raise ConfigError(
            "kv_transfer_config.kv_role",
            "an engine that only stores is not supported",
            'write "kv_both"',
        )


def check_ranks(executor: object, ranks: int, machines: int) -> None:
    """Raise ConfigError for ranks of one engine that cannot have one scheduler and one memory."""
    if ranks > 1 and _launched_apart(executor):
        raise ConfigError(
            "distributed_executor_backend",
            "with external_launcher (torchrun) each rank has a scheduler of its own, and all must "
            "decide alike in each step; the end of a load is not the same step for all",
            'write "mp", or serve without kvtier',
        )
    if machines > 1:
        raise ConfigError(
            "nnodes",
            f"ranks of one engine on {machines} machines have no CPU memory in common",
            "keep the ranks of each engine on one machine (data parallel ranks may be on others)",
        )


def check_caches(hisparse: object, overflows: bool) -> None:
    """Raise ConfigError where blocks of the engine's are not where its tensors say."""
    if overflows:
        raise ConfigError(
            "--kv-cache-dtype",
            "on a CPU a model in 32 bits writes 32 bits all the same, so that each block lies "
            "across others, and the last ones beyond the KV cache's end",
            "leave it out, or take --dtype bfloat16",
        )
    if hisparse is not None:
        raise ConfigError(
            "attention_config.hisparse_config",
            "with HiSparse the KV cache is in vLLM's own host memory, which kvtier does not know",
            "leave it out, or serve without kvtier",
        )


def _launched_apart(executor: object) -> bool:
    if isinstance(executor, type):  # one's own
        return any(each.__name__ == "ExecutorWithExternalLauncher" for each in executor.__mro__)
    return executor == "external_launcher"


def whole_number(extra: Mapping[str, Any], name: str) -> int:
    """A setting that vLLM reads as a number, too; raises ConfigError if it is none."""
    try:
        return int(extra[name])
    except (TypeError, ValueError):
        raise ConfigError(
            f"kv_connector_extra_config.{name}", f"is {extra[name]!r}", "give a whole number"
        ) from None


def read_flag(extra: Mapping[str, Any], name: str) -> bool:
    """A setting that is true or false, and false if it is not there."""
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(
            f"kv_connector_extra_config.{name}", f"is {value!r}", "give true or false"
        )
    return value


def read_namespace(extra: Mapping[str, Any]) -> Namespace:
    """What `_introduce` wrote."""
    try:
        return Namespace.from_json(extra["kvtier_namespace"].encode())
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError("kvtier_namespace", f"cannot be read: {error}") from error


def name_engine(extra: dict[str, Any], vllm_config: Any) -> None:
    """Let scheduler and workers know which engine they are of, and whether they are one process."""
    extra[_ENGINE] = str(vllm_config.kv_transfer_config.engine_id)
    extra[_ALONE] = vllm_config.parallel_config.distributed_executor_backend == "uni"


def read_engine(extra: Mapping[str, Any]) -> tuple[str, bool]:
    """What `name_engine` wrote."""
    return str(extra.get(_ENGINE, "")), bool(extra.get(_ALONE, False))


def unread(extra: Mapping[str, Any]) -> list[str]:
    """What to say of settings that nobody will read."""
    said = []
    for name in extra:
        if name not in (*_SETTINGS, *_OURS):
            near = difflib.get_close_matches(name, _SETTINGS, 1)
            hint = f'did you mean "{near[0]}"?' if near else "tiers are set in the stack"
            said.append(f"kv_connector_extra_config.{name} is not known, and ignored: {hint}")
    return said
