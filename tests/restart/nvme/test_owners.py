"""Who acts for a part of a folder: its mark, and what becomes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine, open_files

from kvtier.slab.files import FolderBusy, hold_owner, owner_path
from kvtier.testing.faults import Fault, FaultyDisk, never
from kvtier.testing.subject import make_keys, sealed
from kvtier.types import Outcome


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
    keys = make_keys(3)
    reservation = engine.tier.prepare_store(keys)
    records = [sealed(key) for key in keys]
    assert engine.handler.store(reservation.spec, keys, records) == [Outcome.OK] * 3
    owner_path(engine.keeper.folder.owners, engine.keeper.owner).unlink()
    for _ in range(3):
        outcomes = engine.handler.store(reservation.spec, keys, records)
        assert outcomes == [Outcome.DROPPED] * 3
    assert not engine.handler._slabs._owners, "the descriptor that its lock hung on is closed"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("first", ["handler", "tier"])
def test_the_last_who_acts_for_an_owner_takes_its_mark_away(tmp_path: Path, first: str) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(4)
    engine.put(keys)
    folder = engine.keeper.folder
    mark = owner_path(folder.owners, engine.keeper.owner)
    engine.opened.remove(engine)  # it is closed in parts
    ends = [engine.handler.close, engine.tier.close]
    for end in ends if first == "handler" else reversed(ends):
        assert mark.exists()
        assert folder.alive(engine.keeper.owner)
        end()
    assert not list(folder.owners.iterdir())
    heir = Engine(tmp_path / "kv")
    assert heir.read(keys) == keys


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
    theirs = neighbour.own_slabs
    open_file = os.open

    def too_many(path: Path, flags: int, *mode: int) -> int:
        if Path(path).parent.name == "owners":
            raise OSError(errno.EMFILE, "too many open files")
        return open_file(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        mine.tier.refresh()
    assert not mine.own_slabs & theirs
    assert mine.read(keys) == keys


def test_only_one_of_two_heirs_that_saw_the_same_death_takes_the_slabs(tmp_path: Path) -> None:
    keys = make_keys(8)
    dying = Engine(tmp_path / "kv", blocks=8)
    assert dying.put(keys) == keys
    heirs = [Engine(tmp_path / "kv", blocks=8) for _ in range(2)]
    dying.close()
    for heir in heirs:
        heir.keeper._watch.look()  # nobody owns them, both believe
    for heir in heirs:
        heir.keeper._adopt_orphans()
        heir.tier.tick()
    assert len(heirs[0].own_slabs) == 2
    assert not heirs[1].own_slabs
    for heir in heirs:
        assert heir.read(keys) == keys


def test_who_is_no_owner_any_more_becomes_one_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(4)
    engine.put(keys)
    before = open_files()
    owner_path(engine.keeper.folder.owners, engine.keeper.owner).unlink()
    assert engine.read(keys) == keys
    assert open_files() == before
    neighbour = Engine(tmp_path / "kv")
    assert engine.own_slabs
    assert not engine.own_slabs & neighbour.own_slabs


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


def test_a_folder_that_was_away_is_filled_again_when_it_is_back(tmp_path: Path) -> None:
    """It was moved, say, and blocks were kept in a new one meanwhile."""
    root, away = tmp_path / "kv", tmp_path / "away"
    engine = Engine(root)
    keys = make_keys(16)
    engine.put(keys)
    root.rename(away)
    meanwhile = make_keys(4, start=50)
    assert engine.put(meanwhile) == meanwhile
    root.rename(tmp_path / "bare")
    away.rename(root)
    assert engine.read(keys) == keys
    new = make_keys(8, start=100)
    assert engine.put(new) == new
    assert engine.read(new) == new


def test_own_slabs_that_could_not_be_seen_for_a_moment_are_own_again(tmp_path: Path) -> None:
    """The right to list their folder was taken and given back, say."""
    engine = Engine(tmp_path / "kv", blocks=32)
    keys = make_keys(16)
    engine.put(keys)
    own, home, away = engine.own_slabs, engine.keeper.folder.home, tmp_path / "away"
    away.mkdir()
    for path in (*home.glob("*.table"), *home.glob("*.slab")):
        path.rename(away / path.name)
    assert engine.hits(keys) == []
    for path in away.iterdir():
        path.rename(home / path.name)
    assert engine.read(keys) == keys
    assert engine.own_slabs > own
    new = make_keys(28, start=100)
    assert engine.put(new) == new
    assert engine.read(new) == new


def test_whose_folder_comes_back_as_a_copy_owns_its_slabs_before_others_do(tmp_path: Path) -> None:
    """Or from a disk that was taken off and put in again: what was held is held no more."""
    root, away = tmp_path / "kv", tmp_path / "away"
    engine = Engine(root)
    keys = make_keys(8)
    engine.put(keys)
    root.rename(away)
    shutil.copytree(away, root)
    assert engine.read(keys) == keys
    neighbour = Engine(root)
    assert neighbour.hits(keys) == keys
    assert engine.own_slabs
    assert not engine.own_slabs & neighbour.own_slabs


def test_what_is_stored_after_a_copy_has_come_back_is_in_the_copy(tmp_path: Path) -> None:
    """Files of the old folder are open still, and from a disk that was off they are of no use."""
    root, away = tmp_path / "kv", tmp_path / "away"
    engine = Engine(root, blocks=8)
    keys, new = make_keys(8), make_keys(8, start=100)
    engine.put(keys)
    root.rename(away)
    shutil.copytree(away, root)
    before = {path: path.read_bytes() for path in away.rglob("*.slab")}
    assert engine.put(new) == new
    assert {path: path.read_bytes() for path in away.rglob("*.slab")} == before
    neighbour = Engine(root, blocks=8)
    found = neighbour.read(new)
    assert found
    assert found == engine.hits(new)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the test's own."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_folder_in_which_no_slab_can_be_made_is_down(tmp_path: Path) -> None:
    """It holds nothing and takes nothing, and not for the lack of room."""
    disk = FaultyDisk()
    disk.plan = lambda call: Fault.EIO if call.name == "create" else None
    engine = Engine(tmp_path / "kv", disk=disk)
    assert engine.put(make_keys(1)) == []
    engine.tier.tick()
    assert engine.tier.unwell
    engine.keeper.work()
    engine.tier.tick()
    assert engine.tier.unwell, "until a slab can be made"
    disk.plan = never
    assert engine.put(make_keys(1)) == make_keys(1)
    engine.tier.tick()
    assert not engine.tier.unwell
    disk.plan = lambda call: Fault.EIO if call.name == "create" else None
    keys = make_keys(8, start=10)
    assert engine.put(keys) == keys, "in what there is, by evicting"
    engine.tier.tick()
    assert not engine.tier.unwell
    engine.close()


@pytest.mark.parametrize("below", ["kv", "."])
def test_where_a_disk_was_taken_off_the_one_below_is_not_filled(
    tmp_path: Path, other_disk: Path, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its mount point is a bare folder then, of the system's own disk mostly."""
    mounted = tmp_path / "mounted"
    mounted.symlink_to(other_disk)
    engine = Engine(mounted / below)
    keys = make_keys(8)
    assert engine.put(keys) == keys
    mounted.unlink()
    mounted.mkdir()
    assert engine.read(keys) == []
    assert engine.put(make_keys(1, start=100)) == []
    engine.tier.tick()
    assert engine.tier.unwell
    assert not list(mounted.iterdir())
    assert caplog.text.count("its disk is gone") == 1
    assert "starting over" not in caplog.text
    mounted.rmdir()
    mounted.symlink_to(other_disk)
    assert engine.read(keys) == keys
    new = make_keys(8, start=200)
    assert engine.put(new) == new
    assert engine.read(new) == new
    engine.tier.tick()
    assert not engine.tier.unwell
    engine.close()  # before its disk goes
