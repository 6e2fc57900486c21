"""Media that alone know what they hold are asked ahead, and left alone while they do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.tiers.chains import REST, SLOT, rule

from kvtier.chain.context import ChainContext
from kvtier.chain.isolated_tier import IsolatedTier
from kvtier.chain.plan import HOST, NOWHERE
from kvtier.chain.queries import PROBE_S
from kvtier.chain.tier_chain import TierChain
from kvtier.interfaces.tier import Tier
from kvtier.move.threads import ThreadMover
from kvtier.testing.memory import MemoryHandler, MemorySpec, MemoryStore, MemoryTier
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Presence

KEYS = make_keys(12)


class Pool:
    """What others have stored, and whether it answers."""

    def __init__(self) -> None:
        self.holds: set[BlockKey] = set()
        self.asked: list[list[BlockKey]] = []
        self.fails = False


class PoolTier(MemoryTier):
    finds = True
    strikes = 1

    def prepare_find(
        self, keys: Sequence[BlockKey]
    ) -> tuple[Sequence[BlockKey], LoadStoreSpec | None]:
        found = zip(keys, self.lookup(keys), strict=True)
        asked = [key for key, at in found if at is not Presence.HIT]
        return asked, MemorySpec([0] * len(asked)) if asked else None

    def complete_find(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        there = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok]
        self.complete_store(self.prepare_store(there).keys)


class PoolHandler(MemoryHandler):
    def __init__(self, store: MemoryStore, pool: Pool) -> None:
        super().__init__(store)
        self._pool = pool

    def find(self, spec: LoadStoreSpec, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._pool.asked.append(list(keys))
        if self._pool.fails:
            return [Outcome.IO_ERROR] * len(keys)
        return [Outcome.OK if key in self._pool.holds else Outcome.GONE for key in keys]


class Rig:
    """Host memory over the pool, a real mover, and a clock that can be put forward."""

    def __init__(self) -> None:
        self.pool, self.skew = Pool(), 0.0
        stores = [MemoryStore(NAMESPACE, 16 * SLOT) for _ in range(2)]
        self.host = MemoryTier(stores[0])
        tiers: list[Tier] = [self.host, IsolatedTier(PoolTier(stores[1]))]
        self.mover = ThreadMover(
            [MemoryHandler(stores[0]), PoolHandler(stores[1], self.pool)],
            NAMESPACE,
            queue_blocks=[32, 8],
        )
        rules = [rule(), rule()]
        self.context = ChainContext(tiers, rules, self.mover, NAMESPACE, clock=self.clock)
        self.chain = TierChain(self.context)

    def clock(self) -> float:
        return time.monotonic() + self.skew

    def ask(self, keys: Sequence[BlockKey]) -> None:
        query = self.chain.find(keys)
        self.poll_until(lambda: query.answered)

    def probe(self) -> None:
        """Go on until the pool was asked once more."""
        asked = len(self.pool.asked)
        self.skew += PROBE_S
        self.poll_until(lambda: len(self.pool.asked) > asked and not self.chain.queries.pending)
        self.chain.poll()

    def poll_until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60.0
        while not holds():
            assert time.monotonic() < end
            self.mover.wait(0.05)
            self.chain.poll()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.mover.close()
    rig.chain.close()


def test_the_pool_is_asked_in_one_batch_for_what_the_tiers_above_it_lack(rig: Rig) -> None:
    rig.pool.holds = set(KEYS[:5])
    rig.host.complete_store(rig.host.prepare_store(KEYS[:2]).keys)
    assert rig.chain.locate(KEYS[:8]) == [HOST, HOST, *[NOWHERE] * 6]
    rig.ask(KEYS[:8])
    assert rig.pool.asked == [KEYS[2:8]]
    assert rig.chain.locate(KEYS[:8]) == [HOST, HOST, 1, 1, 1, *[NOWHERE] * 3]


def test_nothing_waits_where_nobody_can_be_asked(rig: Rig) -> None:
    rig.host.complete_store(rig.host.prepare_store(KEYS[:2]).keys)
    assert rig.chain.find(KEYS[:2]).answered
    assert rig.chain.find(KEYS).answered, "more than the mover takes at a time"
    rig.mover.close()
    assert rig.chain.find(KEYS[:8]).answered
    assert rig.pool.asked == []


def test_a_pool_that_does_not_answer_is_asked_no_more_until_it_does(rig: Rig) -> None:
    rig.pool.holds, rig.pool.fails = set(KEYS), True
    rig.ask(KEYS[:4])
    assert rig.chain.find(KEYS[:4]).answered, "one failure is enough for this tier"
    assert not rig.context.readable(1, rig.clock())
    for _ in range(2):
        rig.probe()
        assert len(rig.pool.asked[-1]) == 1
        assert not rig.context.readable(1, rig.clock())
    rig.pool.fails = False
    rig.probe()
    assert rig.context.readable(1, rig.clock())
    rig.ask(KEYS[:4])
    assert rig.chain.locate(KEYS[:4]) == [1] * 4


@pytest.mark.parametrize(("failure", "over"), [(Outcome.IO_ERROR, True), (Outcome.TIMEOUT, False)])
def test_that_it_answers_again_is_no_news_of_one_that_was_slow(
    rig: Rig, failure: Outcome, over: bool
) -> None:
    rig.context.loads.observe(1, [failure], rig.clock())
    for _ in range(2):
        assert not rig.context.readable(1, rig.clock())
        rig.probe()
        if over:
            break
    assert rig.context.readable(1, rig.clock()) is over
    rig.skew += REST
    assert rig.context.readable(1, rig.clock())
