"""vLLM's engine core: what it is told and tells no connector, and how it ends.

- Weights that are read into a running engine make all that is kept another model's. An adapter's
  files must be known as they are when the engine reads them, which may be long before the first
  request with it. An engine that is paused waits until its connector has nothing under way.
- An engine that is told to end steps on as long as its connector has work. Without a limit it would
  write all that waits for a slow disk, and be killed amid that when `--shutdown-timeout` is over.
  So it drains for a while, and its connector then has no more work. Requests that would run until
  the kill are aborted in time for an orderly end, as vLLM does without such a timeout.
- An engine without a process of its own is stepped by its caller, and only as long as there are
  requests: what the last of them store would stay on the device.
- At its end, Python looks through all objects for cycles that nobody needs any more: 2.3 s of
  processor time in each of vLLM's processes, one after the other. The system frees them anyway.
- vLLM's engine does not notice when the process that started it is killed
  (https://github.com/vllm-project/vllm/issues/55510). It would stay, with the device's memory and
  the blocks in CPU memory, which have one owner.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

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
_CLOSING_S = 6.0
"""What vLLM's workers and the tiers take to close where processors are busy."""
_ENGINE = "EngineCore"
"""What vLLM calls its engines' processes. Elsewhere an engine shares its caller's process."""
_ORPHAN_CLOSING_S = 30.0

Call = Callable[..., Any]


@functools.cache
def install() -> None:
    """Let the engine cores of this process call kvtier's connectors; once."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine

    for owner, name, instead in (
        (EngineCore, "collective_rpc", _collective_rpc),
        (EngineCore, "add_lora", _add_lora),
        (EngineCore, "remove_lora", _remove_lora),
        (EngineCore, "reset_prefix_cache", _reset_prefix_cache),
        (EngineCore, "_reset_caches", _reset_caches),
        (Scheduler, "set_pause_state", _set_pause_state),
        (EngineCoreProc, "_handle_shutdown", _handle_shutdown),
        (LLMEngine, "has_unfinished_requests", _has_unfinished_requests),
    ):
        _wrap(owner, name, instead)


def _wrap(owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Call this instead of a class's method, with the method in front of its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(owner: Any, *arguments: Any, **named: Any) -> Any:
        call = functools.partial(method, owner, *arguments, **named)
        return instead(call, owner, *arguments, **named)

    setattr(owner, name, wrapped)


def connectors_of(core: Any) -> Iterator[Any]:
    """kvtier's connectors of an engine core, alone or below a MultiConnector."""
    return _connectors(getattr(core, "scheduler", None))


def _connectors(scheduler: Any) -> Iterator[Any]:
    return (each for each in _all_connectors(scheduler) if hasattr(each, "weights_changed"))


def _all_connectors(scheduler: Any) -> Iterable[Any]:
    connector = getattr(scheduler, "connector", None)
    found: Iterable[Any] = getattr(connector, "sub_connectors", [connector])
    return found


def secondary_tiers_of(core: Any) -> Iterator[Any]:
    """kvtier's tiers below vLLM's own CPU tier, of an engine core."""
    for each in _all_connectors(getattr(core, "scheduler", None)):
        manager = getattr(getattr(each, "connector_scheduler", None), "manager", None)
        for tier in getattr(manager, "secondary_tiers", ()):
            if hasattr(tier, "weights_changed"):
                yield tier


# -- weights, adapters, resets, pauses -------------------------------------------------------------


def _collective_rpc(call: Call, core: Any, method: Any, *_: Any, **__: Any) -> Any:
    try:
        return call()
    finally:  # it may have failed halfway
        if changes_weights(method):
            for each in (*connectors_of(core), *secondary_tiers_of(core)):
                each.weights_changed()


def changes_weights(method: Any) -> bool:
    """Whether workers are called to take other weights, as far as the name of the call says: one of
    vLLM's, or what others have added to its workers."""
    called = getattr(method, "func", method)  # of a partial
    name = (called if isinstance(called, str) else getattr(called, "__name__", "")).lower()
    speaks = any(word in name for word in _WEIGHTS)
    return speaks and name not in _OTHERS and name.lstrip("_").split("_")[0] not in _READS


def _add_lora(call: Call, core: Any, lora_request: Any) -> Any:
    for connector in connectors_of(core):
        connector.connector_scheduler.manager.adapters.read(lora_request)
    return call()


def _remove_lora(call: Call, core: Any, lora_id: int) -> Any:
    for connector in connectors_of(core):
        connector.connector_scheduler.manager.adapters.removed(lora_id)
    return call()


def _reset_prefix_cache(call: Call, core: Any, *_: Any, **__: Any) -> Any:
    done = call()
    for connector in connectors_of(core) if done else ():
        connector.engine_cache_reset()
    return done


def _reset_caches(call: Call, core: Any, *_: Any, **__: Any) -> Any:
    with contextlib.ExitStack() as pausing:
        for connector in connectors_of(core):
            pausing.enter_context(connector.connector_scheduler.manager.pausing())
        return call()


def _set_pause_state(call: Call, scheduler: Any, pause_state: Any) -> Any:
    done = call()
    for connector in _connectors(scheduler):
        connector.paused = pause_state.name != "UNPAUSED"
    return done


# -- the end ---------------------------------------------------------------------------------------


class Ending:
    """How long ago an engine was told to end, as its connector knows it."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._drain_s = drain_s
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """The engine is told to end; it may be told so again."""
        if self._since is None:
            self._since = self._clock()

    def _lasts(self, seconds: float) -> bool:
        return self._since is not None and self._clock() - self._since >= seconds

    @property
    def drained(self) -> bool:
        """Whether what waits to be written is left to the next engine."""
        return self._lasts(self._drain_s)

    def must_close(self, timeout_s: float) -> bool:
        """Whether an engine that is killed after so long has to close now."""
        return self._lasts(max(timeout_s - _CLOSING_S, timeout_s / 2))


@functools.cache
def end_without_garbage_collection() -> None:
    """Spare this process the look at all of its objects when it has closed everything."""
    atexit.register(gc.freeze)


def _handle_shutdown(call: Callable[[], bool], core: Any) -> bool:
    if not core.is_running():
        endings = [connector.ending for connector in connectors_of(core)]
        for each in endings:
            each.begin()
        timeout_s = core.vllm_config.shutdown_timeout
        if any(each.must_close(timeout_s) for each in endings):
            _abort(core)
    return call()


def _abort(core: Any) -> None:
    from vllm.v1.request import RequestStatus

    if core.scheduler.get_num_unfinished_requests():
        aborted = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        core._send_abort_outputs(aborted)


def _has_unfinished_requests(call: Callable[[], bool], engine: Any) -> bool:
    unfinished = call()
    core = getattr(engine.engine_core, "engine_core", None)  # of an engine in this process
    for connector in connectors_of(core):
        unfinished |= connector.needs_step(unfinished)
    return unfinished


# -- processes -------------------------------------------------------------------------------------


def has_own_process() -> bool:
    """Whether this process is an engine's; else the engine shares that of its caller, and steps
    without a pause while it only waits."""
    return multiprocessing.current_process().name.startswith(_ENGINE)


def end_with_parent() -> None:
    """Close this process, if it is an engine's, when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None and has_own_process():
        threading.Thread(
            target=_await_end, args=(parent,), name="kvtier-parent", daemon=True
        ).start()


def _await_end(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    logger.warning("the server that started this engine is gone: the engine closes, too")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_ORPHAN_CLOSING_S)
    os.kill(os.getpid(), signal.SIGKILL)
