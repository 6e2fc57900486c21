"""How a slab is made: within the room there is, all of it taken, and never seen by halves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.tiers.nvme_rig import SLAB_BLOCKS, Engine, open_files

from kvtier.record.record import Buffer, record_bytes
from kvtier.slab import folder_tier as tier_module
from kvtier.slab.folder import FolderLimits, SlabFolder
from kvtier.slab.layout import ENTRY_BYTES, TABLE_AT
from kvtier.slab.shares import create_slab
from kvtier.system.disk import AnyPath, Disk, is_locked
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome

SLOT = record_bytes(NAMESPACE.payload_bytes)
FLOOR = 1 << 30


class Scripted(Disk):
    """A disk of which the test says how full it is, and which of its writes stay short."""

    free = 1 << 40
    short = False

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def free_bytes(self, path: Path) -> int:
        return self.free

    def allocate(self, fd: int, size: int) -> None:
        self.allocated.append(size)
        super().allocate(fd, size)

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        if self.short:
            data = [data[0][:512]]
        return super().writev(fd, data, offset)


class Maker:
    """One owner in a folder."""

    def __init__(self, root: Path) -> None:
        self.disk = Scripted()
        self.folder = SlabFolder(root, NAMESPACE, self.disk)
        self.owner, self._fd = self.folder.claim()

    def make(self) -> int:
        """How many slots the slab has that was made; 0 if none was."""
        limits = FolderLimits(1 << 20, free_floor=FLOOR, slot_bytes=SLOT, slab_bytes=8 * SLOT)
        slab = create_slab(self.folder, self.owner, 8, limits)
        return slab.header.slots if slab else 0

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.home.iterdir() if path.is_file())

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(tmp_path / "kv")
    yield maker
    maker.close()


def test_no_slab_reaches_below_the_floor_and_a_part_of_one_above_it(maker: Maker) -> None:
    most = FLOOR + 2 * SLOT + TABLE_AT
    maker.disk.free = most + 3 * (SLOT + ENTRY_BYTES)
    assert maker.make() == 3
    for short in (1, SLOT):
        maker.disk.free = most + SLOT + ENTRY_BYTES - short
        assert maker.make() == 0


def test_a_slab_has_all_of_its_room_before_it_is_used(maker: Maker) -> None:
    assert maker.make() == 8
    assert maker.disk.allocated == [8 * SLOT, TABLE_AT + 8 * ENTRY_BYTES]


def test_a_slab_whose_header_was_written_in_part_is_not_made(maker: Maker) -> None:
    there, before = maker.files(), open_files()
    maker.disk.short = True
    with pytest.raises(OSError) as failure:
        maker.make()
    assert failure.value.errno == errno.EIO
    assert (maker.files(), open_files()) == (there, before)
    maker.disk.short = False
    assert maker.make() == 8


def test_a_slab_gets_its_names_while_nobody_else_looks_for_halves(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renamed = Path.rename, []

    def watched(source: Path, target: AnyPath) -> Path:
        renamed.append(Path(target).suffix)
        assert is_locked(maker.folder.root / "lock")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", watched)
    assert maker.make() == 8
    assert renamed == [".slab", ".table"]


def test_a_burst_of_large_blocks_takes_no_others_places_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prompt's first chunk of a large model: each block is a good part of a slab."""
    monkeypatch.setattr(tier_module, "_AHEAD_BYTES", SLAB_BLOCKS * SLOT)
    engine = Engine(tmp_path / "kv", blocks=256)
    old, burst = engine.put(make_keys(4)), make_keys(48, start=100)
    engine.tier.refresh()
    taken = engine.tier.prepare_store(burst)
    assert (taken.keys, taken.evicted) == (burst, [])
    engine.tier.complete_store(burst, dict.fromkeys(burst, Outcome.CANCELLED))
    assert engine.read(old) == old
