"""What vLLM's engine core is told, and tells no connector.

Weights that are read into a running engine make all that is kept another model's; and what is to be
known of an adapter's files is how they are when the engine reads them, which may be long before the
first request with it comes. And an engine that tolerates faults goes on after a step that failed:
it takes for computed what that step was to compute, in its own cache, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from kvtier.vllm.guard import guarded

_WEIGHTS = (
    *("weight", "param", "state_dict", "load_state", "bucket"),
    *("checkpoint", "ckpt", "load_model", "update_model"),
)
"""How calls name weights: TRL's `update_named_param`, say, and ROLL's `broadcast_bucket`."""
_READS = {
    *("compute", "get", "check", "init", "initialize", "shutdown", "list", "save", "report"),
    *("verify", "log", "supports"),
}
"""The first words of names of calls that speak of weights, and do not change them."""
_OTHERS = ("checkpoint_prepare", "checkpoint_restore")
"""What vLLM calls around a checkpoint of its processes, which has the weights as they are."""


@functools.cache
def listen() -> None:
    """Let engine cores in this process tell our connectors, once."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel

    call, add, remove = EngineCore.collective_rpc, EngineCore.add_lora, EngineCore.remove_lora

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return call(core, method, *arguments, **named)
        finally:  # it may have failed halfway
            if changes_weights(method):
                for connector in _connectors(core):
                    connector.weights_changed()

    @functools.wraps(add)
    def add_lora(core: Any, lora_request: Any) -> Any:
        for connector in _connectors(core):
            connector.reads_adapter(lora_request)
        return add(core, lora_request)

    @functools.wraps(remove)
    def remove_lora(core: Any, lora_id: int) -> Any:
        for connector in _connectors(core):
            connector.lets_go_of_adapter(lora_id)
        return remove(core, lora_id)

    reset, on_fault = EngineCore.reset_prefix_cache, EngineCoreSentinel.on_fault

    @functools.wraps(reset)
    def reset_prefix_cache(core: Any, *arguments: Any, **named: Any) -> Any:
        done = reset(core, *arguments, **named)
        for connector in _connectors(core) if done else ():
            connector.engine_forgot()
        return done

    clear = EngineCore._reset_caches

    @functools.wraps(clear)
    def clear_caches(core: Any, *arguments: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as pausing:
            for connector in _connectors(core):
                pausing.enter_context(connector.connector_scheduler.manager.pausing())
            return clear(core, *arguments, **named)

    @functools.wraps(on_fault)
    def go_on(sentinel: Any, exc: Exception) -> None:
        on_fault(sentinel, exc)
        told = list(_connectors(sentinel.engine))
        for connector in told:
            connector.step_failed()
        if told and _forget_steps(sentinel.engine.scheduler):
            for connector in told:
                connector.engine_forgot()

    EngineCoreSentinel.on_fault = go_on
    EngineCore.collective_rpc, EngineCore.reset_prefix_cache = collective_rpc, reset_prefix_cache
    EngineCore.add_lora, EngineCore.remove_lora = add_lora, remove_lora
    EngineCore._reset_caches = clear_caches


def changes_weights(method: Any) -> bool:
    """Whether workers are called to take other weights, as far as the name of the call tells: one
    of vLLM's, or what others have added to its workers."""
    called = getattr(method, "func", method)  # of a partial
    name = (called if isinstance(called, str) else getattr(called, "__name__", "")).lower()
    speaks = any(word in name for word in _WEIGHTS)
    return speaks and name not in _OTHERS and name.lstrip("_").split("_")[0] not in _READS


@guarded(lambda: False)
def _forget_steps(scheduler: Any) -> bool:
    """Empty the prefix cache of a scheduler whose steps under way were dropped, also of blocks that
    loads hold yet: vLLM's own reset is refused then. And let it not await these steps, until whose
    end it holds back blocks that they may write to: it would have fewer for good, and refuse all
    resets. Nobody gets such a block before the workers have been told to go on, and wait for their
    devices.
    """
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()
    return True


def _connectors(core: Any) -> Iterator[Any]:
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for each in getattr(connector, "_connectors", [connector]):
        if hasattr(each, "weights_changed"):
            yield each
