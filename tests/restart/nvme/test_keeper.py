"""What an NVMe folder's keeper and handler leave behind when something fails: nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.cli_world import no_rights
from support.processes.clocks import Clock
from support.tiers.nvme_rig import Engine, open_files

from kvtier.record.record import record_bytes
from kvtier.slab import keeper as keeper_module
from kvtier.slab import layout
from kvtier.slab.files import NOBODY
from kvtier.slab.folder import FolderLimits, SlabFolder
from kvtier.slab.shares import create_slab
from kvtier.slab.watch import SlabUpdate
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Presence

SLOT = record_bytes(NAMESPACE.payload_bytes)
LIMITS = FolderLimits(capacity=1 << 20, free_floor=0, slot_bytes=SLOT, slab_bytes=8 * SLOT)


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
    folder = SlabFolder(tmp_path / "kv", NAMESPACE, OneCreation(9 if lack == "length" else 1))
    owner, fd = folder.claim()
    there, before = set(folder.home.iterdir()), open_files()
    with files_of_at_most(SLOT if lack == "length" else 1 << 40):
        assert create_slab(folder, owner, 8, LIMITS) is None
    assert open_files() == before
    assert set(folder.home.iterdir()) == there
    os.close(fd)


def test_a_namespace_that_was_reclaimed_while_it_opened_is_made_again(tmp_path: Path) -> None:
    folder = SlabFolder(tmp_path / "kv", NAMESPACE, Disk())
    shutil.rmtree(folder.home)
    owner, fd = folder.claim()
    assert folder.alive(owner)
    assert (folder.home / "namespace.json").is_file()
    os.close(fd)


def test_a_folder_is_listed_again_only_if_slabs_came_or_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands, and their keepers look many times a second."""
    one = Engine(tmp_path / "kv", blocks=64)
    home, long_ago = one.keeper.folder.home, 10**9
    listed: list[object] = []
    list_folder = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or list_folder(path))
    one.keeper._watch.look()
    os.utime(home, (long_ago, long_ago))
    one.keeper._watch.look()
    listed.clear()
    for _ in range(3):
        one.keeper._watch.look()
    assert home not in listed
    other = Engine(tmp_path / "kv", blocks=64)
    keys = make_keys(2)
    other.put(keys)
    assert one.hits(keys) == keys


def test_a_change_right_after_a_listing_is_seen(tmp_path: Path) -> None:
    """Though the folder's time, which may be coarse, says that there was none."""
    folder = SlabFolder(tmp_path / "kv", NAMESPACE, Disk())
    owner, fd = folder.claim()
    folder.slab_ids()
    changed = folder.home.stat().st_mtime_ns
    slab = create_slab(folder, owner, 8, LIMITS)
    assert slab is not None
    os.utime(folder.home, ns=(changed, changed))
    assert folder.slab_ids() == {slab.id}
    os.close(fd)


CLOSED_FOR_A_WHILE = """
import os, sys
from pathlib import Path
from kvtier.slab.folder import SlabFolder
from kvtier.slab.folder import FolderLimits
from kvtier.slab.shares import create_slab
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE
folder = SlabFolder(Path(sys.argv[1]), NAMESPACE, Disk())
owner, _ = folder.claim()
create_slab(folder, owner, 8, FolderLimits(1 << 20, 0, slot_bytes=1 << 14, slab_bytes=1 << 17))
os.utime(folder.home, (10**9, 10**9))
folder.home.chmod(0)
print(len(folder.slab_ids()))
folder.home.chmod(0o700)
print(len(folder.slab_ids()))
"""


