"""Who constructs a connector: an engine, its scheduler, MultiConnectors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


def transfer_configs(vllm_config: Any) -> list[Any]:
    """What is set for a connector, and for each MultiConnector above it: vLLM goes by the first.

    They give their connectors copies, and the scheduler reads the policy in the original.
    """
    above = [config for maker, config in _makers() if isinstance(maker, MultiConnector)]
    return [config.kv_transfer_config for config in [vllm_config, *above]]


def deals_out_blocks(vllm_config: Any) -> bool:
    """Whether workers will let the ranks that share a context take turns at whole blocks of it: in
    0.31 and 0.32 they do beside vLLM's Nixl, unless something else was said, and tell nobody."""
    ranks, first = vllm_config.parallel_config, transfer_configs(vllm_config)[-1]
    return (
        ranks.decode_context_parallel_size != 1
        and ranks._allow_auto_resolve_cp_interleave_size
        and first is not None
        and first.has_connector("NixlConnector")
    )


def pausing() -> Callable[[], bool]:
    """Tells whether the scheduler that is constructing this connector is paused."""
    found = [maker for maker, _ in _makers() if hasattr(type(maker), "pause_state")]
    scheduler = weakref.ref(found[0]) if found else lambda: None

    def paused() -> bool:
        alive = scheduler()
        return alive is not None and alive.pause_state.name != "UNPAUSED"

    return paused


def spins() -> bool:
    """Whether the engine that is constructing this connector steps without a pause while it only
    waits, as the one within its caller's process does."""
    cores = [type(maker) for maker, _ in _makers() if hasattr(type(maker), "post_step")]
    return bool(cores) and not any(hasattr(core, "run_busy_loop") for core in cores)


def _makers() -> Iterator[tuple[Any, Any]]:
    """Whoever is being constructed from a configuration now, the innermost first."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        names = frame.f_locals
        if frame.f_code.co_name == "__init__" and "vllm_config" in names and "self" in names:
            yield names["self"], names["vllm_config"]
