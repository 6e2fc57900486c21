"""Stores give way to loads on the link."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.processes.clocks import Clock

from kvtier.device.cuda.copier import STORES_AT_ONCE, STORES_SHARE, LinkTurns

NEVER_S = 30.0

pytestmark = pytest.mark.timeout(120)


def together(*actions: Callable[[], None]) -> None:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER_S)
        assert not thread.is_alive()


def test_without_loads_a_few_stores_go_together() -> None:
    turns, meeting = LinkTurns(), threading.Barrier(STORES_AT_ONCE, timeout=NEVER_S)

    def store() -> None:
        with turns.store():
            meeting.wait()

    with turns.load():
        pass  # that one is over
    with contextlib.suppress(RuntimeError), turns.load():
        raise RuntimeError("and so is this one")
    together(*[store] * STORES_AT_ONCE)


def test_loads_wait_for_nothing() -> None:
    turns = LinkTurns()
    with turns.store(), turns.load(), turns.load():
        pass


def test_one_store_too_many_waits_until_another_has_left_the_link() -> None:
    """What the engine copies to the host waits for all that are there."""
    turns = LinkTurns()
    with contextlib.ExitStack() as there:
        for _ in range(STORES_AT_ONCE):
            there.enter_context(turns.store())
        assert not turns._room.acquire(blocking=False)
    together(turns.store().__enter__)


def test_those_that_were_there_before_a_load_count() -> None:
    """Else there would be one more than an engine's few bytes should have to wait for."""
    turns, asked = LinkTurns(), threading.Event()

    class Room(threading.Semaphore):
        def __enter__(self) -> bool:
            asked.set()
            return super().__enter__()

    turns._room = Room(STORES_AT_ONCE)
    with contextlib.ExitStack() as there:
        for _ in range(STORES_AT_ONCE):
            there.enter_context(turns.store())
        asked.clear()
        there.enter_context(turns.load())
        thread = threading.Thread(target=turns.store().__enter__, daemon=True)
        thread.start()
        assert asked.wait(NEVER_S), "it is on the link, with all the others"
    thread.join(NEVER_S)
    assert not thread.is_alive()


def test_beside_a_load_stores_go_one_after_the_other() -> None:
    turns, inside, most = LinkTurns(), 0, 0

    def store() -> None:
        nonlocal inside, most
        for _ in range(20):
            with turns.store():
                inside += 1
                most = max(most, inside)
                inside -= 1

    with turns.load():
        together(store, store, store)
    assert most == 1


def test_the_link_is_left_alone_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def wait(predicate: Callable[[], Any], timeout: float) -> None:
        pauses.append(timeout)

    clock = Clock()
    turns = LinkTurns(clock)
    monkeypatch.setattr(turns._ended, "wait_for", wait)
    with turns.store():
        clock.now += 1
    with turns.load(), turns.store():
        clock.now += 3
    assert pauses == [3 / STORES_SHARE - 3]


def test_a_pause_ends_with_the_load() -> None:
    clock = Clock()
    turns, done = LinkTurns(clock), threading.Event()

    def store() -> None:
        with turns.store():
            clock.now += 10 * NEVER_S
            done.set()

    with turns.load():
        thread = threading.Thread(target=store, daemon=True)
        thread.start()
        assert done.wait(NEVER_S)
    thread.join(NEVER_S)
    assert not thread.is_alive()
