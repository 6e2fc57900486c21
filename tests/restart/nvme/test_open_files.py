"""Slabs that cannot be read or opened as they should, and how many are open at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine

from kvtier.backends.nvme import medium as open_slabs_module
from kvtier.backends.nvme.medium import NvmeSpec
from kvtier.record.record import Buffer, record_bytes
from kvtier.slab.layout import SLOT_BITS
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, blank, make_keys, sealed
from kvtier.types import BlockKey, Namespace, Outcome

SLOT = record_bytes(NAMESPACE.payload_bytes)


def test_a_table_longer_than_its_slab_is_read_no_further(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    folder, (slab,) = engine.keeper.folder, engine.own_slabs
    os.truncate(folder.table_path(slab), 1 << 40)
    found, table = folder.read_table(slab)
    assert len(table) == found.header.table_bytes


class Unsteady(Disk):
    """The first reads go wrong, in the way the test says, and later ones do not."""

    def __init__(self, fault: str, times: int) -> None:
        self.fault = fault
        self.left = times

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        done = super().readv(fd, into, offset)
        if self.left:
            self.left -= 1
            if self.fault == "short":
                return min(done, 512)
            into[0][20] ^= 4
        return done


@pytest.mark.parametrize("fault", ["short", "flipped"])
def test_a_read_that_goes_wrong_costs_no_slab(tmp_path: Path, fault: str) -> None:
    keys = make_keys(4)
    first = Engine(tmp_path / "kv")
    first.put(keys)
    first.close()
    second = Engine(tmp_path / "kv", disk=Unsteady(fault, 1))
    assert second.read(keys) == keys


class Counting(Disk):
    """Counts what is open, and calls a function at the first read of a record."""

    def __init__(self) -> None:
        self.open_now: set[int] = set()
        self.at_read: Callable[[], None] | None = None

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        fd = super().open(path, create=create, direct=direct)
        self.open_now.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_now.remove(fd)
        super().close(fd)

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        action = self.at_read
        if action and len(into[0]) == SLOT:
            self.at_read = None
            action()
        return super().readv(fd, into, offset)


def two_slabs(
    folder: Path, disk: Counting | None = None
) -> tuple[Counting, Engine, list[BlockKey], NvmeSpec]:
    """With eight blocks in them, which are about to be loaded."""
    disk = disk or Counting()
    engine = Engine(folder / "kv", blocks=8, disk=disk)
    keys = make_keys(8)
    assert engine.put(keys) == keys
    spec = engine.tier.prepare_load(keys)
    assert isinstance(spec, NvmeSpec)
    return disk, engine, keys, spec


def test_slabs_are_closed_while_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_slabs_module, "_OPEN_SLABS_MAX", 2)
    disk = Counting()
    engine = Engine(tmp_path / "kv", blocks=32, disk=disk)
    keys = make_keys(32)
    assert engine.put(keys) == keys
    assert len(engine.own_slabs) == 8
    assert engine.hits(keys) == keys
    most = 0

    def load(key: BlockKey) -> None:
        spec = engine.tier.prepare_load([key])
        assert engine.handler.load(spec, [key], [blank()]) == [Outcome.OK]
        engine.tier.complete_load([key])

    def meanwhile() -> None:
        nonlocal most
        for key in keys:
            load(key)
            most = max(most, len(disk.open_now))

    disk.at_read = meanwhile
    load(keys[0])
    assert most <= 2 * 4, "two slabs, one more in use, and one more just being opened"
    engine.close()
    assert not disk.open_now


def test_a_slab_that_two_read_is_closed_when_the_last_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_slabs_module, "_OPEN_SLABS_MAX", 1)
    disk, engine, keys, spec = two_slabs(tmp_path)
    done: list[int] = []

    def load(at: int, meanwhile: Callable[[], None] | None = None) -> None:
        disk.at_read = meanwhile
        place = spec.select(at, at + 1)
        assert engine.handler.load(place, [keys[at]], [blank()]) == [Outcome.OK]
        done.append(at)

    load(0, lambda: load(0, lambda: load(7)))
    assert done == [7, 0, 0]
    assert len(disk.open_now) == 2, "only the other slab"
    engine.tier.complete_load(keys)
    engine.close()
    assert not disk.open_now


class Stuck(Counting):
    """Opens one file only when a test lets it."""

    stuck = Path()

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.go_on = threading.Event(), threading.Event()

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if path == self.stuck:
            self.waits.set()
            assert self.go_on.wait(60)
        return super().open(path, create=create, direct=direct)


def test_a_slab_that_takes_long_to_open_delays_no_other(tmp_path: Path) -> None:
    disk = Stuck()
    _, engine, keys, spec = two_slabs(tmp_path, disk)
    engine.handler.close()

    def load(at: int) -> list[Outcome]:
        return engine.handler.load(spec.select(at, at + 1), [keys[at]], [blank()])

    disk.stuck = engine.keeper.folder.table_path(spec.places[0] >> SLOT_BITS)
    with ThreadPoolExecutor(3) as threads:
        try:
            both = [threads.submit(load, 0) for _ in range(2)]
            assert disk.waits.wait(60)
            assert threads.submit(load, 7).result(20) == [Outcome.OK]
        finally:
            disk.go_on.set()
        assert [each.result(60) for each in both] == [[Outcome.OK]] * 2
    assert len(disk.open_now) == 4, "what two have opened is open once"
    engine.tier.complete_load(keys)
    engine.close()
    assert not disk.open_now


def test_slabs_that_were_removed_are_closed_before_another_is_opened(tmp_path: Path) -> None:
    disk, engine, keys, spec = two_slabs(tmp_path)
    engine.handler.close()
    for at in (0, 7):
        assert engine.handler.load(spec.select(at, at + 1), [keys[at]], [blank()]) == [Outcome.OK]
        assert len(disk.open_now) == 2
        engine.keeper.folder.remove_slab(spec.places[at] >> SLOT_BITS)
    engine.tier.complete_load(keys)
    engine.close()


def test_not_all_open_slabs_are_looked_at_whenever_another_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a folder has more of them than may be open, that is with most loads."""
    engine = Engine(tmp_path / "kv", blocks=160)
    engine.keeper.want_room(160)
    engine.keeper.work(thorough=True)
    slabs = sorted(engine.keeper._known)
    assert len(slabs) == 40
    looked: list[open_slabs_module.OpenSlab] = []
    deleted = open_slabs_module.OpenSlab.deleted

    def look(slab: open_slabs_module.OpenSlab) -> bool:
        looked.append(slab)
        return deleted(slab)

    monkeypatch.setattr(open_slabs_module, "_OPEN_SLABS_MAX", 30)
    monkeypatch.setattr(open_slabs_module.OpenSlab, "deleted", look)
    (key,) = make_keys(1)
    for _ in range(3):
        for slab in slabs:
            place = NvmeSpec([slab << SLOT_BITS], engine.keeper.owner)
            assert engine.handler.load(place, [key], [blank()]) == [Outcome.OK]
    assert len(looked) <= 8 * 3 * 40
    for slab in slabs[10:]:  # those that are open
        engine.keeper.folder.remove_slab(slab)
    for slab in slabs[:10]:
        engine.handler.load(NvmeSpec([slab << SLOT_BITS], engine.keeper.owner), [key], [blank()])
    assert len(engine.handler._slabs._slabs) == 10, "all that were removed are closed by then"


