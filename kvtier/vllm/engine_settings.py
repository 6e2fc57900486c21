"""An engine's settings, as vLLM's side of the connector and ours both read them.

The connector calls `settle` before vLLM's own constructor runs. It refuses an engine that cannot be
served, and writes into vLLM's configuration what vLLM's side has to know.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kvtier.config import StackConfig
from kvtier.vllm import unsupported_modes
from kvtier.vllm.hooks import cache_groups, construction
from kvtier.vllm.settings import (
    check_caches,
    check_ranks,
    check_role,
    name_engine,
    read_stack,
    whole_number,
)
from kvtier.vllm.spec import KVTierSpec

logger = logging.getLogger(__name__)

SPEC = {"spec_name": KVTierSpec.__name__, "spec_module_path": KVTierSpec.__module__}
"""Tells vLLM's connector to build our spec."""

_IGNORED = {"sync_load_budget_bytes": "requests wait for their loads"}
"""What vLLM's connector could do, and what is done instead: a load must not fail there."""


def settle(vllm_config: Any, kv_cache_config: Any) -> StackConfig:
    """Refuse an engine that cannot be served, and settle what vLLM's side and ours both read;
    answers with the stack."""
    unsupported_modes.refuse(vllm_config, os.environ)
    for transfer in construction.transfer_configs(vllm_config):
        check_role(transfer.kv_role)
        transfer.kv_load_failure_policy = "recompute"  # a request does not end with its load
    ranks = vllm_config.parallel_config
    check_ranks(ranks.distributed_executor_backend, ranks.world_size, ranks.nnodes_within_dp)
    hisparse = getattr(vllm_config.attention_config, "hisparse_config", None)
    check_caches(hisparse, unsupported_modes.overflows(vllm_config))
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra.update(SPEC)
    name_engine(extra, vllm_config)
    for name, instead in _IGNORED.items():
        if extra.pop(name, 0):
            logger.warning("%s is ignored: %s", name, instead)
    if unsupported_modes.decodes_otherwise(vllm_config) and not extra.get(
        "offload_prompt_only", True
    ):
        logger.warning(
            "offload_prompt_only is true: what this model decodes sees less than in a prompt"
        )
        extra["offload_prompt_only"] = True
    stack = read_stack(extra)
    _set_chunk(extra, stack, vllm_config, kv_cache_config)
    return stack


def _set_chunk(extra: dict[str, Any], stack: StackConfig, vllm_config: Any, kv_cache: Any) -> None:
    """How many of the engine's blocks make one stored block: as the user says, or the stack."""
    tokens = cache_groups.block_tokens(vllm_config, kv_cache)
    asked = [name for name in ("blocks_per_chunk", "block_size") if name in extra]
    if "blocks_per_chunk" in asked:
        blocks = whole_number(extra, "blocks_per_chunk")
    elif asked:
        blocks = whole_number(extra, "block_size") // tokens[0]
    else:
        blocks = stack.chunk_tokens // tokens[0] if len(set(tokens)) == 1 else 1
    most = cache_groups.most_blocks(kv_cache)
    if most is not None and blocks > most:
        for name in asked:
            logger.warning(
                "%s is ignored: of this model, %d is the most that can be kept whole", name, most
            )
            del extra[name]
        asked, blocks = [], most
    if not asked:
        extra["blocks_per_chunk"] = max(1, blocks)
