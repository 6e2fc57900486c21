"""Plans are pure, so they are held to their sentences over every small input."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers.chains import rule

from kvtier.chain.plan import (
    COMING,
    HOST,
    JOINING,
    NOWHERE,
    RUNS_MAX,
    gather,
    plan_host,
    plan_links,
    plan_lower,
    plan_room,
    plan_runs,
)
from kvtier.cost.rates import DEVICE, LoadRun
from kvtier.settings import Admission, WritePolicy
from kvtier.testing.memory import MemorySpec
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey, Presence

KEYS = make_keys(4)
HIT, PENDING, MISS = Presence.HIT, Presence.PENDING, Presence.MISS


def test_every_tier_is_fed_by_the_nearest_one_that_is_written_to() -> None:
    for writes in product(WritePolicy, repeat=3):
        second = Admission.SECOND_TOUCH
        links = plan_links([rule(), *[rule(write, second) for write in writes]])
        written = [at for at, write in enumerate(writes, 1) if write is not WritePolicy.NEVER]
        assert [link.target for link in links] == written
        assert [link.source for link in links] == [HOST, *written[:-1]][: len(written)]
        assert [link.write for link in links] == [writes[at - 1] for at in written]
        assert {link.admission for link in links} <= {second}, "the rules are those of the target"


@pytest.mark.parametrize("answers", list(product(Presence, repeat=3)))
def test_what_host_memory_knows(answers: tuple[Presence, ...]) -> None:
    keys = KEYS[:3]
    assert plan_host(keys, answers, {}, set()) == [
        {HIT: HOST, MISS: NOWHERE, PENDING: COMING}[answer] for answer in answers
    ]
    for ours, lost in product([set(), {KEYS[0]}], [set(), {KEYS[1]}]):
        for key, answer, origin in zip(
            keys, answers, plan_host(keys, answers, ours, lost), strict=True
        ):
            if answer is HIT:
                assert origin == HOST
            elif answer is MISS or key in lost:
                assert origin == NOWHERE
            else:
                assert origin == (JOINING if key in ours else COMING)


def locate(columns: list[tuple[Presence, ...]]) -> list[int]:
    """Fold the answers of several tiers as a chain does."""
    origins = plan_host(KEYS, columns[0], {}, set())
    asked = [at for at, origin in enumerate(origins) if origin == NOWHERE]
    for tier, column in enumerate(columns[1:], 1):
        origins, asked = plan_lower(origins, asked, tier, [column[at] for at in asked])
    return origins


@pytest.mark.parametrize("host", list(product(Presence, repeat=4)))
def test_the_nearest_tier_gives_a_block(host: tuple[Presence, ...]) -> None:
    for near, far in product(product(Presence, repeat=2), repeat=2):
        columns = [host, near * 2, far * 2]
        for at, origin in enumerate(locate(columns)):
            known = [column[at] for column in columns]
            if known[0] is not MISS:
                assert origin == (HOST if known[0] is HIT else COMING)
            elif HIT in known:
                assert origin == known.index(HIT)
            else:
                assert origin == (COMING if PENDING in known else NOWHERE)


def test_lower_answers_leave_other_plans_alone() -> None:
    origins = [HOST, NOWHERE, JOINING, NOWHERE]
    placed, left = plan_lower(origins, [1, 3], 2, [HIT, MISS])
    assert origins == [HOST, NOWHERE, JOINING, NOWHERE]
    assert placed == [HOST, 2, JOINING, NOWHERE]
    assert left == [3]


@pytest.mark.parametrize("room", range(-1, 6))
def test_no_more_is_promised_than_there_is_room_for(room: int) -> None:
    for origins in product([HOST, 1, 2, NOWHERE, COMING, JOINING], repeat=4):
        for promised in ({}, {KEYS[0]: origins[0]} if origins[0] >= HOST else {}):
            kept = plan_room(KEYS, list(origins), promised, room)
            fresh = [at for at in range(4) if origins[at] >= HOST and KEYS[at] not in promised]
            lower = [at for at in fresh if origins[at] > HOST]
            given_up = [at for at in range(4) if kept[at] != origins[at]]
            assert all(kept[at] == NOWHERE and at in fresh for at in given_up)
            kept_lower = [at for at in lower if kept[at] != NOWHERE]
            assert kept_lower == lower[: len(kept_lower)], "the head of a prefix comes first"
            spoken_for = any(tier > HOST for tier in promised.values())
            taken = [at for at in fresh if kept[at] != NOWHERE]
            if kept_lower or spoken_for:
                assert len(taken) <= max(room, 0)
            else:
                assert all(kept[at] == HOST for at in fresh if origins[at] == HOST)
            assert given_up == [] or len(fresh) > room, "nothing is given up without need"


def test_runs_are_the_unbroken_head_of_a_prefix() -> None:
    media = ["cpu", "nvme", "object"]
    for origins in product([HOST, 1, 2, NOWHERE, COMING, JOINING], repeat=4):
        sizes = [10, 20, 30, 40]
        runs = plan_runs(origins, media, sizes)
        stops = [at for at, origin in enumerate(origins) if origin in (NOWHERE, COMING)]
        head = stops[0] if stops else 4
        links = [link for run in runs for link in [run.link] * run.blocks]
        assert links == [media[o] if o > HOST else DEVICE for o in origins[:head]]
        assert sum(run.bytes for run in runs) == sum(sizes[:head])


def test_runs_of_one_tier_are_one() -> None:
    assert plan_runs([1, 1, 2, 0], ["c", "n", "o"], [5] * 4) == [
        LoadRun("n", 2, 10),
        LoadRun("o", 1, 5),
        LoadRun(DEVICE, 1, 5),
    ]


def test_a_finely_mixed_prefix_costs_few_runs() -> None:
    origins = [0, 1] * 500 + [2] * 3 + [NOWHERE]
    runs = plan_runs(origins, ["c", "n", "o"], [7] * len(origins))
    assert len(runs) <= RUNS_MAX
    for link, count in ((DEVICE, 500), ("n", 500), ("o", 3)):
        assert sum(run.blocks for run in runs if run.link == link) == count
        assert sum(run.bytes for run in runs if run.link == link) == 7 * count
    assert {run.link for run in runs[:4]} == {DEVICE, "n"}, "order is kept as far as it goes"
    assert runs[-1].link == "o"


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_gathering_finds_each_key_in_its_piece(sizes: list[int], order: Random) -> None:
    pieces: list[tuple[list[BlockKey], MemorySpec]] = []
    start = 0
    for number, size in enumerate(sizes):
        keys = make_keys(size, start=start)
        pieces.append((keys, MemorySpec([100 * number + at for at in range(size)])))
        start += size
    slot = {key: s for keys, spec in pieces for key, s in zip(keys, spec.slots, strict=True)}
    chosen = list(slot)
    order.shuffle(chosen)
    chosen = chosen[: (len(chosen) + 1) // 2]
    spec = gather(pieces, chosen)
    assert isinstance(spec, MemorySpec)
    assert spec.slots == [slot[key] for key in chosen]