def test_a_folder_that_was_closed_for_a_while_is_listed_again(tmp_path: Path) -> None:
    """Its time does not say that it is open: as after a `chown -R`, and another."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_FOR_A_WHILE, str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        preexec_fn=no_rights,
    )
    assert (done.stdout, done.stderr) == ("0\n1\n", "")


def test_looking_around_takes_a_small_share_of_a_core(tmp_path: Path) -> None:
    keeper = Engine(tmp_path / "kv").keeper
    Engine(tmp_path / "kv")  # a neighbour
    keeper.work(thorough=True)
    keeper._look_took = 0.0001
    assert keeper.pause() == 0.02
    keeper._look_took = 0.012  # of two thousand slabs
    assert keeper.pause() == pytest.approx(0.12)
    keeper._look_took = 0.05
    assert keeper.pause() == pytest.approx(0.5)


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
    monkeypatch.setattr("kvtier.slab.keeper.time", clock)
    for start in (100, 200):  # what a round takes is known to the next
        engine.keeper._full_until = 0.0
        engine.tier.prepare_store(make_keys(4, start=start))
        engine.keeper.work(thorough=True)
    assert engine.keeper._next_housekeeping == 1010.0
    assert engine.keeper._full_until == 1010.0


def test_what_was_dropped_is_written_before_the_slab_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.put(make_keys(4))
    keeper, (slab,) = engine.keeper, engine.own_slabs
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


def test_no_slab_is_handed_over_while_what_was_dropped_there_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner would serve it again."""
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.put(make_keys(4))
    keeper, (slab,) = engine.keeper, engine.own_slabs

    def failing(disk: Disk, table: Path, entries: Mapping[int, bytes]) -> None:
        raise OSError(errno.EIO, "the disk is worn")

    keeper.record(slab, 0, layout.FREE, BlockKey(b""))
    keeper.release(slab, remove=False)
    with monkeypatch.context() as worn:
        worn.setattr(keeper_module, "write_entries", failing)
        for _ in range(2):
            keeper.flush()
            assert keeper.folder.read_table(slab)[0].owner == keeper.owner
    keeper.flush()
    found, table = keeper.folder.read_table(slab)
    assert found.owner == NOBODY
    assert layout.read_entries(table, 2)["state"].tolist() == [layout.FREE, layout.VALID]


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("under_way", ["store", "load"])
def test_a_slab_is_not_given_up_while_something_is_on_its_way_into_it_or_out_of_it(
    tmp_path: Path, under_way: str, remove: bool
) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    keys, new = engine.put(make_keys(3)), make_keys(1, start=50)
    tier, folder, (slab,) = engine.tier, engine.keeper.folder, engine.own_slabs
    file = tier._places.by_slab[slab].slab

    def asked_to_give_up() -> None:
        engine.keeper.updates.append(SlabUpdate(file, remove=remove))
        tier.tick()
        engine.keeper.flush()

    if under_way == "store":
        assert tier.prepare_store(new).keys == new
    else:
        tier.prepare_load(keys[:1])
    asked_to_give_up()
    assert engine.own_slabs == {slab}
    assert folder.read_table(slab)[0].owner == engine.keeper.owner
    if under_way == "store":
        tier.complete_store(new)
    else:
        tier.complete_load(keys[:1])
    asked_to_give_up()
    assert engine.own_slabs == set()
    assert folder.table_path(slab).exists() is not remove
    if not remove:
        assert folder.read_table(slab)[0].owner == NOBODY


def test_a_slab_that_has_been_given_away_is_not_removed(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.put(make_keys(4))
    (slab,) = engine.own_slabs
    for remove in (False, True):
        file = engine.tier._places.by_slab[slab].slab
        engine.keeper.updates.append(SlabUpdate(file, remove=remove))
        engine.tier.tick()
        engine.keeper.flush()
    assert engine.keeper.folder.read_table(slab)[0].owner == NOBODY


def test_who_clears_leaves_what_is_anothers(tmp_path: Path) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    theirs, ours = other.put(make_keys(2)), mine.put(make_keys(2, start=50))
    assert mine.hits([*theirs, *ours]) == [*theirs, *ours]
    mine.tier.clear()
    assert mine.tier.lookup([*theirs, *ours]) == [Presence.MISS] * 4
    mine.tier.flush()
    assert other.read([*theirs, *ours]) == theirs


def test_who_clears_passes_its_free_slots_once_and_not_for_each_slab(tmp_path: Path) -> None:
    """Sixteen thousand, for each of four thousand slabs, held the engine up for two seconds."""

    class Counted(deque[int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return super().__iter__()

    engine = Engine(tmp_path / "kv", blocks=16)
    engine.put(make_keys(13))
    assert len(engine.own_slabs) == 4
    engine.tier._free = free = Counted(engine.tier._free)
    engine.tier.clear()
    assert free.passes == 1
    assert not free


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


def test_a_trouble_is_said_again_only_if_it_was_away_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Disk):
        fails = False

        def free_bytes(self, path: Path) -> int:
            if self.fails:
                raise OSError(errno.EIO, "it fails")
            return super().free_bytes(path)

    disk, clock = Failing(), Clock()
    engine = Engine(tmp_path / "kv", disk=disk)
    engine.put(make_keys(1))
    steady = SimpleNamespace(monotonic=clock, thread_time=time.thread_time, time_ns=time.time_ns)
    for module in ("keeper", "watch"):
        monkeypatch.setattr(f"kvtier.slab.{module}.time", steady)
    said = []
    for fails in [True] * 5 + [False] * 2 + [True]:
        disk.fails = fails
        clock.now += 1800.0
        engine.keeper.work(thorough=True)
        said.append(caplog.text.count("it fails"))
    assert said == [1, 1, 1, 1, 1, 1, 1, 2]


def test_a_disk_that_hangs_keeps_nobody_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, answers = threading.Event(), threading.Event()

    class Hanging(Disk):
        def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
            if threading.current_thread().name == "kvtier-keeper":
                hangs.set()
                answers.wait(60.0)
            return super().open(path, create=create, direct=direct)

    monkeypatch.setattr(keeper_module, "_CLOSE_S", 0.1)
    engine = Engine(tmp_path / "kv", disk=Hanging())
    keys = engine.put(make_keys(1))
    engine.tier.forget(keys)
    engine.keeper.start()
    assert hangs.wait(10.0)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(5.0)
    closed = not closing.is_alive()
    answers.set()
    closing.join()
    assert closed
    assert "does not answer" in caplog.text
    assert engine.keeper._thread is not None
    engine.keeper._thread.join()
    after = Engine(tmp_path / "kv")
    assert after.hits(keys) == [], "it was written down when the disk went on"
