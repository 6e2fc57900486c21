"""How an engine ends: drained, with its requests, and with the process that started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks import engine
from kvtier.vllm.hooks.engine import Ending

TIMEOUT_S = 20.0
HANGS_S = 60
SERVER = """
import multiprocessing, os, signal, sys, threading
from kvtier.vllm.hooks import engine as ours

def close(*_):
    print("closes", flush=True)
    os._exit(0)

def engine():
    if "closes" in sys.argv:
        signal.signal(signal.SIGTERM, close)
    if "hangs" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ours._ORPHAN_CLOSING_S = 0.0
    ours.end_with_parent()
    print(os.getpid(), threading.active_count() - 1, flush=True)
    signal.pause()

multiprocessing.get_context("fork").Process(target=engine, name=sys.argv[1]).start()
signal.pause()
"""


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
    return lambda core: engine._handle_shutdown(lambda: bool(core.requests), core)


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
    assert engine._handle_shutdown(lambda: True, core)
    assert not core.sent


def test_a_caller_steps_an_engine_of_its_own_process_until_it_rests() -> None:
    """One in another process steps by itself."""
    asked: list[bool] = []

    def needs_step(unfinished: bool) -> bool:
        asked.append(unfinished)
        return len(asked) == 1

    connector = SimpleNamespace(weights_changed=None, needs_step=needs_step)
    core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    here = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    elsewhere = SimpleNamespace(engine_core=SimpleNamespace())
    assert engine._has_unfinished_requests(lambda: False, here), "it stores what came last"
    assert not engine._has_unfinished_requests(lambda: False, here)
    assert engine._has_unfinished_requests(lambda: True, here)
    assert not engine._has_unfinished_requests(lambda: False, elsewhere)
    assert asked == [False, False, True]


@pytest.mark.parametrize(
    ("name", "watches"), [("EngineCore", True), ("EngineCore_DP1", True), ("Process-1", False)]
)
def test_an_engine_ends_with_its_server(name: str, watches: bool) -> None:
    command = [sys.executable, "-c", SERVER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid, threads = map(int, server.stdout.readline().split())
        ended = os.pidfd_open(pid)
        server.kill()
        assert threads == watches
        assert not watches or select.select([ended], [], [], HANGS_S)[0]
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        os.close(ended)


@pytest.mark.parametrize("how", ["closes", "hangs"])
def test_an_engine_is_asked_to_close_and_killed_if_it_does_not(how: str) -> None:
    command = [sys.executable, "-c", SERVER, "EngineCore", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ended = os.pidfd_open(int(server.stdout.readline().split()[0]))
        server.kill()
        assert select.select([ended], [], [], HANGS_S)[0]
        assert server.stdout.read() == ("closes\n" if how == "closes" else "")
        os.close(ended)


def test_a_process_that_nobody_started_is_not_watched() -> None:
    before = threading.active_count()
    engine.end_with_parent()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("name", "own"), [("EngineCore", True), ("EngineCore_DP1", True), ("MainProcess", False)]
)
def test_an_engine_within_its_callers_process(
    name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps without a pause while it only waits; vLLM pauses one that has its own."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    assert engine.has_own_process() is own
