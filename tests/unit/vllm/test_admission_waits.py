"""How long requests wait for room that others' loads hold, by what they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
    TWO_GROUPS,
    Asking,
    costs_of,
    manager,
    on_disk,
    small_above_large,
)

from kvtier import Stack

TOKENS = 12 * CHUNK + 1


class Short:
    """An engine by a clock of its own, that computes four chunks a second. A load of eight chunks
    leaves room for four more."""

    def __init__(self, stack: Stack) -> None:
        self.now = [0.0]
        self.asking: Asking = manager(
            stack, FULL, costs=costs_of(self.now), clock=lambda: self.now[0]
        )
        self.made = self.asking.manager
        loading, self.ends = self.asking.keys(8), self.asking.keys(12, first=100)
        on_disk(stack, loading, self.ends)
        assert self.asking.hit("first", loading, 8 * CHUNK + 1) == 8 * CHUNK
        self.made.prepare_load(list(loading), "first")
        assert stack.settle()

    def waits(self, start: int, limit: int) -> bool:
        """Whether another is told to, which asks for what is between these tokens of 12 chunks."""
        self.made.on_schedule_end()
        self.made.begin_lookup("second", start, limit)
        keys = [key for key, end in self.ends.items() if start < end <= limit]
        return None in [self.made.lookup(key, "second", self.ends) for key in keys]

    def still_deferred(self, start: int, limit: int) -> bool:
        self.made.on_schedule_end()
        self.made.begin_lookup("second", start, limit)
        return self.made.still_deferred("second", self.ends)


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Short]:
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        yield Short(stack)


@pytest.mark.parametrize(
    ("start", "limit", "patience"),
    [(0, TOKENS, 3.0), (4 * CHUNK, TOKENS, 2.0), (0, 8 * CHUNK, 2.0)],
    ids=["all", "all but what the engine has", "no more than it may load"],
)
def test_it_waits_no_longer_than_computing_takes_what_it_asks_for(
    short: Short, start: int, limit: int, patience: float
) -> None:
    assert short.waits(start, limit)
    short.now[0] = patience - 0.01
    assert short.waits(start, limit)
    assert short.still_deferred(start, limit)
    short.now[0] = patience + 0.01
    assert not short.still_deferred(start, limit)


def test_one_that_may_load_less_than_before_is_looked_up(short: Short) -> None:
    assert short.waits(0, TOKENS)
    assert short.still_deferred(0, TOKENS)
    assert not short.still_deferred(0, 4 * CHUNK), "there is room for that"
