"""What a device reaches directly is used first, and what is used most is pinned first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put

from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier, Region
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.slab.layout import pieces_in, pieces_of
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

SLOTS = 8


def slots_of(cpu: CpuTier, keys: Sequence[BlockKey]) -> list[int]:
    reservation = cpu.prepare_store(keys)
    slots: list[int] = reservation.spec.slots  # type: ignore[attr-defined]
    return slots


@pytest.fixture(autouse=True)
def pieces_of_two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", 2 * 12288)


def pairs(count: int = SLOTS) -> list[range]:
    return pieces_in(0, count, 12288)


def pin(region: Region, rank: int, count: int) -> None:
    for piece in (None, *pairs(count)):
        region.note_pinned(rank, piece)


@contextlib.contextmanager
def attached(cpu: CpuTier) -> Iterator[Region]:
    region = Region.attach(cpu.region.path)
    yield region
    region.close()


def test_new_blocks_go_to_pinned_slots_as_long_as_there_are_some(tmp_path: Path) -> None:
    with opened(tmp_path) as cpu, attached(cpu) as worker:
        cpu._next_pins = math.inf  # its keeper does not look meanwhile whether all are
        for rank in range(2):
            pin(worker, rank, 0)
        first = list(make_keys(6))
        put(cpu, first)
        pin(worker, 0, 6)
        pin(worker, 1, 4)
        cpu.forget([first[5], first[1], first[2]])
        assert slots_of(cpu, make_keys(3, start=50)) == [1, 2, 6], "not 5, nor 7"
        for rank in range(2):
            pin(worker, rank, SLOTS)
        assert cpu._pins_are_made()
        cpu.forget([first[0]])
        assert slots_of(cpu, make_keys(1, start=70)) == [0]


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
        with attached(cpu) as worker:
            assert [piece.start for piece in worker.pinning_order()] == [4, 0, 2, 6]
        assert slots_of(cpu, make_keys(2, start=50)) == [2, 3], "the free ones that come next"


def test_a_rank_that_died_amid_pinning_says_nothing_to_the_next_engine(tmp_path: Path) -> None:
    settings = CpuSettings(path=str(tmp_path), capacity=Capacity(ByteSize(1 << 20)))
    with opened(tmp_path) as cpu, attached(cpu) as worker:
        cpu.region.name_engine("an engine")
        pin(worker, 0, 6)
        pin(worker, 1, 4)
        assert cpu.region.mark.pinned(0) == 0b11
        assert BACKEND.find_region(settings, "an engine") == cpu.region.path
        assert BACKEND.find_region(settings, "another") is None
    assert BACKEND.find_region(settings, "an engine") is None, "it is gone"
    with opened(tmp_path) as cpu:
        assert cpu.region.mark.pinned(0) == 0
        assert BACKEND.find_region(settings, "an engine") is None


def test_two_marks_that_name_one_engine_are_nobodys(tmp_path: Path) -> None:
    settings = CpuSettings(path=str(tmp_path), capacity=Capacity(ByteSize(1 << 20)))
    other = type(CONTEXT)(CONTEXT.namespace, "other")
    with opened(tmp_path) as one, opened(tmp_path, other) as two:
        for cpu in (one, two):
            cpu.region.name_engine("an engine")
        assert BACKEND.find_region(settings, "an engine") is None


def test_a_slab_that_is_numbered_meanwhile_stops_no_keeper(tmp_path: Path) -> None:
    """Its thread looks what is pinned while the tier's own thread takes slabs in."""
    with opened(tmp_path) as cpu:
        by_slab = cpu._places.by_slab
        [place] = by_slab.values()

        class Looked:
            @property
            def mine(self) -> bool:
                by_slab[-2] = place
                return False

        by_slab[-1] = Looked()  # type: ignore[assignment]
        assert not cpu._pins_are_made()
        del by_slab[-1], by_slab[-2]


@pytest.mark.parametrize("page", [4096, 1 << 16])
def test_pieces_cover_all_slots_and_end_with_pages(page: int) -> None:
    slot_bytes, first_at = 3 * 4096, 5 * 4096
    found = list(pieces_of(100, slot_bytes, first_at, 1 << 17, page))
    assert np.concatenate(found).tolist() == list(range(100))
    ends = [first_at + piece.stop * slot_bytes for piece in found[:-1]]
    assert not any(end % page for end in ends)
