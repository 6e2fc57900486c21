"""What the scheduler's side makes of the workers' reports, and of the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
    TWO_GROUPS,
    WINDOW,
    AddingManager,
    Asking,
    manager,
    small_above_large,
    stored,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE
from kvtier.testing.subject import make_keys
from kvtier.types import GROUP_BYTES, BlockKey, Outcome
from kvtier.vllm.protocol import NO_SLOT, Report
from kvtier.vllm.requests import RequestState


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Stack]:
    """A dozen slots of host memory above a folder."""
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        yield stack


def ranks(stack: Stack, count: int) -> Asking:
    made = AddingManager(stack, region="region", ranks=count)
    made.shapes = {0: FULL}
    return Asking(made)


def test_what_is_stored_is_there_when_every_rank_has_said_so(stack: Stack) -> None:
    asking = ranks(stack, 3)
    managed, ends = asking.manager, asking.keys(3)
    managed.on_new_request("a")
    taken, worker_job = managed.prepare_store(list(ends), "a")
    assert taken == list(ends)
    for report in (Report(1), Report(1, {1: Outcome.IO_ERROR})):
        assert managed.report(worker_job.number, report) is None
        assert managed.copying
        assert managed.has_pending_work
        assert asking.hit("b", ends, 3 * CHUNK) == 0
    assert managed.report(worker_job.number, Report(1)) is None
    assert not managed.copying
    assert managed.failed_stores == 1
    assert asking.hit("c", ends, 3 * CHUNK) == CHUNK, "the second could not be stored by one of all"


def test_a_load_ends_when_every_rank_has_said_so(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    asking = ranks(stack, 2)
    managed, ends = asking.manager, asking.keys(3)
    stored(stack, ends)
    managed.on_new_request("a")
    for number in range(2):
        assert asking.hit("a", ends, 3 * CHUNK) == 3 * CHUNK, "and again, after one that went well"
        worker_job = managed.prepare_load(list(ends), "a")
        assert managed.report(worker_job.number, Report(1)) is None
        assert managed.copying
        assert stack.chain.tiers[0].stats().pinned == 3
        failures = {0: Outcome.CORRUPT} if number else {}
        with caplog.at_level(logging.WARNING):
            said = managed.report(worker_job.number, Report(1, failures))
        assert said == ("a" if number else None)
        assert managed.failed_loads == number
        assert ("3 blocks for request a failed (corrupt)" in caplog.text) is bool(number)
        assert not managed.copying
        assert stack.chain.tiers[0].stats().pinned == 0
    assert managed.report(worker_job.number, Report(2, {0: Outcome.CORRUPT})) is None, (
        "it has ended"
    )
    assert managed.failed_loads == 1


def test_a_load_may_fail_after_its_request_has_ended(stack: Stack) -> None:
    asking = manager(stack, FULL)
    managed, ends = asking.manager, asking.keys(3)
    stored(stack, ends)
    managed.on_new_request("a")
    assert asking.hit("a", ends, 3 * CHUNK) == 3 * CHUNK
    worker_job = managed.prepare_load(list(ends), "a")
    managed.on_request_finished("a")
    assert not managed.idle
    assert managed.report(worker_job.number, Report(1, {0: Outcome.GONE})) == "a"
    assert managed.idle


def test_nothing_is_kept_of_stores_that_are_distrusted(stack: Stack) -> None:
    """Those that were under way: what is stored later is trusted again, and so are loads."""
    asking = manager(stack, FULL)
    managed, ends, there = asking.manager, asking.keys(3), asking.keys(2, first=50)
    stored(stack, there)
    managed.on_new_request("a")
    assert asking.hit("b", there, 2 * CHUNK) == 2 * CHUNK
    load = managed.prepare_load(list(there), "b")
    _, store = managed.prepare_store(list(ends), "a")
    managed.distrust_stores()
    assert managed.report(load.number, Report(1)) is None
    assert managed.report(store.number, Report(1)) is None
    assert managed.failed_stores == 3
    assert asking.hit("c", ends, 3 * CHUNK) == 0
    assert asking.hit("d", there, 2 * CHUNK) == 2 * CHUNK
    _, store = managed.prepare_store(list(ends), "a")
    managed.report(store.number, Report(1))
    assert asking.hit("e", ends, 3 * CHUNK) == 3 * CHUNK


def test_steps_are_needed_until_the_tiers_below_have_what_was_stored(two_tiers: Stack) -> None:
    asking = manager(two_tiers, FULL)
    managed, ends = asking.manager, asking.keys(3)
    managed.on_new_request("a")
    _, worker_job = managed.prepare_store(list(ends), "a")
    managed.report(worker_job.number, Report(1))
    managed.on_request_finished("a")
    assert not managed.copying
    assert managed.has_pending_work
    assert not managed.idle
    assert two_tiers.settle()
    assert not managed.has_pending_work
    assert managed.idle


def test_a_load_has_as_long_as_its_slowest_tier(two_tiers: Stack) -> None:
    managed = AddingManager(two_tiers, region="region", ranks=1, clock=lambda: 100.0)
    managed.shapes = {0: FULL}
    asking = Asking(managed)
    ends = asking.keys(2)
    stored(two_tiers, ends)
    assert asking.hit("a", ends, 2 * CHUNK) == 2 * CHUNK
    worker_job = managed.prepare_load(list(ends), "a")
    longest = max(tier.load_deadline.seconds for tier in two_tiers.config.tiers)
    assert worker_job.deadline == 100.0 + longest
    managed.report(worker_job.number, Report(1))


def test_it_is_known_where_each_block_comes_from(two_tiers: Stack) -> None:
    asking = manager(two_tiers, FULL)
    managed, ends = asking.manager, asking.keys(4)
    stored(two_tiers, ends)
    assert two_tiers.settle()
    keys = list(ends)
    two_tiers.chain.tiers[0].forget([BlockKey(key) for key in keys[1:3]])
    for directly in (False, True):
        two_tiers.chain.read_directly(directly)
        assert asking.hit("a", ends, 4 * CHUNK) == 4 * CHUNK
        worker_job = managed.prepare_load(keys, "a")
        assert [managed.source_of(key, "a") for key in keys] == [0, 1, 1, 0]
        assert sorted(worker_job.files) == ([1, 2] if directly else [])
        assert [slot == NO_SLOT for slot in worker_job.slots] == [False, directly, directly, False]
        assert two_tiers.settle()
        managed.report(worker_job.number, Report(1))
        two_tiers.chain.tiers[0].forget([BlockKey(key) for key in keys[1:3]])


@pytest.mark.parametrize("able", [True, False])
def test_ranks_that_read_files_are_given_files(two_tiers: Stack, able: bool) -> None:
    """As soon as one says whether it can; and no more when it says that it cannot."""
    asking = manager(two_tiers, FULL)
    managed, ends = asking.manager, asking.keys(4)
    managed.on_new_request("a")
    for report, keys in ((Report(1, reads_files=not able), 2), (Report(1, reads_files=able), 4)):
        _, worker_job = managed.prepare_store(list(ends)[:keys], "a")
        managed.report(worker_job.number, report)
    assert two_tiers.settle()
    two_tiers.chain.tiers[0].clear()
    assert asking.hit("b", ends, 2 * CHUNK) == 2 * CHUNK
    worker_job = managed.prepare_load(list(ends)[:2], "b")
    assert bool(worker_job.files) is able
    assert two_tiers.settle()


def test_nobody_waits_for_room_that_no_load_holds(two_tiers: Stack) -> None:
    asking = manager(two_tiers, FULL)
    ends = asking.keys(4)
    stored(two_tiers, ends)
    assert two_tiers.settle()
    two_tiers.chain.tiers[0].clear()
    storing = [BlockKey(key) for key in asking.keys(12, first=50)]
    assert len(two_tiers.chain.prepare_store(storing).keys) == 12
    assert asking.answers("a", ends, 4 * CHUNK) == {False}


class Asked:
    """Counts the calls of one method of the chain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.count = 0
        original = getattr(TierChain, name)

        def counted(*args: object) -> object:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(TierChain, name, counted)


