"""The scheduler's side, asked the way vLLM asks: block by block, windows from their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
    SLOT,
    STATE,
    TWO_GROUPS,
    WINDOW,
    costs_of,
    manager,
    on_disk,
    small_above_large,
    stored,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.testing.subject import make_keys
from kvtier.types import GROUP_BYTES, BlockKey, Outcome, group_of
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.protocol import NO_SLOT, Report


@pytest.mark.parametrize(
    ("shapes", "exact"),
    [((FULL,), 5), ((FULL, WINDOW), 5), ((WINDOW,), 5), ((FULL, STATE), 4), ((FULL, FULL), 5)],
)
def test_every_kind_of_model_finds_its_prompt(
    stack: Stack, shapes: tuple[Shape, ...], exact: int
) -> None:
    asking = manager(stack, *shapes)
    ends = asking.keys(5)
    assert asking.hit("a", ends, 5 * CHUNK + 9) == 0
    stored(stack, ends)
    assert asking.hit("a", ends, 5 * CHUNK + 9) == 5 * CHUNK, "found while it waits"
    assert asking.hit("b", ends, 5 * CHUNK + 9, start=2 * CHUNK) == 5 * CHUNK
    whole = asking.hit("c", ends, 5 * CHUNK)
    assert whole in (exact * CHUNK, exact * CHUNK - 1), "one token is left where there are windows"


def test_what_is_loaded_is_what_was_answered(stack: Stack) -> None:
    asking = manager(stack, FULL, WINDOW)
    ends = asking.keys(6)
    stored(stack, ends, but=2)
    assert asking.hit("a", ends, 6 * CHUNK + 1) == 4 * CHUNK
    suffix = bytes(GROUP_BYTES)
    full = [key for key in ends if key.endswith(suffix)][:4]
    window = [key for key in ends if not key.endswith(suffix)][2:4]
    worker_job = asking.manager.prepare_load([*full, *window], "a")
    assert NO_SLOT not in worker_job.slots
    assert asking.manager.report(worker_job.number, Report(1)) is None
    assert not asking.manager.has_pending_work


def test_a_request_whose_load_failed_is_offered_nothing(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(4)
    stored(stack, ends)
    asking.manager.on_new_request("a")
    assert asking.hit("a", ends, 4 * CHUNK) == 4 * CHUNK
    worker_job = asking.manager.prepare_load(list(ends), "a")
    failures = {1: Outcome.CORRUPT, 2: Outcome.CANCELLED, 3: Outcome.CORRUPT}
    assert asking.manager.report(worker_job.number, Report(1, failures)) == "a"
    assert asking.hit("a", ends, 4 * CHUNK) == 0
    asking.manager.on_request_finished("a")
    assert asking.hit("b", ends, 4 * CHUNK) == CHUNK
    assert asking.manager.chain.tiers[0].stats().corrupt == 2, "both at once"


def test_a_request_that_nobody_has_added_leaves_nothing_behind(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(4)
    stored(stack, ends)
    managed = ChainManager(stack, region="region", ranks=1)
    managed.shapes = asking.manager.shapes
    for ended in (False, True):
        if ended:
            managed.on_new_request("a")
            managed.on_request_finished("a")
        managed.begin_lookup("a", 0, 4 * CHUNK)
        assert managed.lookup(next(iter(ends)), "a", ends) is False
        assert not managed.still_deferred("a", ends)
        managed.mark_used("a", ends)
        managed.scheduled("a", 0, CHUNK)
        fresh = make_keys(2, start=100)
        assert managed.prepare_store(fresh, "a")[0] == [], "nobody knows what its keys leave out"
        assert len(managed._requests) == 0


def test_a_load_that_cannot_be_prepared_is_not_tried_for_ever(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong, the engine has begun the load: it fails, and the request asks again."""
    asking = manager(stack, FULL)
    ends = asking.keys(4)
    stored(stack, ends)
    assert asking.hit("a", ends, 4 * CHUNK) == 4 * CHUNK
    monkeypatch.delattr("kvtier.chain.tier_chain.TierChain.begin_load")
    with pytest.raises(AttributeError):
        asking.manager.prepare_load(list(ends), "a")
    assert asking.hit("a", ends, 4 * CHUNK) == 0


def test_a_failure_that_blames_a_block_is_kept_over_one_that_does_not() -> None:
    one = Report(1, {0: Outcome.CORRUPT, 1: Outcome.CANCELLED})
    two = Report(1, {0: Outcome.CANCELLED, 1: Outcome.CORRUPT, 2: Outcome.CANCELLED})
    bad, left = Outcome.CORRUPT, Outcome.CANCELLED
    assert one.merge(two).failures == {0: bad, 1: bad, 2: left}
    assert two.merge(one).failures == {0: bad, 1: bad, 2: left}


