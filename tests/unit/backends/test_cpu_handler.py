"""The data side of CPU memory beside its owner, who may take slots away at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.tiers.subjects import CPU

from kvtier.backends.cpu import CpuHandler, CpuSpec, Region
from kvtier.record.record import Buffer
from kvtier.slab import layout
from kvtier.slab.layout import ARRIVED, FAILED, FREE, RESERVED, VALID
from kvtier.testing.subject import Rig, blank, failures, make_keys, prove, sealed
from kvtier.types import LoadStoreSpec, Outcome


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(CPU, tmp_path, blocks=4)
    yield rig
    rig.close()


def handler_of(rig: Rig) -> CpuHandler:
    assert isinstance(rig.handler, CpuHandler)
    return rig.handler


def states(rig: Rig, spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CpuSpec)
    return [handler_of(rig).region.state(slot) for slot in spec.slots]


def test_what_lands_is_marked_once_and_only_while_it_is_awaited(rig: Rig) -> None:
    handler = handler_of(rig)
    keys = make_keys(3)
    spec = rig.reserve(keys).spec

    def land_again() -> None:
        for index, outcome in enumerate((Outcome.IO_ERROR, Outcome.OK)):
            handler.landed(spec, index, outcome)

    handler.landed(spec, 0, Outcome.OK)
    handler.landed(spec, 1, Outcome.CORRUPT)
    assert states(rig, spec) == [ARRIVED, FAILED, RESERVED]
    assert rig.tier.arrived(keys) == keys[:1]
    land_again()
    assert states(rig, spec) == [ARRIVED, FAILED, RESERVED]
    rig.tier.complete_store(keys, failures(keys[1:], Outcome.CANCELLED))
    land_again()
    assert states(rig, spec) == [VALID, FREE, FREE]


@pytest.mark.parametrize("state", [FREE, RESERVED, ARRIVED, FAILED])
def test_what_is_not_committed_is_not_loaded(rig: Rig, state: int) -> None:
    keys = rig.put(make_keys(2))
    spec = rig.tier.prepare_load(keys)
    assert isinstance(spec, CpuSpec)
    handler_of(rig).region.table[layout.entry_at(spec.slots[0])] = state
    assert rig.handler.load(spec, keys, [blank(), blank()]) == [Outcome.GONE, Outcome.OK]
    rig.tier.complete_load(keys)


def test_a_slot_of_another_key_is_neither_loaded_nor_stored_to(rig: Rig) -> None:
    keys = rig.put(make_keys(2))
    spec = rig.tier.prepare_load(keys)
    others = [keys[0], *make_keys(1, start=50)]
    assert rig.handler.load(spec, others, [blank(), blank()]) == [Outcome.OK, Outcome.GONE]
    records = [sealed(key) for key in others]
    assert rig.handler.store(spec, others, records) == [Outcome.OK, Outcome.GONE]
    assert set(rig.read(keys, spec).values()) == {Outcome.OK}
    rig.tier.complete_load(keys)


def another_block(table: Buffer, at: int) -> None:
    """The same key, stored once more."""
    key = layout.entry_key(table, (at - layout.TABLE_AT) // layout.ENTRY_BYTES)
    table[at : at + layout.ENTRY_BYTES] = layout.pack_entries(VALID, [key], 77, 0)


def given_back(table: Buffer, at: int) -> None:
    table[at] = FREE


def used_once_more(table: Buffer, at: int) -> None:
    table[at + layout.USES_AT] += 1


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (another_block, Outcome.GONE),
        (given_back, Outcome.GONE),
        (used_once_more, Outcome.OK),
    ],
)
def test_a_slot_that_changes_while_it_is_copied_is_gone(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Buffer, int], None],
    outcome: Outcome,
) -> None:
    keys = rig.put(make_keys(1))
    spec = rig.tier.prepare_load(keys)
    record = Region.record

    def meanwhile(region: Region, slot: int) -> Buffer:
        change(region.table, layout.entry_at(slot))
        return record(region, slot)

    monkeypatch.setattr(Region, "record", meanwhile)
    into = blank()
    assert rig.handler.load(spec, keys, [into]) == [outcome]
    assert prove(into, keys[0]).ok, "who trusted the bytes alone would not know"
    rig.tier.complete_load(keys)
