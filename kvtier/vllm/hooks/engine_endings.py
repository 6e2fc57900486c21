"""How vLLM's engines end, and when one that its caller steps has come to rest.

An engine that is told to end steps on as long as its connector has work. Without a limit it would
write down all that waits for a slow disk, and be killed amid that when `--shutdown-timeout` is
over. So it drains for a while, its connector then has no more work, and it closes in order.
Requests that would run until the kill are aborted in time for that, as vLLM does without such a
timeout.

An engine without a process of its own is stepped by who calls it, as long as requests are there:
what the last of them store would stay on the device.

The client of an engine that has ended wakes the task that reads answers with an EngineDeadError,
and ends it: which comes first is left to chance, and the one is a traceback in the log.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from kvtier.vllm.hooks.engine_calls import connectors_of, wrap

_CLOSING_S = 6.0
"""What vLLM's workers and the tiers take to close where processors are busy."""
_READER = "kvtier_reader"


class Ending:
    """What a connector knows of its engine's end."""

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

    def presses(self, timeout_s: float) -> bool:
        """Whether an engine that is killed after so long has to close now."""
        return self._lasts(max(timeout_s - _CLOSING_S, timeout_s / 2))


@functools.cache
def listen() -> None:
    """Let engines in this process tell our connectors of their end, once."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine

    wrap(EngineCoreProc, "_handle_shutdown", _goes_on)
    wrap(LLMEngine, "has_unfinished_requests", _has_unfinished)


def _goes_on(call: Callable[[], bool], core: Any) -> bool:
    if not core.is_running():
        endings = [connector.ending for connector in connectors_of(core)]
        for ending in endings:
            ending.begin()
        timeout_s = core.vllm_config.shutdown_timeout
        if any(ending.presses(timeout_s) for ending in endings):
            _abort(core)
    return call()


def _abort(core: Any) -> None:
    from vllm.v1.request import RequestStatus

    if core.scheduler.get_num_unfinished_requests():
        aborted = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        core._send_abort_outputs(aborted)


def _has_unfinished(call: Callable[[], bool], engine: Any) -> bool:
    unfinished = call()
    core = getattr(engine.engine_core, "engine_core", None)  # of an engine in this process
    for connector in connectors_of(core):
        unfinished |= connector.lingers(unfinished)
    return unfinished


@functools.cache
def end_quietly() -> None:
    """Let the client of an engine end its reader before it closes what that reads from."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import BackgroundResources

    wrap(AsyncLLM, "shutdown", _knows_reader)
    wrap(BackgroundResources, "__call__", _ends_reader)


def _knows_reader(call: Callable[[], None], client: Any, *_: Any, **__: Any) -> None:
    # It may be told so before it is whole, and again.
    resources = getattr(getattr(client, "engine_core", None), "resources", None)
    if resources is not None:
        setattr(resources, _READER, getattr(client, "output_handler", None))
    call()


def _ends_reader(call: Callable[[], None], resources: Any) -> None:
    from vllm.utils.async_utils import cancel_task_threadsafe

    reader = getattr(resources, _READER, None)
    if reader is not None and not reader.get_loop().is_closed():
        cancel_task_threadsafe(reader)
    call()
