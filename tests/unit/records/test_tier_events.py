"""Events of a tier: all of them in order for who listens, one bounded difference for all others."""

from __future__ import annotations

import random

import pytest

from kvtier.interfaces import tier as tier_module
from kvtier.interfaces.tier import Events
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey, EventKind

STORED, REMOVED = EventKind.STORED, EventKind.REMOVED


def after(held: set[BlockKey], events: Events) -> set[BlockKey]:
    """What somebody believes to be there who has listened."""
    for event in events.take("nvme"):
        keys = set(event.keys)
        held = held | keys if event.kind is STORED else held - keys
    return held


def test_who_listens_hears_everything_in_order() -> None:
    one, other = make_keys(2)
    events = Events()
    told = [(STORED, (one, other)), (REMOVED, (one,)), (STORED, (one,))]
    for kind, keys in told:
        events.add(kind, keys)
    events.add(REMOVED, ())
    taken = events.take("nvme")
    assert [(event.kind, event.keys) for event in taken] == told
    assert {event.medium for event in taken} == {"nvme"}
    assert events.take("nvme") == []


@pytest.mark.parametrize("seed", range(20))
def test_who_does_not_hears_what_it_comes_to(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_KEYS_MAX", 10)
    dice, events, keys = random.Random(seed), Events(), make_keys(30)
    here: set[BlockKey] = set()
    believed: set[BlockKey] = set()
    for _ in range(1000):
        some = dice.sample(keys, dice.randrange(5))
        events.add(STORED, [key for key in some if key not in here])
        here.update(some)
        gone = dice.sample(sorted(here), min(len(here), dice.randrange(5)))
        events.add(REMOVED, gone)
        here.difference_update(gone)
        assert len(events._kind_of) + events._keys <= len(keys) + 10
        if dice.random() < 0.02:
            believed = after(believed, events)
            assert believed == here