@pytest.mark.parametrize(
    ("shapes", "by"), [((FULL,), "match_prefix"), ((FULL, WINDOW), "match_windows")]
)
def test_the_chain_is_asked_once_a_step(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, shapes: tuple[Shape, ...], by: str
) -> None:
    asked = Asked(monkeypatch, by)
    asking = manager(stack, *shapes)
    ends = asking.keys(8)
    for steps in (1, 2):
        asking.hit("a", ends, 8 * CHUNK)
        assert asked.count == steps


def test_a_prompt_counts_as_used_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Asked(monkeypatch, "touch")
    asking = manager(stack, FULL)
    managed, ends = asking.manager, asking.keys(4)
    managed.on_new_request("unknown", None)
    managed.mark_used("unknown", ends)
    assert touched.count == 0, "its keys do not tell what it is"
    managed.on_new_request("a")
    for _ in range(3):
        managed.mark_used("a", ends)
    assert touched.count == 1


@pytest.mark.parametrize("count", [1, 2])
def test_loads_tell_how_fast_the_way_from_host_memory_is(stack: Stack, count: int) -> None:
    """Ranks that hold the same have each read all of it, side by side."""
    costs = CostModel(clock=lambda: 0.0)
    managed = AddingManager(stack, region="region", ranks=count, costs=costs)
    managed.shapes = {0: FULL}
    asking = Asking(managed)
    ends = asking.keys(4)
    stored(stack, ends)
    for _ in range(20):
        managed.on_new_request("a")
        assert asking.hit("a", ends, 4 * CHUNK) == 4 * CHUNK
        worker_job = managed.prepare_load(list(ends), "a")
        for _ in range(count):
            managed.report(worker_job.number, Report(1, {}, 5 << 20, 0.5, 1 << 20, 9.0))
        managed.on_request_finished("a")
    assert costs.load_seconds(DEVICE, 4 << 20) == pytest.approx(0.5, rel=0.05)
    assert costs.load_seconds(DEVICE, 8 << 20) == pytest.approx(1.0, rel=0.05)
    for _ in range(20):
        managed.on_new_request("b")
        assert asking.hit("b", ends, 4 * CHUNK) == 4 * CHUNK
        worker_job = managed.prepare_load(list(ends), "b")
        for _ in range(count):
            managed.report(worker_job.number, Report(1, {0: Outcome.TIMEOUT}, 5 << 20, 90.0))
        managed.on_request_finished("b")
    assert costs.load_seconds(DEVICE, 8 << 20) == pytest.approx(1.0, rel=0.05), "those failed"


