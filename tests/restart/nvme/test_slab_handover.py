"""Slabs that come, go and change hands while something is on its way into them or out of them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiers.nvme_rig import Engine, child, expect

from kvtier.backends.nvme.medium import NvmeSpec
from kvtier.errors import NotResident
from kvtier.record.record import Buffer
from kvtier.slab import watch as slab_watch_module
from kvtier.slab.folder import slab_bytes
from kvtier.slab.layout import BAD, ENTRY_BYTES, SLOT_BITS, TABLE_AT, entry_at
from kvtier.system.disk import Disk
from kvtier.testing.subject import blank, make_keys, prove, sealed
from kvtier.types import BlockKey, EventKind, Outcome, Presence, Reservation


def places(reservation: Reservation) -> set[int]:
    assert isinstance(reservation.spec, NvmeSpec)
    return set(reservation.spec.places)


def test_what_is_read_while_its_slab_is_adopted_is_not_overwritten(tmp_path: Path) -> None:
    mine = Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(4)
    with child(
        "engine = Engine(Path(sys.argv[1]), blocks=8); engine.put(make_keys(4))\n"
        "print('stored', flush=True); sys.stdin.readline()",
        tmp_path / "kv",
    ) as neighbour:
        expect(neighbour, "stored")
        assert mine.hits(keys) == keys
        read, dropped = keys[:2], keys[1]
        spec = mine.tier.prepare_load(read)
        assert isinstance(spec, NvmeSpec)
        mine.tier.forget([dropped])
    neighbour.wait()
    mine.tier.refresh()
    assert mine.hits(keys[2:]) == keys[2:], "the rest of the slab is served on"
    before = mine.tier.prepare_store(make_keys(8, start=100))
    assert not places(before) & set(spec.places)
    mine.tier.complete_store(before.keys, dict.fromkeys(before.keys, Outcome.CANCELLED))
    mine.tier.complete_load(read)
    mine.tier.flush()
    mine.tier.refresh()
    assert mine.read(keys) == [keys[0]], "what was read and not dropped is served on"
    after = mine.tier.prepare_store(make_keys(8, start=200))
    assert len(after.keys) == 8
    assert set(spec.places) < places(after), "who has been read is room again"
    mine.tier.complete_store(after.keys, dict.fromkeys(after.keys, Outcome.CANCELLED))


def test_a_store_into_a_slab_that_is_removed_meanwhile_is_not_committed(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.put(make_keys(1, start=100))
    keys = make_keys(2)
    reservation = engine.tier.prepare_store(keys)
    assert reservation.keys == keys
    for path in engine.keeper.folder.home.glob("*.table"):
        path.unlink()
    stored = engine.handler.store(reservation.spec, keys, [sealed(key) for key in keys])
    assert stored == [Outcome.OK] * 2, "its files are open still"
    engine.tier.refresh()
    engine.tier.complete_store(keys)
    assert engine.tier.lookup(keys) == [Presence.MISS] * 2
    engine.tier.refresh()
    assert engine.put(keys) == keys
    assert engine.read(keys) == keys


def test_a_block_that_two_store_at_once_hides_nothing_later(tmp_path: Path) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    both, new = make_keys(1), make_keys(1, start=100)
    reservation = mine.tier.prepare_store(both)
    assert other.put([*both, *make_keys(3, start=50)])
    mine.tier.refresh()
    mine.handler.store(reservation.spec, both, [sealed(both[0])])
    mine.tier.complete_store(both)
    assert mine.read(both) == both
    assert other.put(new) == new, "in the place of the oldest"
    assert mine.read(new) == new


def test_a_block_that_is_stored_here_is_not_read_there_meanwhile(tmp_path: Path) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(1)
    reservation = mine.tier.prepare_store(keys)
    assert other.put(keys) == keys
    mine.tier.refresh()
    with pytest.raises(NotResident):
        mine.tier.prepare_load(keys)
    mine.tier.complete_store(reservation.keys)
    mine.tier.prepare_load(keys)
    mine.tier.complete_load(keys)
    assert not mine.tier.stats().pinned


def test_what_is_wrong_in_anothers_slab_counts_as_gone_and_not_as_damaged(tmp_path: Path) -> None:
    """Its owner may have used the slot again while it was read."""
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    keys = other.put(make_keys(2))
    assert mine.hits(keys) == keys
    mine.tier.prepare_load(keys)
    mine.tier.complete_load(keys, {keys[0]: Outcome.CORRUPT})
    assert mine.tier.lookup(keys) == [Presence.MISS, Presence.HIT]
    assert mine.tier.stats().corrupt == 0
    assert other.read(keys) == keys


@pytest.mark.parametrize("dies", [False, True])
def test_what_another_has_replaced_while_it_was_read_does_not_count_as_damaged(
    tmp_path: Path, dies: bool
) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    keys = other.put(make_keys(4))
    assert mine.hits(keys) == keys
    spec = mine.tier.prepare_load(keys)
    assert len(other.put(make_keys(8, start=100))) == 8
    if dies:
        other.close()
    assert mine.hits(keys) == [], "it is known here before the read has ended"
    records = [blank() for _ in keys]
    assert mine.handler.load(spec, keys, records) == [Outcome.OK] * 4
    found = {key: prove(record, key) for key, record in zip(keys, records, strict=True)}
    assert set(found.values()) == {Outcome.CORRUPT}
    mine.tier.complete_load(keys, found)
    stats = mine.tier.stats()
    assert (stats.corrupt, stats.pinned, stats.quarantined) == (0, 0, 0)
    mine.close()
    if not dies:
        other.close()


def test_what_lies_in_anothers_slab_never_goes_here_nor_is_its_slot_used(tmp_path: Path) -> None:
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    theirs = other.put(make_keys(2))
    ours = mine.put(make_keys(2, start=50))
    assert mine.hits(theirs) == theirs
    mine.tier.touch([*theirs, *ours])
    assert sorted(mine.tier.victims(100)) == sorted(ours)
    mine.tier.forget(theirs[:1])
    assert sorted(mine.tier.victims(100)) == sorted(ours)
    taken = mine.tier.prepare_store(make_keys(8, start=100))
    assert {place >> SLOT_BITS for place in places(taken)} <= mine.own_slabs
    mine.tier.complete_store(taken.keys, dict.fromkeys(taken.keys, Outcome.CANCELLED))


def test_what_nobody_listens_to_is_told_later_as_one_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.slab.folder_tier.FolderTier.idle_s", 0.0)
    idle, busy = Engine(tmp_path / "kv", blocks=16), Engine(tmp_path / "kv", blocks=16)
    first, keys = make_keys(3), make_keys(150, start=100)
    busy.put(first)
    idle.tier.refresh()
    known = {key for event in idle.tier.take_events() for key in event.keys}
    assert known == set(first)
    for key in keys:
        busy.put([key])
        idle.keeper.work(thorough=True)
        idle.keeper.when_idle()
    events = idle.tier.take_events()
    assert sum(len(event.keys) for event in events) < 40
    for event in events:
        assert known.isdisjoint(event.keys) == (event.kind is EventKind.STORED)
        known.symmetric_difference_update(event.keys)
    assert known == set(idle.hits([*first, *keys])) != set()


def test_a_slab_that_changes_hands_is_no_news_of_its_blocks(tmp_path: Path) -> None:
    mine = Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(6)
    with child(
        "engine = Engine(Path(sys.argv[1]), blocks=8); keys = make_keys(6); engine.put(keys[:4])\n"
        "print('stored', flush=True); sys.stdin.readline()\n"
        "engine.tier.forget(keys[:1]); engine.tier.flush(); engine.put(keys[4:5])\n"
        "print('changed', flush=True); sys.stdin.readline()",
        tmp_path / "kv",
    ) as neighbour:
        expect(neighbour, "stored")
        assert mine.hits(keys) == keys[:4]
        assert [(e.kind, set(e.keys)) for e in mine.tier.take_events()] == [
            (EventKind.STORED, set(keys[:4]))
        ]
        assert neighbour.stdin is not None
        print(flush=True, file=neighbour.stdin)
        expect(neighbour, "changed")
    neighbour.wait()
    assert mine.hits(keys) == keys[1:5]
    keys_by_kind = {kind: set[BlockKey]() for kind in EventKind}
    for event in mine.tier.take_events():
        keys_by_kind[event.kind].update(event.keys)
    assert keys_by_kind == {EventKind.REMOVED: {keys[0]}, EventKind.STORED: {keys[4]}}


def test_what_comes_back_after_it_was_lost_is_told(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(3)
    engine.put(keys)
    engine.tier.take_events()
    for mark in engine.keeper.folder.owners.iterdir():
        mark.unlink()
    assert engine.read(keys) == keys
    known = set(keys)
    for event in engine.tier.take_events():
        assert known.isdisjoint(event.keys) == (event.kind is EventKind.STORED)
        known.symmetric_difference_update(event.keys)
    assert known == set(keys)
    again = Engine(tmp_path / "kv", blocks=8)
    assert again.hits(keys) == keys
    assert again.tier.take_events() == []


@pytest.mark.parametrize("tebibytes", [1, 16, 64, 240, 4096])
def test_the_slabs_of_the_largest_folder_can_be_numbered(tebibytes: int) -> None:
    capacity = tebibytes << 40
    assert capacity // slab_bytes(capacity) <= 1 << 14


def test_what_the_next_owner_drops_is_heard_of_by_who_saw_the_last_one_die(tmp_path: Path) -> None:
    keys = make_keys(4)
    first = Engine(tmp_path / "kv")
    assert first.put(keys) == keys
    seeing = Engine(tmp_path / "kv", grows=False)
    assert seeing.hits(keys) == keys
    first.close()
    seeing.keeper._watch.look()  # it sees that nobody owns these slabs, and is not the first
    second = Engine(tmp_path / "kv")
    assert second.hits(keys) == keys
    second.tier.forget(keys[:2])
    second.tier.flush()
    assert seeing.hits(keys) == keys[2:]


def test_tables_full_of_quarantine_take_no_room_for_ever(tmp_path: Path) -> None:
    keys = make_keys(16)
    engine = Engine(tmp_path / "kv")
    engine.put(keys)
    engine.close()
    for path in (tmp_path / "kv").rglob("*.table"):
        with path.open("r+b") as table:
            for slot in range((path.stat().st_size - TABLE_AT) // ENTRY_BYTES):
                table.seek(entry_at(slot))
                table.write(bytes([BAD]))
    after = Engine(tmp_path / "kv")
    assert after.hits(keys) == []
    assert len(after.put(keys)) == len(keys)
    assert after.tier.stats().quarantined <= 1


def test_for_others_slabs_that_go_nobody_looks_through_what_is_free_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a neighbour's reset thousands go, one after the other."""
    mine, other = Engine(tmp_path / "kv", blocks=32), Engine(tmp_path / "kv", blocks=32)
    keys = make_keys(12)
    assert other.put(keys) == mine.hits(keys) == keys
    looked: list[object] = []
    monkeypatch.setattr(mine.tier, "_drop_free", looked.append)
    other.tier.clear()
    other.keeper.work()
    mine.keeper.work()
    mine.tier.tick()
    assert mine.tier.lookup(keys) == [Presence.MISS] * len(keys)
    assert not looked