def test_of_ranks_the_slowest_counts_and_files_are_read_only_if_all_can() -> None:
    quick = Report(1, {}, 10, 0.5, 4, 2.0, reads_files=True)
    slow = Report(2, {}, 20, 1.5, 6, 1.0, reads_files=False)
    both = Report(3, {}, 30, 1.5, 10, 2.0, reads_files=False)
    assert quick.merge(slow) == slow.merge(quick) == both
    assert quick.merge(quick).reads_files
    assert not slow.merge(slow).reads_files


def test_a_salt_and_a_reset_make_other_keys(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(3)
    stored(stack, ends)
    asking.manager.on_new_request("salted", b"adapter")
    assert asking.hit("salted", ends, 3 * CHUNK) == 0
    asking.manager.on_new_request("plain")
    assert asking.hit("plain", ends, 3 * CHUNK) == 3 * CHUNK
    asking.manager.reset()
    stored(stack, ends)
    assert asking.hit("plain", ends, 3 * CHUNK) == 0, "under the keys of before"


def test_nothing_is_found_or_kept_until_it_is_known_what_a_requests_keys_stand_for(
    stack: Stack,
) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(3)
    stored(stack, ends)
    for at, (name, salt) in enumerate((("known", b""), ("unknown", None), ("reset", b"")), 1):
        others = asking.keys(2, first=10 * at)
        asking.manager.on_new_request(name, identified=False)
        assert asking.hit(name, ends, 3 * CHUNK) == 0
        assert asking.manager.prepare_store(list(others), name)[0] == []
        if name == "reset":
            asking.manager.reset()
        asking.manager.identify(name, salt)
        kept = asking.manager.prepare_store(list(others), name)[0] != []
        assert (asking.hit(name, ends, 3 * CHUNK) > 0) is kept is (name == "known")


@pytest.mark.parametrize("more", [0, 4])
@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW), (STATE, FULL), (WINDOW,)])
def test_what_the_engine_has_itself_counts_as_used(
    stack: Stack, shapes: tuple[Shape, ...], more: int
) -> None:
    """It asks for nothing of it here; other prompts that fill the tier must not push it out. Nor,
    if the prompt goes on, the window or the state at the end of what it has."""
    asking = manager(stack, *shapes)
    hot, cold = (asking.keys(16, first=at) for at in (0, 100))
    longer = asking.keys(16 + more)
    asking.serve("first", hot)
    asking.serve("other", cold)
    for each in range(40):
        asking.manager.begin_lookup("again", 16 * CHUNK, (16 + more) * CHUNK + 9)
        asking.manager.mark_used("again", longer)
        asking.manager.on_request_finished("again")
        asking.serve("new", asking.keys(9, first=200 + 20 * each))
    assert asking.serve("hot", longer) == 16 * CHUNK
    assert asking.serve("cold", cold) < 16 * CHUNK


@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW), (STATE, FULL)])
def test_what_many_prompts_begin_with_stays(stack: Stack, shapes: tuple[Shape, ...]) -> None:
    """Also its window, or state: others push out what they used once, and nothing of this."""
    asking = manager(stack, *shapes)
    found = []
    for each in range(12):
        begun = {key: end for key, end in asking.keys(6).items() if end <= 6 * CHUNK}
        asked: dict[bytes, int] = {}
        for group in asking.manager.shapes:
            mine = {key: end for key, end in begun.items() if group_of(BlockKey(key)) == group}
            own = make_keys(3, start=100 * (each + 1), group=group)
            asked |= mine | {key: (6 + at) * CHUNK for at, key in enumerate(own, 1)}
        found.append(asking.serve("asks", asked))
        for other in range(3):
            asking.serve("other", asking.keys(8, first=10_000 + 100 * each + 20 * other))
    assert found[2:] == [6 * CHUNK] * 10


def test_it_is_known_where_prompts_part(stack: Stack) -> None:
    """Of the first nothing was kept there but what has no window."""
    asking = manager(stack, FULL, WINDOW)
    ends = asking.keys(5)
    assert asking.hit("first", ends, 5 * CHUNK) == 0
    assert asking.manager.junction("first") == 0
    whole, windows = list(ends.items())[:5], list(ends.items())[5:]
    stored(stack, dict(whole[:3]))
    for limit, junction in ((5 * CHUNK, 3), (2 * CHUNK + 1, 2)):
        assert asking.hit("second", ends, limit) == 0
        assert asking.manager.junction("second") == junction * CHUNK
    stored(stack, dict(windows[1:3]))
    assert asking.hit("third", ends, 5 * CHUNK) == 3 * CHUNK
    assert asking.manager.junction("third") == 0


def test_nothing_is_kept_of_a_request_that_was_there_before_a_reset(stack: Stack) -> None:
    """Its blocks may be of other weights; and vLLM offers all of them again, though a window that
    has moved on has given some of them to other requests."""
    asking = manager(stack, FULL)
    ends = asking.keys(3)
    asking.manager.on_new_request("before")
    asking.manager.reset()
    asking.manager.on_new_request("after")
    for request, count in (("before", 0), ("after", 3)):
        taken, worker_job = asking.manager.prepare_store(list(ends), request)
        assert len(taken) == len(worker_job.slots) == count
        asking.manager.report(worker_job.number, Report(1))
    assert asking.hit("before", ends, 3 * CHUNK) == 3 * CHUNK, "it may load what is there since"
    assert not asking.manager.has_pending_work


