"""What an NVMe folder's keeper and handler leave behind when something fails: nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvme_rig import Engine

from kvtier.backends.nvme import handler as handler_module
from kvtier.backends.nvme import keeper as keeper_module
from kvtier.backends.nvme import tier as tier_module
from kvtier.backends.nvme.files import hold_owner, owner_path
from kvtier.backends.nvme.folder import NOBODY, Limits, NvmeFolder
from kvtier.backends.nvme.lock import FolderBusy
from kvtier.backends.nvme.news import News
from kvtier.core.disk import Disk
from kvtier.core.record import Buffer, record_bytes
from kvtier.core.slab import layout
from kvtier.testing.records import NAMESPACE, blank, make_keys, sealed
from kvtier.types import BlockKey, Outcome, Presence

SLOT = record_bytes(NAMESPACE.payload_bytes)
LIMITS = Limits(capacity=1 << 20, free_floor=0, slot_bytes=SLOT, slab_bytes=8 * SLOT)


def open_files() -> int:
    gc.collect()  # what tests before this one have left has files, too
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def own(engine: Engine) -> set[int]:
    return {place.slab.id for place in engine.tier._places.values() if place.mine}


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class OneCreation(Disk):
    """Has room for one more file, and no more."""

    def __init__(self, left: int = 1) -> None:
        self.left = left

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if create:
            if not self.left:
                raise OSError(errno.ENOSPC, "no room for a file")
            self.left -= 1
        return super().open(path, create=create, direct=direct)


@pytest.mark.parametrize("lack", ["length", "files"])
def test_a_slab_that_cannot_be_made_leaves_nothing(tmp_path: Path, lack: str) -> None:
    folder = NvmeFolder(tmp_path / "kv", NAMESPACE, OneCreation(9 if lack == "length" else 1))
    owner, fd = folder.claim()
    there, before = set(folder.home.iterdir()), open_files()
    with files_of_at_most(SLOT if lack == "length" else 1 << 40):
        assert folder.create_slab(owner, 8, LIMITS) is None
    assert open_files() == before
    assert set(folder.home.iterdir()) == there
    os.close(fd)


def test_an_owner_that_is_asked_after_can_still_be_acted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = owner_path(tmp_path, 7)
    path.touch()
    asking = os.open(path, os.O_RDWR)
    fcntl.flock(asking, fcntl.LOCK_EX)
    before = open_files()
    with pytest.raises(BlockingIOError):
        hold_owner(tmp_path, 7)
    assert open_files() == before
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(asking))
    os.close(hold_owner(tmp_path, 7))


def test_stores_for_an_owner_that_is_gone_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path / "kv")
    owner_path(engine.keeper.folder.owners, engine.keeper.owner).unlink()
    keys = make_keys(3)
    reservation = engine.tier.prepare_store(keys)
    for _ in range(3):
        outcomes = engine.handler.store(reservation.spec, keys, [sealed(key) for key in keys])
        assert outcomes == [Outcome.DROPPED] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    engine.close()


@pytest.mark.parametrize("first", ["handler", "tier"])
def test_the_last_who_acts_for_an_owner_takes_its_mark_away(tmp_path: Path, first: str) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(4)
    engine.put(keys)
    folder = engine.keeper.folder
    mark = owner_path(folder.owners, engine.keeper.owner)
    ends = [engine.handler.close, engine.tier.close]
    for end in ends if first == "handler" else reversed(ends):
        assert mark.exists()
        assert folder.alive(engine.keeper.owner)
        end()
    assert not list(folder.owners.iterdir())
    heir = Engine(tmp_path / "kv")
    assert heir.read(keys) == keys
    heir.close()


def test_a_mark_that_was_taken_away_cannot_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = owner_path(tmp_path, 7)
    path.touch()
    open_file = os.open

    def just_before(path: Path, flags: int, *mode: int) -> int:
        fd = open_file(path, flags, *mode)
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", just_before)
    before = open_files()
    with pytest.raises(FileNotFoundError):
        hold_owner(tmp_path, 7)
    assert open_files() == before


def test_an_owner_that_cannot_be_asked_after_may_be_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, neighbour = Engine(tmp_path / "kv"), Engine(tmp_path / "kv")
    keys = make_keys(4)
    neighbour.put(keys)
    theirs = own(neighbour)
    open_file = os.open

    def too_many(path: Path, flags: int, *mode: int) -> int:
        if Path(path).parent.name == "owners":
            raise OSError(errno.EMFILE, "too many open files")
        return open_file(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        mine.tier.refresh()
    assert not own(mine) & theirs
    assert mine.read(keys) == keys
    mine.close()
    neighbour.close()


def test_a_namespace_that_was_reclaimed_while_it_opened_is_made_again(tmp_path: Path) -> None:
    folder = NvmeFolder(tmp_path / "kv", NAMESPACE, Disk())
    shutil.rmtree(folder.home)
    owner, fd = folder.claim()
    assert folder.alive(owner)
    assert (folder.home / "namespace.json").is_file()
    os.close(fd)


def test_who_is_no_owner_any_more_becomes_one_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(4)
    engine.put(keys)
    owner_path(engine.keeper.folder.owners, engine.keeper.owner).unlink()
    assert engine.read(keys) == keys
    neighbour = Engine(tmp_path / "kv")
    assert own(engine)
    assert not own(engine) & own(neighbour)
    engine.close()
    neighbour.close()


def test_news_for_an_idle_engine_is_bounded(tmp_path: Path) -> None:
    idle, busy = Engine(tmp_path / "kv", blocks=16), Engine(tmp_path / "kv", blocks=16)
    keys = make_keys(300)
    for key in keys:
        busy.put([key])
        idle.keeper.work()
    assert len(idle.keeper.news) < 100
    assert idle.read(keys) == busy.read(keys) != []
    idle.close()
    busy.close()


def test_an_idle_engine_gives_slabs_away_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_IDLE_S", 0.0)
    idle = Engine(tmp_path / "kv", blocks=16)
    idle.put(make_keys(16))
    poor = Engine(tmp_path / "kv", blocks=16)
    new = make_keys(4, start=100)
    assert poor.put(new) == []
    for _ in range(6):
        idle.keeper.work(thorough=True)
        idle.keeper.when_idle()
        poor.tier.refresh()
    assert poor.put(new) == new
    idle.close()
    poor.close()


def test_a_tier_that_is_being_asked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_IDLE_S", 600.0)
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.keeper.news.append(News(next(iter(engine.tier._places.values())).slab, gone=True))
    for _ in range(2):
        engine.keeper.when_idle()
    assert engine.keeper.news, "it was asked a moment ago"
    engine.tier._idle_since -= 1000
    keeper = threading.Thread(target=engine.keeper.when_idle)
    with engine.tier.mutex:
        keeper.start()
        keeper.join()
    assert engine.keeper.news, "it is being asked"
    engine.keeper.when_idle()
    assert not engine.keeper.news
    engine.close()


def test_who_asks_while_the_keeper_takes_news_in_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    keys = make_keys(4)
    engine.put(keys)
    tier, take_in = engine.tier, engine.tier._take_in
    found: list[Presence] = []
    asking = threading.Thread(target=lambda: found.extend(tier.lookup(keys)))

    def slowly(news: News) -> int:
        asking.start()
        asking.join(0.05)
        assert asking.is_alive(), "what it finds is about to go"
        return take_in(news)

    monkeypatch.setattr(tier, "_take_in", slowly)
    engine.keeper.news.append(News(next(iter(tier._places.values())).slab, gone=True))
    engine.keeper.when_idle()
    tier._idle_since -= 10
    engine.keeper.when_idle()
    asking.join()
    assert found == [Presence.MISS] * 4
    engine.close()


def test_looking_around_takes_a_small_share_of_a_core(tmp_path: Path) -> None:
    mine, neighbour = Engine(tmp_path / "kv"), Engine(tmp_path / "kv")
    mine.tier.refresh()
    keeper = mine.keeper
    keeper._look_took = 0.0001
    assert keeper.pause() == 0.02
    keeper._look_took = 0.012  # of two thousand slabs
    assert keeper.pause() == pytest.approx(0.12)
    keeper._look_took = 0.05
    assert keeper.pause() == pytest.approx(0.5)
    neighbour.close()
    mine.close()


def test_the_work_on_a_large_folder_takes_a_small_share_of_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full, as folders are, and more room is wanted all the time."""
    engine = Engine(tmp_path / "kv", blocks=8)
    engine.put(make_keys(8))
    seconds = itertools.count(0.0, 0.5)  # a round of ten thousand slabs
    clock = SimpleNamespace(
        monotonic=lambda: 1000.0, thread_time=lambda: next(seconds), time_ns=time.time_ns
    )
    monkeypatch.setattr("kvtier.backends.nvme.keeper.time", clock)
    for start in (100, 200):  # what a round takes is known to the next
        engine.keeper._full_until = 0.0
        engine.tier.prepare_store(make_keys(4, start=start))
        engine.keeper.work(thorough=True)
    assert engine.keeper._next_housekeeping == 1010.0
    assert engine.keeper._full_until == 1010.0
    monkeypatch.undo()
    engine.close()


