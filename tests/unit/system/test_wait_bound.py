"""A wait that ends."""

from __future__ import annotations

import pytest
from support.processes.clocks import Clock

from kvtier.system.calls import WaitBound


def test_a_wait_ends_and_the_log_says_so_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """A store that hangs for ever must not keep an engine from pausing, or from its end."""
    clock = Clock()
    bound = WaitBound(30.0, "nothing has ended within %g s", clock)
    assert not bound.holds(False)
    for said in (1, 2):
        assert bound.holds(True)
        clock.now += 29.9
        assert bound.holds(True)
        clock.now += 0.1
        assert [bound.holds(True) for _ in range(3)] == [False] * 3
        assert caplog.text.count("nothing has ended within 30 s") == said
        assert not bound.holds(False), "what hung has ended; the next wait is a new one"
