"""What policies of several processes learn together, in memory that they share."""

from __future__ import annotations

import mmap
import random
import warnings

import numpy as np
import pytest
from support.scheduler.eviction_requests import chats, keys

from kvtier.eviction.adaptive import KINDS, Adaptive, came_back
from kvtier.eviction.forecast import AGES, history_bytes, history_cells
from kvtier.eviction.policy import LRU, EvictionPolicy
from kvtier.eviction.retention import RetainingPolicy

SIZE = Adaptive().shared_bytes(100)


def learned() -> memoryview:
    return memoryview(bytearray(SIZE))


def sharing(memory: memoryview, now: float = 0.0) -> Adaptive:
    policy = Adaptive(100)
    policy.share(memory, now)
    return policy


def kind(policy: Adaptive, slot: int) -> int:
    return policy._runs.kind[policy._runs.run_of[slot]]


def test_a_prompt_that_another_engine_has_evicted_is_known() -> None:
    """So it is taken for what comes back, not for a new one that may never do."""
    memory = learned()
    first, second, alone = sharing(memory), sharing(memory), Adaptive(100)
    first.use(range(8), keys(0, 8), 1.0)
    first.evict(8)
    for policy in (second, alone):
        policy.use(range(8), keys(0, 8), 61.0)
    assert came_back(kind(second, 0))
    assert not came_back(kind(alone, 0))


def test_what_one_has_counted_all_know() -> None:
    """A thousand prompts come back after a minute, half of them to each engine."""
    memory = learned()
    first, second = sharing(memory), sharing(memory)
    for turn in range(200):
        for at, policy in enumerate((first, second)):
            policy.use(range(8), keys(1000 * turn + 8 * at, 8), 100.0 * turn)
            policy.evict(8)
            policy.use(range(8), keys(1000 * turn + 8 * at, 8), 100.0 * turn + 60.0)
            policy.evict(8)
    counts = first._forecast.reused.count()
    assert counts is first._forecast.reused.total
    assert np.shares_memory(counts, second._forecast.reused.total)
    assert counts.sum() > 200
    for policy in (second, first, second):  # who counts last tells the others
        policy._forecast.refresh(np.zeros((KINDS, AGES)))
    assert np.array_equal(first._forecast.rates, second._forecast.rates)


def test_it_goes_on_where_a_dead_engine_has_ended() -> None:
    memory = learned()
    sharing(memory, 1000.0).use(range(8), keys(0, 8), 1000.0)
    later = Adaptive(100)
    later.load(range(20, 24), [400.0, 500.0, 600.0, 700.0])
    later.share(memory, 1010.0)
    later.use(range(8), keys(0, 8), 1010.0)
    assert came_back(kind(later, 0))
    assert later.evict(4) == [20, 21, 22, 23], "what was found before it shared is as old as it was"


def test_a_clock_that_was_put_back_begins_anew() -> None:
    memory = learned()
    sharing(memory, 1e6).use(range(8), keys(0, 8), 1e6)
    policy = sharing(memory, 5.0)
    policy.use(range(8), keys(0, 8), 5.0)
    assert not came_back(kind(policy, 0))
    assert sharing(memory, 6.0)._epoch == 5.0


@pytest.mark.parametrize("keeps_header", [True, False])
@pytest.mark.parametrize("fill", [b"\xff", b"\x7f", *range(6)])
def test_whatever_stands_there_does_no_harm(fill: bytes | int, keeps_header: bool) -> None:
    """Noise makes bad forecasts, and no more: each slot goes once, and those in use stay."""
    memory, dice = learned(), random.Random(str(fill))
    header = bytes(sharing(memory)._history._view[:16])
    memory[:] = fill * SIZE if isinstance(fill, bytes) else dice.randbytes(SIZE)
    if keeps_header:
        memory[:16] = header
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = sharing(memory, 100.0)
        for request in chats(dice, 60):
            if isinstance(fill, int):  # and others go on to write it
                at = dice.randrange(16, SIZE - 64)
                memory[at : at + 64] = dice.randbytes(64)
            free = policy.evict(100)[: len(request.blocks)] or list(range(100))
            slots = free[: len(request.blocks)]
            policy.use(slots, [b"%d" % block for block in request.blocks[: len(slots)]], 100.0)
            assert len(policy) == len(set(policy.victims(100))) == len(slots)
        policy._forecast.refresh(policy._history.waiting(policy._now, KINDS))


def test_it_does_not_grow_and_others_learn_nothing() -> None:
    policy = sharing(learned())
    policy.resize(100_000)
    assert policy._history.cells == history_cells(100)
    assert history_bytes(KINDS, history_cells(100)) == SIZE
    assert LRU(10).shared_bytes(100) == 0
    policy._history._forget()
    assert policy._history.waiting(0.0, KINDS).shape == (KINDS, AGES)


@pytest.mark.parametrize("retaining", [True, False])
def test_closing_lets_go_of_the_memory(retaining: bool) -> None:
    """Which has a descriptor of its own, else."""
    memory = mmap.mmap(-1, SIZE)
    policy: EvictionPolicy = Adaptive(100)
    if retaining:
        policy = RetainingPolicy(policy, lambda slot: False, lambda: 0)
    assert policy.shared_bytes(100) == SIZE
    policy.share(memoryview(memory), 1.0)
    policy.use(range(8), keys(0, 8), 2.0)
    with pytest.raises(BufferError):
        memory.close()
    policy.close()
    memory.close()
    policy.use(range(8), keys(0, 8), 3.0)
    assert policy.evict(8) == list(range(7, -1, -1))