def test_who_pauses_keeps_all_but_what_is_being_stored(stack: Stack) -> None:
    """The device's memory may go amid that, and be copied all the same."""
    asking = manager(stack, FULL)
    ends = asking.keys(5)
    stored(stack, dict(list(ends.items())[:3]))
    asking.manager.on_new_request("before")
    taken, worker_job = asking.manager.prepare_store(list(ends), "before")
    assert len(taken) == 2
    asking.manager.reset(keep=True)
    asking.manager.report(worker_job.number, Report(1))
    assert asking.hit("after", ends, 5 * CHUNK) == 3 * CHUNK


def test_nothing_is_kept_of_a_request_whose_keys_do_not_tell_enough(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(3)
    for request, found in (("unknown", 0), ("known", 3 * CHUNK)):
        asking.manager.on_new_request(request, None if request == "unknown" else b"")
        assert asking.hit(request, ends, 3 * CHUNK) == 0
        taken, worker_job = asking.manager.prepare_store(list(ends), request)
        asking.manager.report(worker_job.number, Report(1))
        assert len(taken) * CHUNK == found
        assert not asking.manager.has_pending_work
        asking.manager.on_request_finished(request)
    asking.manager.on_new_request("late", None)
    assert asking.hit("late", ends, 3 * CHUNK) == 0
    assert asking.hit("other", ends, 3 * CHUNK) == 3 * CHUNK


def test_of_a_request_that_has_failed_nothing_more_is_kept(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = list(asking.keys(2))
    asking.manager.on_new_request("failing")
    for keys, kept in ((ends[:1], 1), (ends[1:], 0)):
        taken, worker_job = asking.manager.prepare_store(keys, "failing")
        assert len(taken) == kept
        asking.manager.report(worker_job.number, Report(1))
        asking.manager.keep_no_more("failing")
    assert not asking.manager.has_pending_work


def test_a_request_that_has_ended_is_not_known_again(stack: Stack) -> None:
    """vLLM has it until its last store is done, and may say then that nothing is to be kept."""
    managed = manager(stack, FULL).manager
    managed.on_new_request("a")
    managed.on_request_finished("a")
    managed.keep_no_more("a")
    assert managed.idle


def test_a_load_slower_than_computing_is_taken_while_others_wait(tmp_path: Path) -> None:
    """Those who came and were not asked about yet, after a whole step."""
    now = [0.0]
    costs = costs_of(now)
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS, costs=costs) as stack:
        asking = manager(stack, FULL, costs=costs, clock=lambda: now[0])
        made = asking.manager
        prompts = {name: asking.keys(4, first=100 * at) for at, name in enumerate("abcd")}
        on_disk(stack, *prompts.values())
        for _ in range(20):
            costs.observe_load("nvme", 4 * SLOT, 1.5)
        costs._link("nvme").next_probe = float("inf")
        for name in prompts:
            made.on_new_request(name)
        assert asking.hit("a", prompts["a"], 4 * CHUNK) == 0
        made.scheduled("a")
        made.step_began(1024, 0)
        assert asking.hit("b", prompts["b"], 4 * CHUNK) == 4 * CHUNK, "two wait behind it"
        made.scheduled("b")
        made.on_request_finished("c")
        made.load.pace.ended()  # else the load would end before the engine had come to it
        assert asking.hit("d", prompts["d"], 4 * CHUNK) == 0, "nobody does"


@pytest.mark.parametrize(("storing", "start", "chunks"), [(8, 0, 2), (12, CHUNK // 2, 0)])
def test_no_more_is_found_than_is_taken_though_more_is_there(
    tmp_path: Path, storing: int, start: int, chunks: int
) -> None:
    """For want of room, which no load holds: four slots are left, or fewer than a chunk takes."""
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL, WINDOW)
        ends = asking.keys(6)
        on_disk(stack, ends)
        held = [BlockKey(key) for key in make_keys(storing, start=500)]
        assert len(stack.chain.prepare_store(held).keys) == storing
        asking.manager.begin_lookup("a", start, 6 * CHUNK + 1)
        found = [end // CHUNK for key, end in ends.items() if asking.manager.lookup(key, "a", ends)]
        assert found == [*range(1, chunks + 1)] * 2


def test_keys_that_end_within_a_chunk_are_not_found(stack: Stack) -> None:
    asking = manager(stack, FULL)
    ends = asking.keys(3)
    (stray,) = make_keys(1, start=77)
    ends[stray] = 2 * CHUNK + 16
    stored(stack, ends)
    assert asking.hit("a", ends, 3 * CHUNK) == 3 * CHUNK
    assert not asking.manager.lookup(stray, "a", ends)
