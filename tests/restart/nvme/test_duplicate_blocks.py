"""What another engine of the folder holds, too, or has stored where somebody still reads: it is
found as soon as it is needed, and can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine

from kvtier.testing.subject import make_keys, sealed
from kvtier.types import EventKind, Outcome

Pair = tuple[Engine, Engine]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two engines with a slab or two each."""
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    return mine, other


def both_store(pair: Pair) -> None:
    """One block at the same moment, as of a prompt that goes to both."""
    mine, other = pair
    keys = make_keys(1)
    reservation = mine.tier.prepare_store(keys)
    assert other.put(keys) == keys
    mine.tier.refresh()
    mine.handler.store(reservation.spec, keys, [sealed(keys[0])])
    mine.tier.complete_store(keys)


def test_what_goes_here_is_found_where_another_has_stored_it_at_the_same_time(pair: Pair) -> None:
    mine, _ = pair
    both_store(pair)
    mine.tier.take_events()
    for start in range(100, 140, 4):
        mine.put(make_keys(4, start=start))
    kinds = [event.kind for event in mine.tier.take_events() if make_keys(1)[0] in event.keys]
    assert kinds == [EventKind.REMOVED, EventKind.STORED]
    assert mine.read(make_keys(1)) == make_keys(1)


def test_what_is_stored_where_somebody_reads_is_found_when_that_has_ended(pair: Pair) -> None:
    mine, other = pair
    old, new = other.put(make_keys(4)), make_keys(8, start=100)
    assert mine.hits(old) == old
    mine.tier.prepare_load(old)
    assert other.put(new) == new
    mine.tier.refresh()
    mine.tier.complete_load(old, dict.fromkeys(old, Outcome.CORRUPT))
    left = other.hits(new)
    assert len(left) >= 4
    assert mine.read(left) == left


def test_what_could_not_be_stored_here_is_found_where_it_was_stored_meanwhile(pair: Pair) -> None:
    mine, other = pair
    keys = make_keys(1)
    mine.tier.prepare_store(keys)
    assert other.put(keys) == keys
    mine.tier.refresh()
    mine.tier.complete_store(keys, {keys[0]: Outcome.IO_ERROR})
    assert mine.read(keys) == keys


def test_what_is_forgotten_is_not_found_at_anothers(pair: Pair) -> None:
    mine, _ = pair
    both_store(pair)
    mine.tier.forget(make_keys(1))
    assert mine.hits(make_keys(1)) == []


def test_what_is_forgotten_is_not_found_where_one_that_died_had_stored_it_too(
    tmp_path: Path,
) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    both_store((mine, other))
    other.close()
    assert mine.hits(make_keys(1)) == make_keys(1)
    assert len(mine.own_slabs) == 2
    mine.tier.forget(make_keys(1))
    mine.tier.flush()
    third = Engine(tmp_path / "kv", blocks=8)
    assert third.hits(make_keys(1)) == []
    third.close()
    new = make_keys(8, start=100)
    assert mine.put(new) == new
    assert mine.hits(new) == new, "slots of both are used again"


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_the_other_has_no_more_is_not_offered(pair: Pair, how: str) -> None:
    mine, other = pair
    both_store(pair)
    if how == "forget":
        other.tier.forget(make_keys(1))
    else:
        other.tier.clear()
    other.tier.refresh()
    mine.tier.refresh()
    for start in range(100, 140, 4):
        mine.put(make_keys(4, start=start))
    assert mine.hits(make_keys(1)) == []
