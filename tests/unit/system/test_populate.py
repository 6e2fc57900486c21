"""Memory that is taken by several threads before it is used."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest

from kvtier.system import memory as module
from kvtier.system.memory import Populating, populate


def test_all_of_a_file_s_memory_is_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", 1 << 16)
    taken: list[tuple[int, int]] = []
    real = module.system_takes

    def take(address: int, size: int) -> bool:
        taken.append((address, size))
        return real(address, size)

    monkeypatch.setattr(Populating.__init__, "__defaults__", ((), take, None))
    with mmap.mmap(-1, (1 << 20) + 4096) as memory, memoryview(memory) as view:
        assert populate(view, "taking memory")
    assert sum(size for _, size in taken) == (1 << 20) + 4096
    assert len({address for address, _ in taken}) == 17


def test_several_threads_take_ranges_in_order_and_others_wait_for_one() -> None:
    together, go = threading.Barrier(2), threading.Event()

    def take(address: int, size: int) -> bool:
        if address < 2:
            together.wait(60)  # two threads are at it
        else:
            go.wait(60)
        return True

    populating = Populating([(at, 1) for at in range(4)], take=take, threads=2)
    assert populating.wait(0, 60)
    assert populating.wait(1, 60)
    assert not populating.wait(3, 0.0)
    go.set()
    assert populating.wait(3, 60)
    populating.stop()
    assert populating.whole


def refuse(address: int, size: int) -> bool:
    """As before Linux 5.14, or without memory: whatever comes next says so."""
    return False


def fail(address: int, size: int) -> bool:
    raise OverflowError("int too large to convert to C long")


@pytest.mark.parametrize("take", [refuse, fail])
def test_where_the_system_takes_none_nobody_waits(take: Callable[[int, int], bool]) -> None:
    populating = Populating([(at, 1) for at in range(9)], take=take, threads=2)
    assert populating.wait(8, 60)
    populating.stop()
    assert not populating.whole


def test_where_no_thread_can_be_had_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", limited)
    taken: list[int] = []
    populating = Populating(
        [(at, 1) for at in range(3)], take=lambda at, size: not taken.append(at)
    )
    assert populating.wait(2, 0.0)
    populating.stop()
    assert taken == [0, 1, 2]
