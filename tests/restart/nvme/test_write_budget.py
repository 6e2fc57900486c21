"""A folder with a write budget: what is counted is what is written, and it holds over engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.tiers.nvme_rig import Engine

from kvtier.backends.nvme.write_budget import read_entry, written_bytes
from kvtier.record.record import Buffer
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome

PLENTY = 1e9
BLOCK = written_bytes(NAMESPACE, make_keys(1))


class CountingDisk(Disk):
    """Counts from outside what is written."""

    written = 0

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        count = super().writev(fd, data, offset)
        self.written += count
        return count


def test_what_the_folder_counts_is_what_was_written(tmp_path: Path) -> None:
    disk = CountingDisk()
    engine = Engine(tmp_path, blocks=32, disk=disk, write_rate=PLENTY)
    made = 0
    for round_ in range(4):
        before = disk.written
        stored = engine.put(make_keys(8, start=8 * round_))
        made += len(stored)
        assert disk.written - before >= len(stored) * BLOCK
    slabs = len(engine.own_slabs)
    engine.close()
    entry = read_entry(tmp_path / "writes")
    assert entry is not None
    assert entry.written == made * BLOCK
    # Beside the blocks: a page for each slab's header, and eight bytes for each use.
    assert 0 <= disk.written - entry.written <= slabs * 4096 + 64 * made


def test_engines_and_restarts_go_on_counting(tmp_path: Path) -> None:
    for start in (0, 8):
        engines = [Engine(tmp_path, blocks=64, write_rate=PLENTY) for _ in range(2)]
        for at, engine in enumerate(engines):
            engine.put(make_keys(4, start=start + 4 * at))
        for engine in engines:
            engine.close()
    entry = read_entry(tmp_path / "writes")
    assert entry is not None
    assert entry.written == 16 * BLOCK


def test_what_was_not_written_is_not_spent(tmp_path: Path) -> None:
    engine = Engine(tmp_path, write_rate=PLENTY)
    assert engine.tier.allowance is not None
    keys = make_keys(3)
    before = engine.tier.allowance.lease
    taken = engine.tier.prepare_store(keys).keys
    failed = dict(zip(taken, (Outcome.DROPPED, Outcome.CANCELLED, Outcome.IO_ERROR), strict=True))
    engine.tier.complete_store(taken, failed)
    assert before - engine.tier.allowance.lease == BLOCK


def test_without_the_setting_there_is_no_file_and_no_allowance(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.put(make_keys(4))
    engine.close()
    assert engine.tier.allowance is None
    assert not (tmp_path / "writes").exists()


def test_a_budget_that_cannot_be_kept_stops_writes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "writes").mkdir()
    engine = Engine(tmp_path, write_rate=PLENTY)
    allowance = engine.tier.allowance
    assert allowance is not None
    engine.keeper.work(thorough=True)
    assert allowance.blocks(1) == 0
    assert not engine.keeper.unwell
