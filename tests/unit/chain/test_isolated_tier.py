"""A tier of another package that breaks its promises costs its own blocks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from support.tiers.chains import KEYS, ChainRig, is_quiet, rule

from kvtier.chain.context import ChainContext
from kvtier.chain.isolated_tier import IsolatedTier
from kvtier.chain.tier_chain import TierChain
from kvtier.testing.memory import MemorySpec, MemoryTier
from kvtier.testing.subject import NAMESPACE
from kvtier.types import BlockKey, Outcome, Presence, Reservation

FAR = 1e9
METHODS = [
    *("lookup", "prepare_load", "complete_load", "prepare_store", "complete_store", "touch"),
    *("victims", "forget", "clear", "take_events", "stats", "give_up", "arrived", "tick"),
]


def away(*_: object, **__: object) -> Any:
    raise ConnectionError("the server is gone")


def fenced_rig(slots: Sequence[int]) -> tuple[ChainRig, IsolatedTier]:
    rig = ChainRig(slots)
    fence = IsolatedTier(rig.tiers[1])
    tiers = [rig.tiers[0], fence, *rig.tiers[2:]]
    rules = [rule() for _ in slots]
    rig.chain = TierChain(
        ChainContext(tiers, rules, rig.mover, NAMESPACE, rest_seconds=30, clock=lambda: rig.now)
    )
    return rig, fence


def work(rig: ChainRig, random: Random, break_now: Callable[[int], None]) -> None:
    """An engine's life."""
    chain = rig.chain
    for step in range(60):
        break_now(step)
        keys = random.sample(KEYS[:24], random.randint(1, 6))
        chain.touch(keys)
        hits = [k for k, at in zip(keys, chain.lookup(keys), strict=True) if at is Presence.HIT]
        ticket = chain.begin_load(hits, "reader", FAR)
        if random.random() < 0.8:
            rig.mover.run_all({key: Outcome.IO_ERROR for key in keys if random.random() < 0.1})
        chain.poll()
        chain.end_load(ticket, {k: Outcome.CORRUPT for k in ticket.pinned if random.random() < 0.1})
        rig.store(keys)
        if random.random() < 0.05:
            chain.forget(keys)
        if random.random() < 0.03:
            chain.clear()
        chain.chain_stats()
        for tier in chain.tiers:
            tier.take_events()
            tier.victims(2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_raises_the_chain_goes_on(
    method: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fence = fenced_rig([8, 12, 40])
    random = Random(seed)
    breaks_at = random.randint(0, 40)

    def break_now(step: int) -> None:
        if step == breaks_at:
            monkeypatch.setattr(rig.tiers[1], method, away)

    work(rig, random, break_now)
    rig.settle(40)
    assert rig.chain.settled
    assert is_quiet(rig.chain._ledger)
    for tier in (rig.tiers[0], rig.tiers[2]):
        assert (tier.stats().pinned, tier.stats().in_flight) == (0, 0)
    rig.chain.clear()
    rig.store(KEYS[:4])
    rig.settle(40)
    assert rig.resident(2, KEYS[:4]) == KEYS[:4]
    assert rig.chain.chain_stats().down[1] == fence.out_of_use


def test_it_is_said_once_whose_mistake_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fence = fenced_rig([4, 8])
    rig.put(1, KEYS[:2])
    assert rig.chain.lookup(KEYS[:2]) == [Presence.HIT] * 2
    monkeypatch.setattr(rig.tiers[1], "tick", away)
    for _ in range(3):
        rig.chain.poll()
    assert rig.chain.lookup(KEYS[:2]) == [Presence.MISS] * 2
    (record,) = caplog.records
    assert f"a mistake in {type(rig.tiers[1]).__module__}, which" in record.getMessage()
    assert "the server is gone" in caplog.text
    rig.chain.clear()  # reaches it all the same: what it holds may outlive this process
    assert rig.resident(1, KEYS[:2]) == []
    assert fence.out_of_use


def test_what_is_unwell_is_told_through_the_fence() -> None:
    rig, fence = fenced_rig([4, 8])
    for unwell in (True, False):
        rig.tiers[1].unwell = unwell
        rig.chain.poll()
        assert rig.chain.chain_stats().down == [False, unwell]
    assert not fence.out_of_use


def none_at_all(keys: Sequence[BlockKey]) -> list[Presence]:
    return []


def others(keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
    return Reservation([KEYS[30]], MemorySpec([0]), [])


def too_few(keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
    return Reservation(list(keys), MemorySpec([]), [])


@pytest.mark.parametrize(
    ("method", "wrong"),
    [("lookup", none_at_all), ("prepare_store", others), ("prepare_store", too_few)],
)
def test_what_is_no_answer_counts_like_what_is_raised(
    method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fence = fenced_rig([4, 8, 8])
    monkeypatch.setattr(rig.tiers[1], method, wrong)
    rig.store(KEYS[:2])
    rig.settle()
    rig.chain.lookup(KEYS[8:10])
    assert fence.out_of_use
    assert rig.resident(2, KEYS[:2]) == KEYS[:2]
    rig.assert_quiet()


def nothing(*_: object) -> None:
    """As a method does that was never finished."""


def only_looks_well(*_: object) -> Iterator[Any]:
    raise ConnectionError("the server is gone")
    yield


@pytest.mark.parametrize("wrong", [nothing, only_looks_well])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [("victims", (2,)), ("take_events", ()), ("arrived", (KEYS[:1],)), ("stats", ())],
)
def test_what_cannot_be_gone_through_is_no_answer(
    method: str, arguments: tuple[Any, ...], wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, fence = fenced_rig([4, 8])
    usual = getattr(fence, method)(*arguments)
    monkeypatch.setattr(rig.tiers[1], method, wrong)
    assert getattr(fence, method)(*arguments) == usual
    assert fence.out_of_use


def test_a_tier_that_misses_is_in_order() -> None:
    tier = MemoryTier(fenced_rig([4, 8])[0].tiers[1].store)
    fence = IsolatedTier(tier)
    assert fence.lookup(KEYS[:1]) == [Presence.MISS]
    assert len(fence.prepare_load([])) == 0
    assert not fence.out_of_use
