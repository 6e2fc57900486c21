"""Slots in which a block was found damaged: out of use, few at a time, and over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers.subjects import CPU, SLABS

from kvtier.backends.cpu import CpuSpec
from kvtier.backends.nvme.medium import NvmeSpec
from kvtier.testing.subject import Rig, failures, make_keys
from kvtier.types import BlockKey, LoadStoreSpec, Outcome

BLOCKS = 8


@pytest.fixture(params=[CPU, SLABS], ids=["cpu", "nvme"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(request.param, tmp_path, blocks=BLOCKS)


def places(spec: LoadStoreSpec) -> set[int]:
    if isinstance(spec, CpuSpec):
        return set(spec.slots)
    assert isinstance(spec, NvmeSpec)
    return set(spec.places)


def in_use(rig: Rig) -> set[int]:
    """All that a burst of stores would be written to."""
    taken = rig.reserve(make_keys(BLOCKS, start=1000))
    rig.tier.complete_store(taken.keys, failures(taken.keys, Outcome.CANCELLED))
    rig.settle()
    return places(taken.spec)


def fail(rig: Rig, key: BlockKey, outcome: Outcome) -> set[int]:
    spec = rig.tier.prepare_load([key])
    rig.tier.complete_load([key], {key: outcome})
    rig.settle()
    return places(spec)


def test_a_damaged_slot_is_not_used_again_whether_or_not_it_is_restarted(rig: Rig) -> None:
    keys = rig.put(make_keys(BLOCKS))
    bad = fail(rig, keys[0], Outcome.CORRUPT)
    for _ in range(2):
        assert rig.tier.stats().quarantined == 1
        assert rig.resident(keys[:1]) == []
        assert len(in_use(rig)) == BLOCKS - 1
        assert not in_use(rig) & bad
        rig.reopen()
    rig.close()


@pytest.mark.parametrize("outcome", [Outcome.GONE, Outcome.IO_ERROR])
def test_a_slot_that_could_not_be_read_is_used_again(rig: Rig, outcome: Outcome) -> None:
    keys = rig.put(make_keys(BLOCKS))
    bad = fail(rig, keys[0], outcome)
    assert rig.tier.stats().quarantined == 0
    assert bad < in_use(rig)
    rig.close()


def test_a_damaged_slot_that_somebody_reads_goes_out_of_use_when_he_is_done(rig: Rig) -> None:
    keys = rig.put(make_keys(BLOCKS))
    rig.tier.prepare_load(keys[:1])
    bad = fail(rig, keys[0], Outcome.CORRUPT)
    assert rig.tier.stats().quarantined == 0
    assert not in_use(rig) & bad
    rig.tier.complete_load(keys[:1])
    rig.settle()
    assert rig.tier.stats().quarantined == 1
    assert not in_use(rig) & bad
    rig.close()


def test_the_oldest_damaged_slot_gives_way_and_is_like_any_other_again(rig: Rig) -> None:
    keys = rig.put(make_keys(BLOCKS))
    first, second = (fail(rig, key, Outcome.CORRUPT) for key in keys[:2])
    for _ in range(2):
        assert rig.tier.stats().quarantined == 1
        used = in_use(rig)
        assert first < used
        assert not second & used
        again = rig.put(make_keys(BLOCKS, start=100))
        rig.tier.forget(again)
        rig.settle()
    rig.close()