def test_the_chain_is_told_where_the_engines_own_blocks_end(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def worth(
        chain: TierChain, keys: Sequence[BlockKey], tokens: int, start: int, decision: object
    ) -> int:
        asked.append((len(keys), tokens, start))
        return len(keys)

    monkeypatch.setattr(TierChain, "match_prefix", worth)
    asking = manager(stack, FULL)
    assert asking.hit("a", asking.keys(8), 6 * CHUNK + 9, start=2 * CHUNK) == 6 * CHUNK
    assert asked == [(4, CHUNK, 2 * CHUNK)]


def test_whoever_ends_a_step_learns_what_has_landed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = Asked(monkeypatch, "poll")
    manager(stack, FULL).manager.on_schedule_end()
    assert polled.count == 1


FINE = Shape(CHUNK // 2, 3)


def numbered(state: RequestState, keys: Sequence[BlockKey]) -> list[int]:
    """Known keys by their places among all of the request's."""
    every = [key for column in state.columns for key in column.known]
    return [every.index(key) for key in keys]


def test_blocks_of_several_groups_grow_token_by_token() -> None:
    shapes = {0: FULL, 3: FINE}
    coarse, fine = make_keys(2, group=0), make_keys(5, group=3)
    ends: dict[bytes, int] = {key: (at + 1) * CHUNK for at, key in enumerate(coarse)}
    ends |= {key: (at + 1) * CHUNK // 2 for at, key in enumerate(fine)}
    state = RequestState(salt=b"salt")
    state.arrange(shapes, ends, b"")
    assert [(column.group, column.asked) for column in state.columns] == [
        (0, coarse),
        (3, fine),
    ]
    known = [key for column in state.columns for key in column.known]
    assert not set(known) & set(ends), "salted"
    assert state.known_as([*coarse, *fine], b"") == known
    # two of the first group, then five of the second: at equal ends, windows come last
    assert numbered(state, state.as_it_grows(known[::-1])) == [2, 0, 3, 4, 1, 5, 6]
    (stranger,) = make_keys(1, start=99)
    assert state.as_it_grows([stranger, *known])[-1] == stranger


def test_a_single_group_grows_as_it_is_given() -> None:
    state = RequestState()
    keys = make_keys(3)
    state.arrange({0: FULL}, {key: (at + 1) * CHUNK for at, key in enumerate(keys)}, b"")
    assert state.as_it_grows(keys[::-1]) == keys[::-1]


def test_groups_that_are_not_kept_are_left_out() -> None:
    ours, other = make_keys(1), make_keys(1, group=7)
    state = RequestState()
    state.arrange({0: FULL}, {ours[0]: CHUNK, other[0]: CHUNK}, b"")
    assert [column.asked for column in state.columns] == [ours]
    assert other[0].endswith((7).to_bytes(GROUP_BYTES, "big"))
