"""What the scheduler's side prefetches for requests that wait, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    Asking,
    costs_of,
    manager,
    on_disk,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.types import BlockKey, Presence
from kvtier.vllm.waiting_prefetches import LOOK_AGAIN_S, NEW_LOOKS, Waits


def came(
    asking: Asking,
    request: str,
    ends: dict[bytes, int],
    rank: tuple[float, ...] = (),
    cached: int = 0,
) -> None:
    """A request is added, of whose prompt the engine itself has so many tokens."""
    asking.manager.on_new_request(request)
    has = {key for key, end in ends.items() if end <= cached}
    waits = Waits(rank, ends, max(ends.values()) + 1, has.__contains__)
    asking.manager.ahead.came(request, waits)


def arrive(stack: Stack) -> None:
    """Let all come that is under way."""
    assert stack.settle()


def here(stack: Stack, ends: dict[bytes, int]) -> int:
    found = stack.chain.tiers[0].lookup([BlockKey(key) for key in ends])
    return found.count(Presence.HIT)


@pytest.mark.parametrize(
    ("shapes", "needed"),
    [((FULL,), 6), ((FULL, WINDOW), 6 + 2), ((FULL, STATE), 6 + 1)],
)
def test_what_its_load_will_take_comes_while_it_waits(
    open_stack: Callable[..., Stack], shapes: tuple[Shape, ...], needed: int
) -> None:
    stack = open_stack()
    asking = manager(stack, *shapes)
    ends = asking.keys(6)
    on_disk(stack, ends)
    came(asking, "a", ends)
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == needed
    tokens = max(ends.values()) + 1
    assert asking.hit("a", ends, tokens) == 6 * CHUNK
    asking.manager.scheduled("a")
    worker_job = asking.manager.prepare_load(asking.needed(ends), "a")
    asking.manager.on_schedule_end()
    assert asking.manager.source_of(next(iter(ends)), "a") == 0
    found = stack.chain.chain_stats().prefetch
    assert found.used == found.arrived == [0, needed]
    assert found.saved_seconds > 0
    assert worker_job.number


def test_what_becomes_known_while_it_waits_comes_too(open_stack: Callable[..., Stack]) -> None:
    """As of a neighbour, whose table is read a moment later."""
    now = [0.0]
    stack = open_stack()
    asking = manager(stack, FULL, clock=lambda: now[0])
    ends = asking.keys(6)
    first, later = list(ends)[:2], list(ends)[2:]
    on_disk(stack, {key: ends[key] for key in first})
    came(asking, "a", ends)
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == 2
    on_disk(stack, {key: ends[key] for key in later})
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == 2, "not looked for in each step"
    now[0] += LOOK_AGAIN_S
    for _ in range(2):
        asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == 6


def test_the_next_turn_is_prefetched_first(open_stack: Callable[..., Stack]) -> None:
    stack = open_stack(slots=17)  # one of them for its table: and so 8 blocks at most
    asking = manager(stack, FULL)
    prompts = [asking.keys(6, first=first) for first in (0, 6, 12)]
    on_disk(stack, *prompts)
    for name, rank, ends in zip("abc", (5.0, 0.0, 1.0), prompts, strict=True):
        came(asking, name, ends, rank=(rank,))
    asking.manager.on_schedule_end()
    arrive(stack)
    assert [here(stack, ends) for ends in prompts] == [0, 6, 2]
    asking.manager.on_request_finished("b")
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, prompts[1]) == 0
    assert here(stack, prompts[2]) > 2


def test_what_the_engine_itself_has_is_left_where_it_is(open_stack: Callable[..., Stack]) -> None:
    stack = open_stack()
    asking = manager(stack, FULL)
    ends = asking.keys(6)
    on_disk(stack, ends)
    came(asking, "a", ends, cached=4 * CHUNK)
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == 2


def test_one_that_is_served_at_once_has_nothing_prefetched(
    open_stack: Callable[..., Stack],
) -> None:
    stack = open_stack()
    asking = manager(stack, FULL)
    ends = asking.keys(6)
    on_disk(stack, ends)
    came(asking, "a", ends)
    asking.hit("a", ends, max(ends.values()) + 1)
    asking.manager.scheduled("a")
    asking.manager.on_schedule_end()
    assert not stack.chain.has_pending_work


def test_nothing_is_prefetched_that_is_computed_sooner(open_stack: Callable[..., Stack]) -> None:
    stack, now = open_stack(), [100.0]
    costs = costs_of(now)
    stack.chain._context.costs = costs
    asking = manager(stack, FULL, costs=costs, clock=lambda: now[0])
    prompts = [asking.keys(4, first=first) for first in (0, 4, 8)]
    on_disk(stack, *prompts)
    for name in "de":  # whose turns come a second after each other
        came(asking, name, asking.keys(1, first=20))
        asking.manager.on_schedule_end()
        now[0] += 1.0
        asking.manager.scheduled(name)
    size = 4 * stack.namespace.payload_bytes
    costs.observe_load("nvme", size, 60.0)
    came(asking, "a", prompts[0])
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, prompts[0]) == 0
    for _ in range(8):
        costs.observe_load("nvme", size, 0.1)
    came(asking, "b", prompts[1])
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, prompts[1]) == 4


def test_a_step_looks_at_few_that_are_new(open_stack: Callable[..., Stack]) -> None:
    stack = open_stack()
    asking = manager(stack, FULL)
    prompts = [asking.keys(1, first=first) for first in range(NEW_LOOKS + 2)]
    on_disk(stack, *prompts)
    for number, ends in enumerate(prompts):
        came(asking, str(number), ends)
    asking.manager.on_schedule_end()
    arrive(stack)
    assert sum(here(stack, ends) for ends in prompts) == NEW_LOOKS
    asking.manager.on_schedule_end()
    arrive(stack)
    assert sum(here(stack, ends) for ends in prompts) == NEW_LOOKS + 2


def test_after_a_reset_nothing_is_looked_for(open_stack: Callable[..., Stack]) -> None:
    stack = open_stack()
    asking = manager(stack, FULL)
    ends = asking.keys(6)
    on_disk(stack, ends)
    came(asking, "a", ends)
    asking.manager.on_schedule_end()
    asking.manager.reset()
    asking.manager.on_schedule_end()
    arrive(stack)
    assert here(stack, ends) == 0
    assert not stack.chain.has_pending_work


def test_a_storm_of_aborted_requests_leaves_nothing_behind(
    open_stack: Callable[..., Stack],
) -> None:
    stack = open_stack()
    asking = manager(stack, FULL)
    prompts = [asking.keys(4, first=first) for first in range(0, 80, 4)]
    on_disk(stack, *prompts)
    for number, ends in enumerate(prompts):
        came(asking, f"hostile {number}", ends)
        asking.manager.on_schedule_end()
        if number % 2:
            arrive(stack)
        if number >= 3:
            asking.manager.on_request_finished(f"hostile {number - 3}")
    for number in range(len(prompts)):
        asking.manager.on_request_finished(f"hostile {number}")
    asking.manager.on_schedule_end()
    arrive(stack)
    assert [here(stack, ends) for ends in prompts] == [0] * len(prompts)
    held = stack.chain.tiers[0].stats()
    assert (held.blocks, held.pinned, held.in_flight) == (0, 0, 0)
    assert stack.chain.tiers[1].stats().pinned == 0
    assert not asking.manager.ahead._known
    assert not asking.manager.ahead._queue
    assert asking.manager.idle
    assert stack.chain.prefetches.share.blocks < 16
