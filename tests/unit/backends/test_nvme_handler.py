"""The NVMe handler's system calls: what is asked of the disk, and what happens where it refuses."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from support.tiers.nvme_rig import open_files

from kvtier.backends.nvme import BACKEND, NvmeHandler, NvmeSettings, NvmeTier
from kvtier.backends.nvme.medium import NvmeSpec
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import Buffer
from kvtier.settings import ByteSize, Capacity, Durability
from kvtier.slab.files import DATA_SUFFIX, TABLE_SUFFIX
from kvtier.slab.layout import SLOT_MASK, TABLE_AT, SlabHeader
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, blank, make_keys, prove, sealed
from kvtier.types import BlockKey, Namespace, Outcome

CONTEXT = TierContext(NAMESPACE, "handler")
FILES = (DATA_SUFFIX, TABLE_SUFFIX)


class LoggingDisk(Disk):
    """Says which calls came, and may refuse direct I/O, at open or only when it is used."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.calls: list[str] = []
        self.direct: set[int] = set()

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if direct and self.refuse == "open":
            raise OSError(errno.EINVAL, "no direct I/O here")
        fd = super().open(path, create=create)
        if direct:
            self.direct.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.direct.discard(fd)
        super().close(fd)

    def _use(self, what: str, fd: int, buffers: int) -> None:
        self.calls.append(f"{what} {buffers}")
        if fd in self.direct and self.refuse == "use":
            raise OSError(errno.EINVAL, "not like this")

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        self._use("read", fd, len(into))
        return super().readv(fd, into, offset)

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        self._use("write", fd, len(data))
        return super().writev(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.calls.append("sync")
        super().sync(fd)

    def sync_names(self, folder: str | os.PathLike[str]) -> None:
        self.calls.append(f"names in {folder}")
        if self.refuse == "names":
            raise OSError(errno.EINVAL, "this file system cannot")
        super().sync_names(folder)


def opened(
    folder: Path, disk: Disk, durability: Durability = Durability.PROCESS
) -> tuple[NvmeTier, NvmeHandler]:
    settings = NvmeSettings(
        path=str(folder),
        capacity=Capacity(size=ByteSize(1 << 20)),
        free_floor=ByteSize(0),
        durability=durability,
    )
    return (
        BACKEND.open_tier(settings, CONTEXT, Disk()),
        BACKEND.open_handler(settings, CONTEXT, disk),
    )


def round_trip(tier: NvmeTier, handler: NvmeHandler, keys: list[BlockKey]) -> None:
    reservation = tier.prepare_store(keys)
    stored = handler.store(reservation.spec, keys, [sealed(key) for key in keys])
    assert stored == [Outcome.OK] * len(keys)
    tier.complete_store(keys)
    records = [blank() for _ in keys]
    assert handler.load(tier.prepare_load(keys), keys, records) == [Outcome.OK] * len(keys)
    assert all(prove(record, key).ok for key, record in zip(keys, records, strict=True))
    tier.complete_load(keys)
    handler.close()
    tier.close()


@pytest.mark.parametrize("refuse", ["open", "use"])
def test_without_direct_io_it_goes_through_the_page_cache_and_says_so_once(
    tmp_path: Path, refuse: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_files()
    with caplog.at_level(logging.WARNING):
        round_trip(*opened(tmp_path / "kv", LoggingDisk(refuse)), make_keys(8))
    assert caplog.text.count("refuses direct I/O") == 1
    assert open_files() == before


def test_neighbouring_slots_are_one_call_between_two_entries(tmp_path: Path) -> None:
    disk = LoggingDisk()
    round_trip(*opened(tmp_path / "kv", disk), make_keys(8))
    writes = [call for call in disk.calls if call.startswith("write")]
    assert writes == ["write 1", "write 8", "write 1"]
    assert [call for call in disk.calls if call.startswith("read")][-1] == "read 8"


@pytest.mark.parametrize(("block", "seconds"), [(64 << 10, 5), (8 << 20, 5), (80 << 20, 20)])
def test_a_large_block_may_take_longer_before_the_mover_is_held_to_hang(
    tmp_path: Path, block: int, seconds: int
) -> None:
    """Eight threads that read blocks of 80 MiB from a disk of 100 MB/s need 7 s for each."""
    namespace = Namespace(facts={}, group_bytes=(block,))
    handler = NvmeHandler(tmp_path, namespace, threads=8, direct=False, power_safe=False)
    assert seconds <= handler.call_seconds < seconds + 1
    handler.close()


class SlowErrors(LoggingDisk):
    """Each read fails, after a second."""

    now = 0.0

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        if len(into[0]) == TABLE_AT:  # the header of a slab that is opened
            return super().readv(fd, into, offset)
        self.calls.append(f"failed {len(into)}")
        self.now += 1.0
        raise OSError(errno.EIO, "bad sector")


def test_blocks_of_a_bad_run_are_tried_for_as_long_as_a_call_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, keys = SlowErrors(), make_keys(8)
    tier, handler = opened(tmp_path / "kv", disk)
    taken = tier.prepare_store(keys)
    assert set(handler.store(taken.spec, keys, [sealed(key) for key in keys])) == {Outcome.OK}
    clock = SimpleNamespace(monotonic=lambda: disk.now)
    monkeypatch.setattr("kvtier.backends.nvme.medium.time", clock)
    outcomes = handler.load(taken.spec, keys, [blank() for _ in keys])
    assert outcomes == [Outcome.IO_ERROR] * 2 + [Outcome.TIMEOUT] * 6
    assert [call for call in disk.calls if "failed" in call] == ["failed 8"] + ["failed 1"] * 2
    assert disk.now < handler.call_seconds, "a mover that takes longer is killed"
    disk.now, handler.call_seconds = 0.0, 60.0
    outcomes = handler.load(taken.spec, keys, [blank() for _ in keys])
    assert outcomes == [Outcome.IO_ERROR] * 8, "there is time to find out which are bad"
    tier.complete_store(keys)
    handler.close()
    tier.close()


def test_power_safety_syncs_the_data_before_the_commit(tmp_path: Path) -> None:
    disk = LoggingDisk()
    round_trip(*opened(tmp_path / "kv", disk, Durability.POWER), make_keys(4))
    start = disk.calls.index("write 4")
    assert disk.calls[start : start + 4] == ["write 4", "sync", "write 1", "sync"]


@pytest.mark.parametrize("refuse", ["", "names"])
def test_power_safety_saves_the_names_of_new_slabs_once(tmp_path: Path, refuse: str) -> None:
    disk = LoggingDisk(refuse)
    tier, handler = opened(tmp_path / "kv", disk, Durability.POWER)
    for keys in (make_keys(4), make_keys(4, start=4)):
        reservation = tier.prepare_store(keys)
        stored = handler.store(reservation.spec, keys, [sealed(key) for key in keys])
        assert stored == [Outcome.OK] * len(keys)
        tier.complete_store(keys)
    folders = (tmp_path / "kv" / NAMESPACE.id, tmp_path / "kv", tmp_path)
    named = [call for call in disk.calls if call.startswith("names")]
    assert named == [f"names in {folder}" for folder in folders]
    assert disk.calls.index(named[0]) > disk.calls.index("sync")
    handler.close()
    tier.close()


def test_a_slab_that_is_gone_drops_a_store_and_misses_a_load(tmp_path: Path) -> None:
    tier, handler = opened(tmp_path / "kv", Disk())
    keys = make_keys(2)
    reservation = tier.prepare_store(keys)
    for path in (tmp_path / "kv").rglob("*.table"):
        path.unlink()
    stored = handler.store(reservation.spec, keys, [sealed(key) for key in keys])
    assert stored == [Outcome.DROPPED] * 2
    assert handler.load(reservation.spec, keys, [blank(), blank()]) == [Outcome.GONE] * 2
    handler.close()
    tier.close()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.suffix in FILES}


def test_slots_that_a_slab_does_not_have_are_neither_written_nor_read(tmp_path: Path) -> None:
    tier, handler = opened(tmp_path / "kv", Disk())
    keys = make_keys(2)
    reservation = tier.prepare_store(keys)
    assert isinstance(reservation.spec, NvmeSpec)
    place, before = reservation.spec.places[0], files(tmp_path / "kv")
    (table,) = (path for path in before if path.suffix == TABLE_SUFFIX)
    last = (place & ~SLOT_MASK) + SlabHeader.unpack(before[table]).slots - 1
    records = [sealed(key) for key in keys]
    beyond = NvmeSpec([last, last + 1], reservation.spec.owner)
    assert handler.store(beyond, keys, records) == [Outcome.OK, Outcome.DROPPED]
    assert handler.load(beyond, keys, [blank(), blank()]) == [Outcome.OK, Outcome.GONE]
    assert {path: len(after) for path, after in files(tmp_path / "kv").items()} == {
        path: len(found) for path, found in before.items()
    }
    handler.close()
    tier.close()


@pytest.mark.parametrize("other", [{"namespace": bytes(16)}, {"slab_id": 1}])
def test_nothing_is_written_to_another_slab_that_lies_in_the_place(
    tmp_path: Path, other: dict[str, bytes | int]
) -> None:
    tier, handler = opened(tmp_path / "kv", Disk())
    keys = make_keys(2)
    reservation = tier.prepare_store(keys)
    (table,) = (tmp_path / "kv").rglob(f"*{TABLE_SUFFIX}")
    header = SlabHeader.unpack(table.read_bytes())
    with table.open("r+b") as file:
        file.write(msgspec.structs.replace(header, **other).pack())
    before = files(tmp_path / "kv")
    stored = handler.store(reservation.spec, keys, [sealed(key) for key in keys])
    assert stored == [Outcome.IO_ERROR] * 2
    assert files(tmp_path / "kv") == before
    handler.close()
    tier.close()


class PoorDisk(Disk):
    """Moves a page a call, or answers calls on some page of the data with an error."""

    def __init__(self, error: int = 0, at: int = -1) -> None:
        self.error = error
        self.at = at

    def _page(self, fd: int, buffers: Sequence[Buffer], offset: int) -> list[Buffer]:
        data = Path(f"/proc/self/fd/{fd}").readlink().suffix == DATA_SUFFIX
        size = sum(map(len, buffers))
        if self.error and data and (self.at < 0 or offset <= self.at < offset + size):
            raise OSError(self.error, os.strerror(self.error))
        return [buffers[0][:4096]] if data else list(buffers)

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        return super().readv(fd, self._page(fd, into, offset), offset)

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        return super().writev(fd, self._page(fd, data, offset), offset)


def test_what_the_disk_moves_in_pieces_arrives_whole(tmp_path: Path) -> None:
    round_trip(*opened(tmp_path / "kv", PoorDisk()), make_keys(4))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errno.EIO, Outcome.IO_ERROR),
        (errno.ENOSPC, Outcome.NO_SPACE),
        (errno.EDQUOT, Outcome.NO_SPACE),
        (errno.EINVAL, Outcome.IO_ERROR),  # not only to direct I/O
    ],
)
def test_one_bad_slot_costs_its_neighbours_nothing(
    tmp_path: Path, error: int, outcome: Outcome
) -> None:
    disk = PoorDisk(error)
    tier, handler = opened(tmp_path / "kv", disk)
    keys = make_keys(3)
    reservation = tier.prepare_store(keys)
    assert isinstance(reservation.spec, NvmeSpec)
    disk.at = (reservation.spec.places[1] & SLOT_MASK) * tier.slot_bytes + 4096
    expected = [Outcome.OK, outcome, Outcome.OK]
    assert handler.store(reservation.spec, keys, [sealed(key) for key in keys]) == expected
    assert handler.load(reservation.spec, keys, [blank() for _ in keys]) == expected
    handler.close()
    tier.close()