def test_a_file_that_cannot_be_looked_at_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad inode, say, or somebody else's folder."""
    engine = Engine(tmp_path / "kv")
    assert engine.put(make_keys(4)) == make_keys(4)
    first = min(engine.own_slabs)
    strange = tmp_path / "kv" / "strange"
    strange.write_bytes(b"")
    bad = {str(strange), str(engine.keeper.folder.table_path(first))}
    lstat, stat = os.lstat, os.stat

    def failing(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def call(path: object, *args: object, **options: object) -> os.stat_result:
            if str(path) in bad:
                raise OSError(errno.EIO, "the disk cannot read this")
            return look(path, *args, **options)

        return call

    monkeypatch.setattr(os, "lstat", failing(lstat))
    monkeypatch.setattr(os, "stat", failing(stat))
    assert engine.put(make_keys(8, start=4)) == make_keys(8, start=4)
    assert len(engine.own_slabs) >= 3
    engine.keeper._next_uses = 0.0
    engine.tier.touch(make_keys(4))
    engine.keeper.work(thorough=True)
    assert not engine.keeper.uses._noted, "what comes last in a round is done, too"


@pytest.mark.parametrize("what", ["", "namespace.json"])
def test_a_model_whose_folder_cannot_be_looked_at_costs_others_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Another user's, say, who lets nobody in."""
    bad, stat = tmp_path / "kv" / ("ab" * 16) / what, os.stat
    idle = Engine(tmp_path / "kv", namespace=Namespace(facts={"model": "b"}, group_bytes=(8192,)))
    idle.put(make_keys(16))
    idle.close()
    bad.mkdir(parents=True)

    def failing(path: object, *args: object, **options: object) -> os.stat_result:
        if str(path) == str(bad):
            raise OSError(errno.EACCES, "permission denied")
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", failing)
    engine = Engine(tmp_path / "kv")
    keys = make_keys(20)
    assert engine.put(keys) == keys
    assert engine.read(keys[-8:]) == keys[-8:]


def test_slabs_are_closed_for_the_mark_of_who_stores(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(8)
    assert engine.put(keys) == keys
    engine.handler.close()  # as if the mover had been started again
    assert engine.read(keys) == keys
    new = make_keys(2, start=100)
    reservation = engine.tier.prepare_store(new)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as full:
        full.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        most = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                full.enter_context(Path("/dev/null").open("rb"))
        outcomes = engine.handler.store(reservation.spec, new, [sealed(key) for key in new])
    assert outcomes == [Outcome.OK] * 2
    engine.tier.complete_store(new)
    assert engine.read(new) == new


class FewFiles(Counting):
    """A process that may have so many files open."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1000

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if len(self.open_now) >= self.most:
            raise OSError(errno.EMFILE, "too many open files")
        return super().open(path, create=create, direct=direct)


def test_slabs_are_closed_where_no_more_files_may_be_opened(tmp_path: Path) -> None:
    disk = FewFiles()
    engine = Engine(tmp_path / "kv", blocks=32, disk=disk)
    keys = make_keys(32)
    assert engine.put(keys) == keys
    engine.handler.close()  # its slabs; it opens them anew
    disk.most = 5
    assert engine.read(keys) == keys
    assert engine.read(keys) == keys
    assert len(disk.open_now) == 4
    engine.handler.close()
    disk.most = 1
    assert engine.read(keys) == [], "where not even one slab can be opened it is an error"
    disk.most = 1000
    assert engine.put(make_keys(8, start=50)) == make_keys(8, start=50)
    engine.close()
    assert not disk.open_now
