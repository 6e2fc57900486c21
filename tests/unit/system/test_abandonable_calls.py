"""Threads for calls that their callers may leave behind."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

from kvtier.system import calls as calls_module
from kvtier.system.calls import AbandonableCalls, joined


class Panic(BaseException):
    """Of a library that knows no exceptions."""


def test_a_call_that_is_left_behind_frees_its_thread_when_it_ends() -> None:
    calls, release = AbandonableCalls("test-calls", 2), threading.Event()
    ended = threading.Semaphore(0)

    def hang() -> None:
        release.wait(30)
        ended.release()

    for _ in range(2):
        with pytest.raises(TimeoutError):
            calls.run(hang, 0.01)
    with pytest.raises(RuntimeError, match="2 calls have not ended"):
        calls.run(int, 10.0)
    release.set()
    for _ in range(2):
        assert ended.acquire(timeout=30)
    while True:
        try:
            assert calls.run(lambda: 7, 10.0) == 7
            break
        except RuntimeError:  # the threads are just coming back
            continue
    ended_by(calls)


def ended_by(calls: AbandonableCalls) -> None:
    """Close, and wait for longer than `close` does: until the threads have ended."""
    threads = list(calls._threads)
    calls.close()
    assert joined(threads, 60)


def test_who_calls_again_at_once_finds_the_thread_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there is an answer, whatever the thread has still to do."""
    calls, free = AbandonableCalls("test-calls", 1), list[int]()

    class Watched(Future[int]):
        def set_result(self, value: int) -> None:
            free.append(calls._idle)
            super().set_result(value)

    monkeypatch.setattr(calls_module, "Future", Watched)
    assert [calls.run(lambda: 7, 10.0), calls.run(lambda: 8, 10.0)] == [7, 8]
    assert free == [1, 1]
    ended_by(calls)


def test_whatever_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    calls = AbandonableCalls("test-calls", 1)

    def fail(error: type[BaseException]) -> None:
        raise error

    for kind in (ValueError, TimeoutError):
        with pytest.raises(kind):
            calls.run(lambda kind=kind: fail(kind), 10.0)  # type: ignore[misc]
    assert calls.run(lambda: "goes on", 10.0) == "goes on"
    calls.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_no_caller_waiting_and_is_replaced() -> None:
    calls = AbandonableCalls("test-calls", 1)
    dying: list[threading.Thread] = []

    def die() -> None:
        dying.append(threading.current_thread())
        raise Panic

    for _ in range(2):
        with pytest.raises(RuntimeError, match="given up"):
            calls.run(die, 10.0)
    assert calls.run(lambda: "goes on", 10.0) == "goes on"
    calls.close()
    for thread in dying:  # else a later test is blamed for how it ends
        thread.join()


def test_nothing_of_a_call_is_held_when_it_has_ended() -> None:
    """A buffer that is held cannot be given back to the system."""
    calls, memory = AbandonableCalls("test-calls", 1), bytearray(10)
    for _ in range(3):
        calls.run(memoryview(memory).tobytes, 10.0)
    ended_by(calls)
    memory.extend(b"x")  # which raises while anybody holds a view


def test_what_a_call_that_raised_has_held_is_free_at_once() -> None:
    """As connections are: no cycle waits for Python's garbage collector."""

    class Connection:
        pass

    def fail(connection: Connection) -> None:
        raise OSError

    calls, connection = AbandonableCalls("test-calls", 1), Connection()
    closed = weakref.ref(connection)
    gc.disable()
    try:
        with pytest.raises(OSError):
            calls.run(functools.partial(fail, connection), 10.0)
        ended_by(calls)
        del connection
        assert closed() is None
    finally:
        gc.enable()
