"""Entries that are written into a table: those that are not down in whole are not down."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers.nvme_rig import open_files

from kvtier.slab import layout
from kvtier.slab.files import write_entries
from kvtier.system.disk import Disk
from kvtier.testing.faults import Fault, FaultyDisk, scripted

ENTRIES = {slot: bytes([slot]) * layout.ENTRY_BYTES for slot in (1, 2, 5)}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    path.write_bytes(bytes(layout.entry_at(8)))
    return path


def test_each_is_written_in_its_place_and_nothing_else(table: Path) -> None:
    write_entries(Disk(), table, ENTRIES)
    data = table.read_bytes()
    found = [data[layout.entry_at(slot) :][: layout.ENTRY_BYTES] for slot in range(8)]
    assert found == [ENTRIES.get(slot, bytes(layout.ENTRY_BYTES)) for slot in range(8)]
    assert not any(data[: layout.entry_at(0)])


@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.EIO])
@pytest.mark.parametrize("run", [0, 1])
def test_what_is_written_in_part_is_an_error(table: Path, fault: Fault, run: int) -> None:
    before = open_files()
    with pytest.raises(OSError, match=r"in part|injected"):
        write_entries(FaultyDisk(scripted({1 + run: fault})), table, ENTRIES)
    assert open_files() == before


def test_a_table_that_is_gone_needs_none(tmp_path: Path) -> None:
    write_entries(Disk(), tmp_path / "gone", ENTRIES)
    assert list(tmp_path.iterdir()) == []
