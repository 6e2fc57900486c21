"""Requests that wait: for room that others' loads hold, and for what is loaded for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
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
from kvtier.chain.tier_chain import TierChain
from kvtier.types import BlockKey, group_of
from kvtier.vllm.deferrals import ROOM_WAIT_S
from kvtier.vllm.protocol import Report


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the chain is asked of requests."""
    questions: list[object] = []
    plain = TierChain.match_prefix

    def worth(chain: TierChain, *question: Any) -> int:
        questions.append(question)
        return plain(chain, *question)

    monkeypatch.setattr(TierChain, "match_prefix", worth)
    return questions


@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("deadline", [10.0, 2.5])
def test_a_load_waits_for_room_that_others_hold(
    tmp_path: Path, shapes: tuple[Shape, ...], known: bool, deadline: float
) -> None:
    """While these load, quickly; and no longer than it takes to compute the prompt."""
    now = [0.0]
    costs = costs_of(now, known=known)
    tiers = small_above_large(tmp_path)
    for tier in tiers["tiers"]:
        tier["load_deadline"] = deadline
    with Stack.open(tiers, TWO_GROUPS, costs=costs) as stack:
        asking = manager(stack, *shapes, costs=costs, clock=lambda: now[0])
        made = asking.manager
        prompts = {name: asking.keys(8, first=100 * at) for at, name in enumerate("abcd")}
        needed = [{key: ends[key] for key in asking.needed(ends)} for ends in prompts.values()]
        on_disk(stack, *needed)
        sizes = {name: max(ends.values()) for name, ends in prompts.items()}

        def asks_again(name: str) -> bool:
            found = asking.answers(name, prompts[name], sizes[name] + 1)
            made.on_schedule_end()
            return found == {None}

        assert asking.hit("a", prompts["a"], sizes["a"] + 1) == sizes["a"]
        worker_job = made.prepare_load(asking.needed(prompts["a"]), "a")
        assert stack.settle(), "all has landed, and the worker still reads it"
        assert asks_again("b")
        now[0] = ROOM_WAIT_S - 0.01
        assert asks_again("b")
        now[0] = 3.0
        if known:
            made.on_new_request("behind")
            made.step_began(1024, 0)
            patient = deadline > now[0]
            assert asks_again("b") is patient, "it spares another the two seconds of its prompt"
            made.on_request_finished("behind")
        assert not asks_again("b"), "for too long"
        made.scheduled("b")
        assert asks_again("b"), "computed, and preempted later: it waits anew"
        costs.started("nvme", -1, 1 << 40)
        assert asks_again("c") is not known, "what is under way is slow, and known to be"
        costs.ended("nvme", -1, False, 0.0)
        assert asks_again("d")
        made.report(worker_job.number, Report(1))
        assert not asks_again("d")
        assert asking.hit("d", prompts["d"], sizes["d"] + 1) == sizes["d"]


def test_those_who_wait_for_room_are_not_looked_up_in_each_step(
    tmp_path: Path, looks: list[object]
) -> None:
    """Hundreds may wait, with hundreds of blocks each. Nor does anybody behind them get what room
    there is for them."""
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        made = asking.manager
        prompts = {name: asking.keys(8, first=100 * at) for at, name in enumerate("abc")}
        on_disk(stack, *prompts.values())
        assert asking.hit("a", prompts["a"], 8 * CHUNK + 1) == 8 * CHUNK
        worker_job = made.prepare_load(list(prompts["a"]), "a")
        assert stack.settle(), "of 13 slots five are left"
        wanted = {"b": 8, "c": 4}

        def still_wait() -> list[str]:
            made.on_schedule_end()
            for name, chunks in wanted.items():
                made.begin_lookup(name, 0, chunks * CHUNK + 1)
            return [name for name in wanted if made.still_deferred(name, prompts[name])]

        assert still_wait() == [], "they have not been told to"
        for name, chunks in wanted.items():
            assert None in asking.answers(name, prompts[name], chunks * CHUNK + 1)
        asked = len(looks)
        assert still_wait() == still_wait() == ["b", "c"]
        assert len(looks) == asked
        made.report(worker_job.number, Report(1))
        assert still_wait() == [], "there is room for both"
        assert len(looks) == asked + 2
        made.on_schedule_end()
        assert asking.hit("b", prompts["b"], 8 * CHUNK + 1) == 8 * CHUNK
        assert asking.hit("c", prompts["c"], 4 * CHUNK + 1) == 4 * CHUNK