def test_becoming_an_owner_again_may_fail_and_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "kv")
    shutil.rmtree(engine.root)

    def busy() -> tuple[int, int]:
        raise FolderBusy("busy")

    with monkeypatch.context() as patch:
        patch.setattr(engine.keeper.folder, "claim", busy)
        engine.tier.refresh()
        engine.tier.refresh()
    os.fstat(engine.keeper._owner_fd)
    keys = make_keys(4)
    assert engine.put(keys) == keys
    assert engine.read(keys) == keys
    engine.close()


def test_what_was_dropped_is_written_before_the_slab_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.put(make_keys(4))
    keeper, (slab,) = engine.keeper, own(engine)
    write = keeper_module.write_entries

    def meanwhile(disk: Disk, table: Path, entries: Mapping[int, bytes]) -> None:
        monkeypatch.setattr(keeper_module, "write_entries", write)
        keeper.record(slab, 1, layout.FREE, BlockKey(b""))
        keeper.release(slab, remove=False)
        write(disk, table, entries)

    def written() -> tuple[int, list[int]]:
        found, table = keeper.folder.read_table(slab)
        return found.owner, layout.read_entries(table, 2)["state"].tolist()

    monkeypatch.setattr(keeper_module, "write_entries", meanwhile)
    keeper.record(slab, 0, layout.FREE, BlockKey(b""))
    keeper.flush()
    assert written() == (keeper.owner, [layout.FREE, layout.VALID])
    keeper.flush()
    assert written() == (NOBODY, [layout.FREE, layout.FREE])
    engine.close()


