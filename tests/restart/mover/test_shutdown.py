"""How a mover is closed as its process comes up, or cannot be ended; and when it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.movers.contract import HOST, NEAR, SOON, MoverRig
from support.processes.mover_processes import await_restart, pid_of, until

from kvtier.errors import MoverError
from kvtier.interfaces.mover import TransferKind
from kvtier.move import process as process_connection
from kvtier.move.process import ProcessMover
from kvtier.move.protocol import Ready

pytestmark = pytest.mark.usefixtures("installed")


def test_a_mover_that_is_closed_as_its_process_has_started_again_ends_at_once(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mover = ProcessMover(media.tiers, media.context)
    closing, start = threading.Thread(target=mover.close), process_connection.MoverConnection.start

    def closed_meanwhile(*args: Any) -> Ready:
        ready = start(*args)
        closing.start()
        while not mover._closed:
            time.sleep(0.001)
        return ready

    monkeypatch.setattr(process_connection.MoverConnection, "start", closed_meanwhile)
    os.kill(pid_of(mover), signal.SIGKILL)
    while not mover._closed:
        time.sleep(0.001)
    closing.join()
    assert "does not end and is killed" not in caplog.text


def test_a_mover_is_lost_from_when_it_cannot_be_started_until_it_can(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = ProcessMover(media.tiers, media.context)
    old = pid_of(mover)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(sys, "executable", "/bin/false")
        os.kill(old, signal.SIGKILL)
        until(lambda: mover.lost)
        assert mover.down
    await_restart(mover, old)
    assert not mover.down
    assert not mover.lost
    mover.close()


class Undying:
    """A mover's process that waits for its disk: the kernel does not end it, whoever kills it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        killed = self.killed = threading.Event()
        disk = self.disk = threading.Event()
        started: list[subprocess.Popen[bytes]] = []
        self._started = started

        class Kept(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                started.append(self)

            def wait(self, timeout: float | None = None) -> int:
                killed.set()
                if timeout is not None and not disk.is_set():
                    raise subprocess.TimeoutExpired("mover", timeout)
                disk.wait()
                return super().wait(timeout)

        monkeypatch.setattr(subprocess, "Popen", Kept)

    def ends(self, call: Callable[[], object]) -> bool:
        """Whether the call does not wait for the disk."""
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(SOON / 4)
        ended = not thread.is_alive()
        self.disk.set()
        thread.join()
        for each in self._started:
            each.wait()
        return ended


def test_who_closes_does_not_wait_for_a_process_that_waits_for_its_disk(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    undying = Undying(monkeypatch)
    mover = ProcessMover(media.tiers, media.context)
    media.media[NEAR].hold(range(2))
    assert mover.submit(media.transfer(TransferKind.LOAD, NEAR, HOST, range(2)))
    media.media[NEAR].next_call()
    os.kill(pid_of(mover), signal.SIGKILL)
    assert undying.killed.wait(SOON)
    assert mover.down
    until(lambda: mover.lost)
    assert undying.ends(mover.close)
    assert "cannot be ended" in caplog.text
    assert mover.poll() == [], "it may write to its targets yet"


def test_who_starts_does_not_wait_for_a_process_that_waits_for_its_disk(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    undying = Undying(monkeypatch)
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def start() -> None:
        with pytest.raises(MoverError, match="ended at its start"):
            ProcessMover(media.tiers, media.context)

    assert undying.ends(start)
