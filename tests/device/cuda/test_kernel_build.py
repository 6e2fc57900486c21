"""Kernels are built before an engine serves."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.device.cuda import device as cuda_device
from kvtier.vllm.worker import RankShare, RankWorker


class Machine:
    """Stands for torch and a runtime: notes what is asked, and by which thread."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []
        self.threads: set[int] = set()
        self.cuda = SimpleNamespace(
            set_device=lambda index: self.say("device", index),
            Stream=lambda index: ("stream", index),
            stream=self.stream,
        )

    def say(self, *words: object) -> None:
        self.said.append(words)
        self.threads.add(threading.get_ident())

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.say("on", stream)
        yield

    def try_out(self, torch: Any, index: int, batch_copy: Any) -> None:
        self.say("built", index, batch_copy(range(1), range(1), range(1), True))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    torch, staging = ModuleType("torch"), ModuleType("kvtier.device.cuda.staging_buffers")
    torch.cuda = machine.cuda  # type: ignore[attr-defined]
    staging.try_out = machine.try_out  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "kvtier.device.cuda.staging_buffers", staging)
    monkeypatch.setattr(cuda_device, "leave_captures_alone", lambda: machine.say("relaxed"))
    monkeypatch.setattr(cuda_device, "runtime_copy", lambda torch: lambda *columns: "copied")
    return machine


def test_by_a_thread_and_on_a_stream_of_their_own(machine: Machine) -> None:
    cuda_device.build_kernels(3)
    stream = ("on", ("stream", 3))
    assert machine.said == [("device", 3), ("relaxed",), stream, ("built", 3, "copied")]
    assert machine.threads.isdisjoint({threading.get_ident()})


def test_where_they_cannot_be_built_the_engine_starts_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(torch: Any) -> None:
        raise ImportError("no such operator")

    monkeypatch.setattr(cuda_device, "runtime_copy", breaks)
    cuda_device.build_kernels(0)
    assert machine.said[-1] == ("on", ("stream", 0))


def test_where_no_thread_can_be_had_the_engine_starts_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", limited)
    cuda_device.build_kernels(0)
    assert not machine.said


def test_an_engine_does_not_wait_for_ever(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, done = threading.Event(), threading.Event()

    def hangs(torch: Any) -> None:
        begun.set()
        done.wait()
        raise RuntimeError("it was in vain")

    monkeypatch.setattr(cuda_device, "runtime_copy", hangs)
    monkeypatch.setattr(cuda_device, "_BUILD_SECONDS", 0.01)
    cuda_device.build_kernels(0)
    assert begun.wait(60)
    assert not done.is_set()
    done.set()


@pytest.mark.parametrize(("kind", "built"), [("cuda", [2]), ("cpu", [])])
def test_when_an_engine_hands_over_its_tensors(
    monkeypatch: pytest.MonkeyPatch, kind: str, built: list[int]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda_device, "build_kernels", asked.append)
    device = SimpleNamespace(type=kind, index=2)
    tensor = SimpleNamespace(tensor=SimpleNamespace(device=device))
    caches, share = SimpleNamespace(tensors=[tensor]), RankShare(0, 1, 1, (0,))
    RankWorker(caches, share, attach=lambda path: pytest.fail("it is not opened yet"))
    assert asked == built
