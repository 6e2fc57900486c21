"""When an engine that is told to end has drained, and when its requests must end with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks import engine_endings
from kvtier.vllm.hooks.engine_endings import Ending

TIMEOUT_S = 20.0


class Core:
    """vLLM's engine core, with requests that go on for ever."""

    def __init__(self, ending: Ending) -> None:
        self.running, self.requests = True, ["a", "b"]
        self.sent: list[str] = []
        self.vllm_config = SimpleNamespace(shutdown_timeout=TIMEOUT_S)
        connector = SimpleNamespace(weights_changed=None, ending=ending)
        self.scheduler = SimpleNamespace(
            connector=connector,
            get_num_unfinished_requests=lambda: len(self.requests),
            finish_requests=self._finish,
        )

    def is_running(self) -> bool:
        return self.running

    def _finish(self, names: None, status: object) -> list[str]:
        assert (names, status) == (None, "aborted")
        ended, self.requests = self.requests, []
        return ended

    def _send_abort_outputs(self, aborted: list[str]) -> None:
        self.sent += aborted


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Core], bool]:
    """What the core asks before each step."""
    vllm: Any = ModuleType("vllm.v1.request")
    vllm.RequestStatus = SimpleNamespace(FINISHED_ABORTED="aborted")
    monkeypatch.setitem(sys.modules, "vllm.v1.request", vllm)
    return lambda core: engine_endings._goes_on(lambda: bool(core.requests), core)


def test_an_engine_drains_for_a_while_from_when_it_is_told(step: Callable[[Core], bool]) -> None:
    now = [100.0]
    ending = Ending(2.0, lambda: now[0])
    core = Core(ending)
    step(core)
    now[0] += 50
    assert not ending.drained, "it serves"
    core.running = False
    step(core)
    now[0] += 1.9
    step(core)
    assert not ending.drained
    now[0] += 0.1
    assert ending.drained


@pytest.mark.parametrize(("timeout", "after"), [(20.0, 14.0), (8.0, 4.0), (0.0, 0.0)])
def test_requests_end_before_their_engine_is_killed(
    step: Callable[[Core], bool], timeout: float, after: float
) -> None:
    """With 0, vLLM aborts them at once itself."""
    now = [100.0]
    core = Core(Ending(1.0, lambda: now[0]))
    core.vllm_config.shutdown_timeout = timeout
    core.running = False
    if after:
        assert step(core)
        now[0] += after - 0.1
        assert step(core)
        assert not core.sent
        now[0] += 0.1
    assert not step(core)
    assert core.sent == ["a", "b"]
    assert not step(core)
    assert core.sent == ["a", "b"], "once"


def test_an_engine_of_others_ends_as_it_would() -> None:
    core = Core(Ending(0.0))
    core.running, core.scheduler.connector = False, None
    assert engine_endings._goes_on(lambda: True, core)
    assert not core.sent


def test_a_caller_steps_an_engine_of_its_own_process_until_it_rests() -> None:
    """One in another process steps by itself."""
    asked: list[bool] = []

    def lingers(unfinished: bool) -> bool:
        asked.append(unfinished)
        return len(asked) == 1

    connector = SimpleNamespace(weights_changed=None, lingers=lingers)
    core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    here = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    elsewhere = SimpleNamespace(engine_core=SimpleNamespace())
    assert engine_endings._has_unfinished(lambda: False, here), "it stores what came last"
    assert not engine_endings._has_unfinished(lambda: False, here)
    assert engine_endings._has_unfinished(lambda: True, here)
    assert not engine_endings._has_unfinished(lambda: False, elsewhere)
    assert asked == [False, False, True]
