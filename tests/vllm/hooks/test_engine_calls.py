"""What connectors are told of what vLLM's engine core does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


class Listener:
    """A connector that notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        manager = SimpleNamespace(adapters=self)
        self.connector_scheduler = SimpleNamespace(manager=manager)

    def weights_changed(self) -> None:
        self.heard.append("weights")

    def read(self, adapter: str) -> None:
        self.heard.append(f"reads {adapter}")

    def removed(self, number: int) -> None:
        self.heard.append(f"lets go of {number}")

    def engine_cache_reset(self) -> None:
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
        listeners = getattr(self.scheduler.connector, "sub_connectors", [self.scheduler.connector])
        for each in listeners:
            if isinstance(each, Listener):
                each.heard.append("done")
        return answer


CALLS = ("collective_rpc", "add_lora", "remove_lora", "reset_prefix_cache")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's engine core, of which another plugin has wrapped a call."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from kvtier.vllm.hooks import engine

    for owner, call in [(EngineCore, each) for each in CALLS] + [(Scheduler, "set_pause_state")]:
        plain = getattr(owner, call)
        monkeypatch.setattr(owner, call, getattr(plain, "__wrapped__", plain))

    @functools.wraps(call := EngineCore.collective_rpc)
    def traced(core: Any, *arguments: Any) -> Any:
        return call(core, *arguments)

    monkeypatch.setattr(EngineCore, "collective_rpc", traced)
    engine.install.cache_clear()
    engine.install()
    engine.install()
    yield EngineCore
    engine.install.cache_clear()


def test_each_connector_is_told_once(core: Any) -> None:
    """After weights were changed or a cache was reset, and before an adapter is read or dropped."""
    listeners = [Listener(), Listener()]
    engine = Engine(SimpleNamespace(sub_connectors=[listeners[0], object(), listeners[1]]))
    for call, argument in [
        ("collective_rpc", "reload_weights"),
        ("collective_rpc", "get_weight_version"),
        ("add_lora", "a"),
        ("remove_lora", 7),
    ]:
        assert getattr(core, call)(engine, argument) == "done"
    assert core.reset_prefix_cache(engine)
    for each in listeners:
        told = ["done", "weights", "done", "reads a", "done", "lets go of 7", "done"]
        assert each.heard == [*told, "done", "forgot"]


def test_what_fails_may_have_been_done_in_part(core: Any) -> None:
    listeners = Listener()
    engine = Engine(listeners, fails=True)
    for call in CALLS[:3]:
        with pytest.raises(RuntimeError):
            getattr(core, call)(engine, "update_weights")
    assert not core.reset_prefix_cache(engine)
    assert listeners.heard == [
        "weights",
        "reads update_weights",
        "lets go of update_weights",
        "done",
    ]


def test_they_are_told_of_pauses(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    listeners = Listener()
    scheduler: Any = Scheduler.__new__(Scheduler)
    scheduler.connector = listeners
    for state, paused in [("PAUSED_NEW", True), ("PAUSED_ALL", True), ("UNPAUSED", False)]:
        scheduler.set_pause_state(PauseState[state])
        assert (listeners.paused, scheduler.pause_state) == (paused, PauseState[state])


def test_engines_without_such_a_connector_go_on(core: Any) -> None:
    for connector in (None, object()):
        assert core.collective_rpc(Engine(connector), "reload_weights") == "done"
    assert core.collective_rpc(SimpleNamespace(model_executor=Engine(None)), "update_weights")
