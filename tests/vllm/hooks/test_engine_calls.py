"""What connectors are told of what vLLM's engine core does."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


class Ears:
    """A connector that notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def weights_changed(self) -> None:
        self.heard.append("weights")

    def reads_adapter(self, adapter: str) -> None:
        self.heard.append(f"reads {adapter}")

    def lets_go_of_adapter(self, number: int) -> None:
        self.heard.append(f"lets go of {number}")

    def engine_forgot(self) -> None:
        self.heard.append("forgot")

    paused = False


class Engine:
    """What vLLM's core asks for what it is told to do, of which any may fail."""

    def __init__(self, connector: Any, *, fails: bool = False) -> None:
        self.scheduler = SimpleNamespace(
            connector=connector, reset_prefix_cache=lambda *_: self._do(not fails)
        )
        self.model_executor = self
        self._fails = fails
        self.collective_rpc = self.add_lora = self.remove_lora = self._call

    def _call(self, *_: Any) -> str:
        if self._fails:
            raise RuntimeError("amid it")
        return self._do("done")

    def _do(self, answer: Any) -> Any:
        ears = getattr(self.scheduler.connector, "sub_connectors", [self.scheduler.connector])
        for each in ears:
            if isinstance(each, Ears):
                each.heard.append("done")
        return answer


CALLS = ("collective_rpc", "add_lora", "remove_lora", "reset_prefix_cache")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's engine core, of which another plugin has wrapped a call."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from kvtier.vllm.hooks import engine_calls

    for owner, call in [(EngineCore, each) for each in CALLS] + [(Scheduler, "set_pause_state")]:
        plain = getattr(owner, call)
        monkeypatch.setattr(owner, call, getattr(plain, "__wrapped__", plain))

    @functools.wraps(call := EngineCore.collective_rpc)
    def traced(core: Any, *arguments: Any) -> Any:
        return call(core, *arguments)

    monkeypatch.setattr(EngineCore, "collective_rpc", traced)
    engine_calls.listen.cache_clear()
    engine_calls.listen()
    engine_calls.listen()
    yield EngineCore
    engine_calls.listen.cache_clear()


def test_each_connector_is_told_once(core: Any) -> None:
    """After weights were changed or a cache was reset, and before an adapter is read or dropped."""
    ears = [Ears(), Ears()]
    engine = Engine(SimpleNamespace(sub_connectors=[ears[0], object(), ears[1]]))
    for call, argument in [
        ("collective_rpc", "reload_weights"),
        ("collective_rpc", "get_weight_version"),
        ("add_lora", "a"),
        ("remove_lora", 7),
    ]:
        assert getattr(core, call)(engine, argument) == "done"
    assert core.reset_prefix_cache(engine)
    for each in ears:
        told = ["done", "weights", "done", "reads a", "done", "lets go of 7", "done"]
        assert each.heard == [*told, "done", "forgot"]


def test_what_fails_may_have_been_done_in_part(core: Any) -> None:
    ears = Ears()
    engine = Engine(ears, fails=True)
    for call in CALLS[:3]:
        with pytest.raises(RuntimeError):
            getattr(core, call)(engine, "update_weights")
    assert not core.reset_prefix_cache(engine)
    assert ears.heard == ["weights", "reads update_weights", "lets go of update_weights", "done"]


def test_they_are_told_of_pauses(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    ears = Ears()
    scheduler: Any = Scheduler.__new__(Scheduler)
    scheduler.connector = ears
    for state, paused in [("PAUSED_NEW", True), ("PAUSED_ALL", True), ("UNPAUSED", False)]:
        scheduler.set_pause_state(PauseState[state])
        assert (ears.paused, scheduler.pause_state) == (paused, PauseState[state])


def test_engines_without_such_a_connector_go_on(core: Any) -> None:
    for connector in (None, object()):
        assert core.collective_rpc(Engine(connector), "reload_weights") == "done"
    assert core.collective_rpc(SimpleNamespace(model_executor=Engine(None)), "update_weights")


@pytest.mark.parametrize("quietly", [True, False])
def test_a_client_ends_its_reader_before_what_that_reads_from(
    monkeypatch: pytest.MonkeyPatch, *, quietly: bool
) -> None:
    """Else vLLM logs a traceback wherever the loop is quicker than the thread that ends it."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import BackgroundResources

    from kvtier.vllm.hooks import engine_endings

    for owner, call in [(AsyncLLM, "shutdown"), (BackgroundResources, "__call__")]:
        plain = getattr(owner, call)
        monkeypatch.setattr(owner, call, getattr(plain, "__wrapped__", plain))
    engine_endings.end_quietly.cache_clear()
    if quietly:
        engine_endings.end_quietly()
    heard = asyncio.run(_open_and_close())
    engine_endings.end_quietly.cache_clear()
    assert heard == ([] if quietly else ["EngineDeadError"])


async def _open_and_close() -> list[str]:
    """As vLLM's server does with an engine that has ended; what its reader hears of that."""
    import zmq.asyncio
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.exceptions import EngineDeadError

    context, outputs = zmq.asyncio.Context(), asyncio.Queue[str]()
    resources: Any = BackgroundResources(ctx=context)
    resources.output_socket = context.socket(zmq.PULL)
    heard: list[str] = []

    async def receives() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outputs.put_nowait(EngineDeadError.__name__)

    async def reads() -> None:
        heard.append(await outputs.get())

    resources.output_queue_task = asyncio.create_task(receives())
    client: Any = AsyncLLM.__new__(AsyncLLM)
    client.output_handler = asyncio.create_task(reads())
    client.engine_core = SimpleNamespace(resources=resources)
    loop = asyncio.get_running_loop()

    def shutdown(timeout: float | None) -> None:
        resources()
        asyncio.run_coroutine_threadsafe(_turns(), loop).result()

    client.engine_core.shutdown = shutdown
    await _turns()
    await loop.run_in_executor(None, client.shutdown)
    await _turns()
    del client.engine_core  # it is shut down again when it is collected
    context.term()
    return heard


async def _turns() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(8):
        await asyncio.sleep(0)
