"""Blocks that are stored together get neighbouring slots, as far as those are free."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.slab.catalogue import take_neighbours
from kvtier.slab.layout import runs


@pytest.mark.parametrize(
    ("free", "count", "taken", "left"),
    [
        ([9, 1, 5, 6, 7, 3], 3, [5, 6, 7], [9, 1, 3]),
        ([9, 1, 5, 6, 7, 3], 2, [5, 6], [9, 1, 7, 3]),
        ([9, 1, 5, 2, 6, 3], 4, [1, 2, 3, 5], [9, 6]),
        ([9, 1], 2, [1, 9], []),
        ([4, 3], 0, [], [4, 3]),
    ],
)
def test_the_longest_runs_are_taken(
    free: list[int], count: int, taken: list[int], left: list[int]
) -> None:
    queue = deque(free)
    assert take_neighbours(queue, count) == taken
    assert list(queue) == left, "what has been free for longest comes next"


@given(st.lists(st.integers(0, 3000), unique=True, max_size=1500), st.data())
def test_it_takes_what_is_asked_for_in_no_more_runs_than_the_queue_gives(
    free: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(free)))
    queue = deque(free)
    taken = take_neighbours(queue, count)
    assert len(taken) == count
    assert taken == sorted(set(taken))
    assert sorted([*taken, *queue]) == sorted(free)
    assert len(runs(taken)) <= len(runs(sorted(free[:count])))
