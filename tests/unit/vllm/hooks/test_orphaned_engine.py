"""An engine's process ends with the one that started it; no other process is watched."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from kvtier.vllm.hooks import orphaned_engine

HANGS_S = 60
SERVER = """
import multiprocessing, os, signal, sys, threading
from kvtier.vllm.hooks import orphaned_engine

def close(*_):
    print("closes", flush=True)
    os._exit(0)

def engine():
    if "closes" in sys.argv:
        signal.signal(signal.SIGTERM, close)
    if "hangs" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        orphaned_engine._CLOSING_S = 0.0
    orphaned_engine.end_with_parent()
    print(os.getpid(), threading.active_count() - 1, flush=True)
    signal.pause()

multiprocessing.get_context("fork").Process(target=engine, name=sys.argv[1]).start()
signal.pause()
"""


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
    orphaned_engine.end_with_parent()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("name", "own"), [("EngineCore", True), ("EngineCore_DP1", True), ("MainProcess", False)]
)
def test_an_engine_within_its_callers_process(
    name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps without a pause while it only waits; vLLM pauses one that has its own."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    assert orphaned_engine.has_own_process() is own