def test_a_table_longer_than_its_slab_is_read_no_further(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    folder, (slab,) = engine.keeper.folder, own(engine)
    os.truncate(folder.table_path(slab), 1 << 40)
    found, table = folder.read_table(slab)
    assert len(table) == found.header.table_bytes
    engine.close()


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
    second.close()


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


def test_slabs_are_closed_while_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_module, "_OPEN_SLABS_MAX", 2)
    disk = Counting()
    engine = Engine(tmp_path / "kv", blocks=32, disk=disk)
    keys = make_keys(32)
    assert engine.put(keys) == keys
    assert len(own(engine)) == 8
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


def test_a_file_that_cannot_be_looked_at_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad inode, say, or somebody else's folder."""
    engine = Engine(tmp_path / "kv")
    assert engine.put(make_keys(4)) == make_keys(4)
    first = min(own(engine))
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
    assert len(own(engine)) >= 3
    engine.keeper._next_uses = 0.0
    engine.tier.touch(make_keys(4))
    engine.keeper.work(thorough=True)
    assert not engine.keeper.uses._noted, "what comes last in a round is done, too"
    monkeypatch.undo()
    engine.close()


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


def test_what_nobody_thought_of_ends_no_keeper_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory runs out, say, while a table is read or news is taken in: there is a next round."""
    other = Engine(tmp_path / "kv")
    assert other.put(make_keys(2)) == make_keys(2)
    worked = threading.Event()
    left = 6

    class Astray(Disk):
        def open_to_read(self, path: str | os.PathLike[str]) -> int:
            fail()
            return super().open_to_read(path)

    def fail() -> None:
        nonlocal left
        if 0 < left <= 4:
            left -= 1
            raise MemoryError

    engine = Engine(tmp_path / "kv", disk=Astray())
    left = 4

    def idle() -> None:
        fail()
        if not left:
            worked.set()

    engine.keeper.when_idle = idle
    other.put(make_keys(1, start=9))
    engine.keeper.start()
    assert worked.wait(60)
    said = [record for record in caplog.records if record.exc_info]
    assert len(said) == 1
    engine.close()
    other.close()
