"""The processes of movers, as tests see them from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvtier.interfaces.mover import Mover
from kvtier.move.process import ProcessMover
from support.movers.contract import SOON


def pid_of(mover: Mover) -> int:
    assert isinstance(mover, ProcessMover)
    assert mover.pid is not None
    return mover.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    """Look again and again, for what another process does by itself and tells nobody."""
    limit = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < limit
        os.sched_yield()


def await_restart(mover: Mover, old: int) -> int:
    assert isinstance(mover, ProcessMover)
    until(lambda: mover.pid not in (None, old))
    return pid_of(mover)