def test_a_slab_that_is_being_removed_is_not_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Engine(tmp_path / "kv", blocks=16)
    assert other.put(make_keys(1))
    folder = other.keeper.folder

    class BetweenDisk(Disk):
        """The table is read; before anything else is, its slab is all but removed."""

        def close(self, fd: int) -> None:
            super().close(fd)
            for slab_id in folder.slab_ids():
                folder.table_path(slab_id).unlink()
                os.truncate(folder.data_path(slab_id), 0)

    mine = Engine(tmp_path / "kv", blocks=16, disk=BetweenDisk())
    assert "broken" not in caplog.text
    assert not mine.keeper._broken


class Meanwhile(Disk):
    """Once, something happens when a file has just been read and closed."""

    def __init__(self) -> None:
        self.happens: Callable[[], None] = lambda: None

    def close(self, fd: int) -> None:
        super().close(fd)
        happens, self.happens = self.happens, lambda: None
        happens()


def test_who_is_stopped_while_looking_around_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that changed twice within a tick of the clock does not look changed."""
    neighbour, disk = Engine(tmp_path / "kv"), Meanwhile()
    keys = make_keys(2)
    neighbour.put(keys[:1])
    (table,) = neighbour.keeper.folder.home.glob("*.table")
    mine = Engine(tmp_path / "kv", disk=disk)
    when = table.stat().st_mtime_ns
    clock = SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: when)
    monkeypatch.setattr(slab_watch_module, "time", clock)

    def change_and_stop() -> None:
        neighbour.put(keys[1:])
        os.utime(table, ns=(when, when))
        clock.time_ns = lambda: when + 10**10

    disk.happens = change_and_stop
    mine.keeper.work()
    assert mine.hits(keys) == keys


class WornDisk(Disk):
    """Some files can be read, and not be written any more."""

    def __init__(self) -> None:
        self.worn: set[Path] = set()

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() in self.worn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().writev(fd, data, offset)


def test_a_table_that_cannot_be_written_stops_nothing_else(tmp_path: Path) -> None:
    disk = WornDisk()
    mine = Engine(tmp_path / "kv", blocks=16, disk=disk)
    keys = make_keys(8)
    assert mine.put(keys) == keys
    spec = mine.tier.prepare_load(keys)
    mine.tier.complete_load(keys)
    assert isinstance(spec, NvmeSpec)
    slabs = [place >> SLOT_BITS for place in spec.places]
    bad = [key for key, slab in zip(keys, slabs, strict=True) if slab == slabs[0]]
    good = [key for key, slab in zip(keys, slabs, strict=True) if slab != slabs[0]]
    disk.worn.add(mine.keeper.folder.table_path(slabs[0]))
    free = len(mine.tier._free)
    mine.tier.forget([bad[0], good[0]])
    mine.tier.refresh()
    assert len(mine.tier._free) == free + 1, "the other one is written down"
    other = Engine(tmp_path / "kv", blocks=16)
    assert other.hits(good[:1]) == []
    new = make_keys(1, start=100)
    assert other.put(new) == new
    assert mine.read(new) == new, "who cannot write looks around all the same"
    disk.worn.clear()
    mine.tier.refresh()
    assert other.hits(keys) == [*bad[1:], *good[1:]]
    assert mine.tier._unwritten == set()


def test_a_slab_that_cannot_be_taken_over_stops_nothing_else(tmp_path: Path) -> None:
    with child(
        "engine = Engine(Path(sys.argv[1]), blocks=8); engine.put(make_keys(8))\n"
        "print('stored', flush=True); sys.stdin.readline()",
        tmp_path / "kv",
    ) as dead:
        expect(dead, "stored")
    dead.wait()
    home = next((tmp_path / "kv").glob("*/*.table")).parent
    tables = sorted(home.glob("*.table"), key=lambda table: table.stat().st_mtime_ns)
    assert len(tables) == 2
    disk = WornDisk()
    disk.worn.add(tables[0])
    mine = Engine(tmp_path / "kv", blocks=16, disk=disk)
    assert len(mine.hits(make_keys(8))) == 4
    new = make_keys(4, start=100)
    assert mine.put(new) == new
