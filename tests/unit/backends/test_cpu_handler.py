"""The data side of CPU memory beside its owner, who may take slots away at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiers.subjects import CPU

from kvtier.backends.cpu import CpuHandler, CpuSpec, Region, medium
from kvtier.errors import MediumError
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
    key = layout.key_in(table[at : at + layout.ENTRY_BYTES])
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


@pytest.fixture
def late(rig: Rig) -> Iterator[tuple[Region, int, bytes]]:
    """A process of the engine that has not mapped its slab yet, a slot of it, and what is there."""
    spec = rig.tier.prepare_load(keys := rig.put(make_keys(1)))
    assert isinstance(spec, CpuSpec)
    region = Region.attach(handler_of(rig).region.path)
    for at in list(region._rows):
        region._unmap(at)
    region._generation = 0
    yield region, spec.slots[0], bytes(handler_of(rig).region.record(spec.slots[0]))
    region.close()
    rig.tier.complete_load(keys)


def test_nobody_reads_a_slab_that_another_thread_is_about_to_map(
    late: tuple[Region, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are not mapped read as zeros, and who writes there ends the process."""
    region, slot, right = late
    maps, begun, go = region._arena.map, threading.Event(), threading.Event()
    found: list[bytes] = []

    def map_slowly(*args: Any, **named: Any) -> None:
        begun.set()
        assert go.wait(60)
        maps(*args, **named)

    def read() -> None:
        region.refresh([slot])
        found.append(bytes(region.record(slot)))

    monkeypatch.setattr(region._arena, "map", map_slowly)
    threads = [threading.Thread(target=read) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    go.set()
    for thread in threads:
        thread.join(60)
    assert found == [right, right]


def test_nobody_reads_a_slab_while_its_owner_says_where_it_is(
    late: tuple[Region, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cannot wait for that is told, be it that the owner died amid it."""
    region, slot, right = late
    generation = region.mark.generation

    def say(generation: int) -> None:
        medium._GENERATION.pack_into(region.mark._map, medium._GENERATION_AT, generation)

    say(generation + 1)
    monkeypatch.setattr(medium, "_CHANGES_S", 0.0)
    with pytest.raises(MediumError, match="no memory in this process"):
        region.refresh([slot])
    monkeypatch.setattr(medium, "_CHANGES_S", 60.0)
    monkeypatch.setattr("time.sleep", lambda seconds: say(generation + 2))
    region.refresh([slot])
    assert bytes(region.record(slot)) == right
    with pytest.raises(MediumError):
        region.refresh([slot, region.mark.slots])
