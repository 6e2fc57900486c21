"""A folder on a disk that is full before the folder has what it may: others fill the disk, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import nvme_rig
from support.tiers.nvme_rig import SMALL_FILES, Engine

from kvtier.record.record import record_bytes
from kvtier.slab.files import used_bytes
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace

OTHER = Namespace(facts={"model": "another"}, group_bytes=NAMESPACE.group_bytes)
SLOT = record_bytes(NAMESPACE.payload_bytes)


class SmallDisk(Disk):
    """As full as the folder, and what others keep beside it, make it."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks * (SLOT + 64) + -(-blocks // 4) * 4096 + SMALL_FILES

    def free_bytes(self, path: Path) -> int:
        return self.left - used_bytes(path)


def test_another_model_takes_room_from_idle_ones_on_a_full_disk(tmp_path: Path) -> None:
    disk = SmallDisk(blocks=16)
    old = Engine(tmp_path / "kv", blocks=64, disk=disk)
    old.put(make_keys(20))
    assert len(old.own_slabs) == 4, "there is no room for more on the disk"
    old.close()
    new = Engine(tmp_path / "kv", blocks=64, namespace=OTHER, disk=disk)
    keys = make_keys(8, start=100)
    assert new.put(keys) == keys
    assert disk.free_bytes(tmp_path / "kv") >= 0


def test_what_others_write_to_a_full_disk_costs_not_much_more_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_rig, "SLAB_BLOCKS", 16)
    disk = SmallDisk(blocks=160)
    engine = Engine(tmp_path / "kv", blocks=640, disk=disk)
    engine.put(make_keys(160))
    before = engine.own_slabs
    for key in make_keys(32, start=200):
        disk.left -= SLOT // 2  # somebody keeps a log there: in the end, of a slab's length
        engine.keeper._full_until = 0.0
        engine.put([key])
    assert disk.free_bytes(tmp_path / "kv") >= 0
    assert len(before - engine.own_slabs) <= 4
