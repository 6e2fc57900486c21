"""What vLLM's engine core and its scheduler are told, and tell no connector.

Weights that are read into a running engine make all that is kept another model's; what is to be
known of an adapter's files is how they are when the engine reads them, which may be long before
the first request with it comes; and an engine that is paused waits until its connector has nothing
under way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

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
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    for owner, name, tells in (
        (EngineCore, "collective_rpc", _calls_workers),
        (EngineCore, "add_lora", _reads_adapter),
        (EngineCore, "remove_lora", _removes_adapter),
        (EngineCore, "reset_prefix_cache", _resets),
        (EngineCore, "_reset_caches", _clears),
        (Scheduler, "set_pause_state", _pauses),
    ):
        wrap(owner, name, tells)


Call = Callable[..., Any]


def wrap(owner: type, name: str, tells: Callable[..., Any]) -> None:
    """Let this be called instead of a class's method, with what calls that in front."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def told(owner: Any, *arguments: Any, **named: Any) -> Any:
        done = functools.partial(call, owner, *arguments, **named)
        return tells(done, owner, *arguments, **named)

    setattr(owner, name, told)


def _calls_workers(call: Call, core: Any, method: Any, *_: Any, **__: Any) -> Any:
    try:
        return call()
    finally:  # it may have failed halfway
        if changes_weights(method):
            for connector in connectors_of(core):
                connector.weights_changed()


def _reads_adapter(call: Call, core: Any, lora_request: Any) -> Any:
    for connector in connectors_of(core):
        connector.reads_adapter(lora_request)
    return call()


def _removes_adapter(call: Call, core: Any, lora_id: int) -> Any:
    for connector in connectors_of(core):
        connector.lets_go_of_adapter(lora_id)
    return call()


def _resets(call: Call, core: Any, *_: Any, **__: Any) -> Any:
    done = call()
    for connector in connectors_of(core) if done else ():
        connector.engine_forgot()
    return done


def _clears(call: Call, core: Any, *_: Any, **__: Any) -> Any:
    with contextlib.ExitStack() as pausing:
        for connector in connectors_of(core):
            pausing.enter_context(connector.connector_scheduler.manager.pausing())
        return call()


def _pauses(call: Call, scheduler: Any, pause_state: Any) -> Any:
    done = call()
    for connector in _beside(scheduler):
        connector.paused = pause_state.name != "UNPAUSED"
    return done


def changes_weights(method: Any) -> bool:
    """Whether workers are called to take other weights, as far as the name of the call tells: one
    of vLLM's, or what others have added to its workers."""
    called = getattr(method, "func", method)  # of a partial
    name = (called if isinstance(called, str) else getattr(called, "__name__", "")).lower()
    speaks = any(word in name for word in _WEIGHTS)
    return speaks and name not in _OTHERS and name.lstrip("_").split("_")[0] not in _READS


def connectors_of(core: Any) -> Iterator[Any]:
    """Those of ours that an engine core has, alone or below a MultiConnector."""
    return _beside(getattr(core, "scheduler", None))


def _beside(scheduler: Any) -> Iterator[Any]:
    connector = getattr(scheduler, "connector", None)
    for each in getattr(connector, "sub_connectors", [connector]):
        if hasattr(each, "weights_changed"):
            yield each
