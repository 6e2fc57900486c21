"""A folder on a disk that is full before the folder has what it may: others fill the disk, too."""

from __future__ import annotations

from pathlib import Path

from nvme_rig import SMALL_FILES, Engine

from kvtier.backends.nvme.files import used_bytes
from kvtier.core.disk import Disk
from kvtier.core.record import record_bytes
from kvtier.testing.records import NAMESPACE, make_keys
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
    new.close()
