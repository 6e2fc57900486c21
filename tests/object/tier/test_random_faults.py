"""The object tier over a store that fails, lies and stalls at random, by a seed.

`faulty_store` says what may happen at each call.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.object.faulty_store import Fault, FaultPlan, FaultySubject

from kvtier.testing.faults import BLOCKS, walk
from kvtier.testing.subject import Rig, make_keys
from kvtier.types import BlockKey

KINDS = (Fault.DOWN, Fault.CUT, Fault.BUSY, Fault.FULL, Fault.FLIPS, Fault.DENIES)


def serves_again(rig: Rig) -> list[BlockKey]:
    """Blocks that it has taken after its store went well again, and gives back."""
    for _ in range(3):  # what was thought lost is found, then the surplus goes, then copies
        rig.settle()
    new = make_keys(BLOCKS, start=1000)
    assert rig.put(new) == new
    assert rig.get(new) == new
    return new


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: kind.name if kind else "all")
def test_right_bytes_or_a_miss_and_full_service_afterwards(
    tmp_path: Path, kind: Fault | None, seed: int
) -> None:
    plan = FaultPlan(seed)
    plan.kinds = [kind] if kind else KINDS
    rig = Rig(FaultySubject(plan), tmp_path, blocks=BLOCKS)
    plan.rate = 0.25
    walk(rig, random.Random(seed), steps=60)
    plan.rate = 0.0
    new = serves_again(rig)
    stats = rig.tier.stats()
    assert stats.in_flight == stats.pinned == 0
    rig.reopen()
    assert rig.get(new) == new
    rig.close()


@pytest.mark.parametrize("kind", [Fault.DOWN, Fault.BUSY, Fault.CUT, Fault.DENIES])
def test_a_store_that_always_fails_is_a_tier_that_misses(tmp_path: Path, kind: Fault) -> None:
    plan = FaultPlan(1)
    rig = Rig(FaultySubject(plan), tmp_path, blocks=BLOCKS)
    plan.kinds, plan.rate = [kind], 1.0
    walk(rig, random.Random(1), steps=30)
    plan.rate = 0.0
    serves_again(rig)
    rig.close()


def test_what_is_stored_after_a_start_without_the_store_is_left_to_the_next_life(
    tmp_path: Path,
) -> None:
    """Though nobody has looked at the store but by a refresh."""
    plan = FaultPlan(1)
    plan.kinds, plan.rate = [Fault.DOWN], 1.0
    rig = Rig(FaultySubject(plan), tmp_path, blocks=8)
    plan.kinds = ()
    rig.settle()
    keys = rig.put(make_keys(4))
    assert keys == make_keys(4)
    rig.reopen()
    assert rig.get(keys) == keys
    rig.close()
