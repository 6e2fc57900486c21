"""What a device reaches directly is used first, and what is used most is pinned first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put

from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier, Region, sharing, tier
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.slab.layout import SlabHeader, pieces_of, pinning_order, place_of
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

SLOTS = 8


def slots_of(cpu: CpuTier, keys: Sequence[BlockKey]) -> list[int]:
    reservation = cpu.prepare_store(keys)
    slots: list[int] = reservation.spec.slots  # type: ignore[attr-defined]
    return slots


@pytest.fixture(autouse=True)
def pieces_of_two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tier, "pinning_order", lambda header, entries: pinning_order(header, entries, pairs())
    )


def pairs() -> list[range]:
    return [range(at, at + 2) for at in range(0, SLOTS, 2)]


def test_new_blocks_go_to_pinned_slots_as_long_as_there_are_some(tmp_path: Path) -> None:
    with opened(tmp_path) as cpu:
        table = cpu.region.table
        for rank in range(2):
            sharing.note_pinned(table, rank, 0)
        first = list(make_keys(6))
        put(cpu, first)
        sharing.note_pinned(table, 0, 6)
        sharing.note_pinned(table, 1, 4)
        cpu.forget([first[5], first[1], first[2]])
        assert slots_of(cpu, make_keys(3, start=50)) == [1, 2, 6], "not 5, nor 7"
        for rank in range(2):
            sharing.note_pinned(table, rank, SLOTS)
        cpu.forget([first[0]])
        assert slots_of(cpu, make_keys(1, start=70)) == [7], "all are alike now"


def test_what_is_kept_and_used_most_is_pinned_first(tmp_path: Path) -> None:
    with opened(tmp_path) as cpu:
        keys = list(make_keys(6))
        put(cpu, keys)
        cpu.touch(keys[:6])
        for _ in range(3):
            cpu.touch([keys[4]])
        cpu.tick()
        cpu.forget(keys[2:4])
    with opened(tmp_path) as cpu:
        entries = layout.read_entries(cpu.region.table, SLOTS)
        order = pinning_order(cpu.region.header, entries, pairs())
        assert [piece.start for piece in order] == [4, 0, 2, 6]
        del entries
        assert slots_of(cpu, make_keys(2, start=50)) == [2, 3], "the free ones that come next"


def test_a_rank_that_died_amid_pinning_says_nothing_to_the_next_engine(tmp_path: Path) -> None:
    settings = CpuSettings(path=str(tmp_path), capacity=Capacity(ByteSize(1 << 20)))
    with opened(tmp_path) as cpu:
        cpu.region.name_engine("an engine")
        sharing.note_pinned(cpu.region.table, 0, 5)
        sharing.note_pinned(cpu.region.table, 1, 3)
        assert sharing.pinned(cpu.region.table) == 3
        assert BACKEND.find_region(settings, "an engine") == cpu.region.path
        assert BACKEND.find_region(settings, "another") is None
    assert BACKEND.find_region(settings, "an engine") is None, "it is gone"
    with opened(tmp_path) as cpu:
        assert sharing.pinned(cpu.region.table) is None
        assert BACKEND.find_region(settings, "an engine") is None


def test_two_regions_that_name_one_engine_are_nobodys(tmp_path: Path) -> None:
    settings = CpuSettings(path=str(tmp_path), capacity=Capacity(ByteSize(1 << 20)))
    other = type(CONTEXT)(CONTEXT.namespace, "other")
    with opened(tmp_path) as one, opened(tmp_path, other) as two:
        for cpu in (one, two):
            cpu.region.name_engine("an engine")
        assert BACKEND.find_region(settings, "an engine") is None


def test_scheduler_and_worker_work_out_the_same_order(tmp_path: Path) -> None:
    with opened(tmp_path) as cpu:
        put(cpu, list(make_keys(5)))
        with attached(cpu) as region:
            seen = pinning_order(region.header, layout.read_entries(region.table, SLOTS), pairs())
        entries = layout.read_entries(cpu.region.table, SLOTS)
        assert seen == pinning_order(cpu.region.header, entries, pairs())
        assert sorted(slot for piece in seen for slot in piece) == list(range(SLOTS))
        places = place_of(seen, SLOTS)
        assert [int(places[slot]) for piece in seen for slot in piece] == list(range(SLOTS))
        del entries


@contextlib.contextmanager
def attached(cpu: CpuTier) -> Iterator[Region]:
    region = Region.attach(cpu.region.path)
    yield region
    region.close()


@pytest.mark.parametrize("page", [4096, 1 << 16])
def test_pieces_cover_all_slots_and_end_with_pages(page: int) -> None:
    header = SlabHeader(
        slots=100, slot_bytes=3 * 4096, data_at=5 * 4096, slab_id=0, namespace=bytes(16)
    )
    found = list(pieces_of(header.slots, header.slot_bytes, header.data_at, 1 << 17, page))
    assert np.concatenate(found).tolist() == list(range(100))
    ends = [header.data_at + piece.stop * header.slot_bytes for piece in found[:-1]]
    assert not any(end % page for end in ends)