def test_those_who_wait_for_anothers_load_are_not_looked_up_in_each_step(
    tmp_path: Path, looks: list[object]
) -> None:
    """vLLM puts off all whose prompts begin like one that is being loaded. Nobody behind them gets
    the room that there is for the rest of theirs."""
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        made = asking.manager
        longer, other = asking.keys(5), asking.keys(6, first=100)
        shared = dict(list(longer.items())[:3])
        on_disk(stack, longer, other)
        assert asking.hit("a", shared, 3 * CHUNK + 1) == 3 * CHUNK
        worker_job = made.prepare_load(list(shared), "a")
        assert stack.settle(), "of 13 slots ten are left"
        made.on_schedule_end()
        assert asking.hit("b", longer, 5 * CHUNK + 1) == 5 * CHUNK
        made.defer("b", shared)

        def still_deferred(start: int = 0) -> bool:
            made.on_schedule_end()
            made.begin_lookup("b", start, 5 * CHUNK + 1)
            return made.still_deferred("b", longer, shared)

        asked = len(looks)
        assert still_deferred()
        made.defer("b", shared)
        assert still_deferred()
        assert len(looks) == asked
        assert None in asking.answers("c", other, 6 * CHUNK + 1), "five of ten are for the first"
        assert not still_deferred(CHUNK), "the engine has computed a part of it for another"
        assert still_deferred()
        made.report(worker_job.number, Report(1))
        made.begin_lookup("b", 0, 5 * CHUNK + 1)
        assert not made.still_deferred("b", longer)
        made.on_schedule_end()
        assert asking.hit("b", longer, 5 * CHUNK + 1) == 5 * CHUNK
        made.scheduled("b")
        assert not still_deferred()


@pytest.mark.parametrize("shapes", [(FULL,), (WINDOW, FULL), (STATE, FULL)])
def test_who_waits_for_anothers_load_is_looked_up_if_it_need_not_be_for_that(
    stack: Stack, shapes: tuple[Shape, ...]
) -> None:
    """Of windows nobody knows which of their blocks a load takes before it begins."""
    asking = manager(stack, *shapes)
    made = asking.manager
    ends = asking.keys(6)
    stored(stack, ends)
    full = [key for key in ends if made.shapes[group_of(BlockKey(key))].window is None]
    unknown = BlockKey(full[5][::-1])

    def waits(name: str, *loading: bytes, start: int = 0) -> bool:
        assert asking.hit(name, ends, 6 * CHUNK + 1, start) == 6 * CHUNK
        made.defer(name, set(loading))
        made.on_schedule_end()
        made.begin_lookup(name, start, 6 * CHUNK + 1)
        return made.still_deferred(name, ends, set(loading))

    assert waits("its end", full[5])
    assert waits("its beginning", full[0])
    assert not waits("nothing")
    assert not waits("what the engine has", full[0], start=CHUNK)
    assert waits("what it has not", full[0], full[1], start=CHUNK)
    assert not waits("another's", unknown)
    assert not waits("windows", *(ends.keys() - full))


def test_one_that_waits_for_room_is_looked_up_when_it_asks_for_less(tmp_path: Path) -> None:
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        made = asking.manager
        first, second = (asking.keys(8, first=at) for at in (0, 100))
        on_disk(stack, first, second)
        assert asking.hit("a", first, 8 * CHUNK + 1) == 8 * CHUNK
        made.prepare_load(list(first), "a")
        assert stack.settle()
        made.on_schedule_end()
        assert None in asking.answers("b", second, 8 * CHUNK + 1)
        made.on_schedule_end()
        made.begin_lookup("b", 4 * CHUNK, 8 * CHUNK + 1)
        assert not made.still_deferred("b", second), (
            "the engine has computed half of it for another"
        )
        made.reset()
        assert not made.still_deferred("b", second)


def test_nobody_waits_for_the_last_of_several_loads_if_the_first_makes_room(
    tmp_path: Path,
) -> None:
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        made = asking.manager
        prompts = {name: asking.keys(4, first=100 * at) for at, name in enumerate("ab")}
        waiting = asking.keys(8, first=1000)
        on_disk(stack, waiting, *prompts.values())
        worker_jobs = []
        for name, ends in prompts.items():
            assert asking.hit(name, ends, 4 * CHUNK + 1) == 4 * CHUNK
            worker_jobs.append(made.prepare_load(list(ends), name))
        assert stack.settle()
        made.on_schedule_end()
        assert asking.answers("c", waiting, 8 * CHUNK + 1) == {None}
        made.on_schedule_end()
        made.begin_lookup("c", 0, 8 * CHUNK + 1)
        assert made.still_deferred("c", waiting)
        made.report(worker_jobs[0].number, Report(1))
        made.on_schedule_end()
        made.begin_lookup("c", 0, 8 * CHUNK + 1)
        assert not made.still_deferred("c", waiting)
        assert asking.hit("c", waiting, 8 * CHUNK + 1) == 8 * CHUNK
        made.report(worker_jobs[1].number, Report(1))


def test_nobody_waits_on_for_room_that_no_load_holds_any_more(tmp_path: Path) -> None:
    """The load has ended, and what it held has gone to a store at once."""
    with Stack.open(small_above_large(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        made = asking.manager
        first, second = (asking.keys(8, first=at) for at in (0, 100))
        on_disk(stack, first, second)
        assert asking.hit("a", first, 8 * CHUNK + 1) == 8 * CHUNK
        worker_job = made.prepare_load(list(first), "a")
        assert stack.settle()
        made.on_schedule_end()
        assert asking.answers("b", second, 8 * CHUNK + 1) == {None}
        made.report(worker_job.number, Report(1))
        made.on_schedule_end()
        storing = [BlockKey(key) for key in asking.keys(12, first=200)]
        assert len(stack.chain.prepare_store(storing).keys) == 12
        made.begin_lookup("b", 0, 8 * CHUNK + 1)
        assert not made.still_deferred("b", second)
