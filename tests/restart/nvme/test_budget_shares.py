"""How engines divide a folder, and what one finds changed in the tables of others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import pytest
from support.tiers.nvme_rig import Engine, LowDisk, within

from kvtier.slab import layout
from kvtier.slab import shares as shares_module
from kvtier.slab.files import length, owner_path, used_at, used_bytes
from kvtier.slab.folder import SlabFolder
from kvtier.slab.shares import Shares, reclaim
from kvtier.slab.watch import changes
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

OTHER = NAMESPACE.__class__(
    facts=NAMESPACE.facts | {"model": "another"},
    group_bytes=NAMESPACE.group_bytes,
    parts=NAMESPACE.parts,
)


@pytest.fixture
def rich(tmp_path: Path) -> Engine:
    """Has all four slabs of a folder."""
    engine = Engine(tmp_path / "kv", blocks=16)
    engine.put(make_keys(16))
    return engine


def starving(rich: Engine, count: int = 1) -> list[Engine]:
    poor = [Engine(rich.root, blocks=16, namespace=OTHER) for _ in range(count)]
    for engine in poor:
        assert engine.put(make_keys(1)) == []
    return poor


def test_whose_room_is_given_to_whom(rich: Engine) -> None:
    shares, mine = Shares(rich.keeper.folder, rich.keeper.limits), rich.keeper._mine()
    for age, slab in enumerate(mine, 1):
        os.utime(rich.keeper.folder.table_path(slab.id), (1e9 - age, 1e9 - age))
    coldest = min(mine, key=lambda slab: used_at(rich.keeper.folder.table_path(slab.id)))
    assert shares.excess(rich.keeper.owner, mine) is None, "nobody lacks room"
    (poor,) = starving(rich)
    excess = shares.excess(rich.keeper.owner, mine)
    assert excess is not None
    assert (excess.slab, excess.remove) == (coldest, True), (
        "another model cannot use a slab of ours"
    )
    assert shares.excess(rich.keeper.owner, mine[:3]) is not None
    assert shares.excess(rich.keeper.owner, mine[:2]) is None, "the half is its share"
    poor.close()
    like = Engine(rich.root, blocks=16)
    assert like.put(make_keys(1, start=100)) == []
    excess = shares.excess(rich.keeper.owner, mine)
    assert excess is not None
    assert excess.remove is False, "the same model can"


def test_nobody_gives_the_last_slab_away(rich: Engine) -> None:
    shares, mine = Shares(rich.keeper.folder, rich.keeper.limits), rich.keeper._mine()
    starving(rich, 5)
    assert shares.excess(rich.keeper.owner, mine[:2]) is not None, "more than a sixth"
    assert shares.excess(rich.keeper.owner, mine[:1]) is None
    assert shares.excess(rich.keeper.owner, []) is None


def test_where_the_disk_is_full_before_the_capacity_is_reached_what_is_there_is_divided(
    rich: Engine,
) -> None:
    starving(rich)
    limits = msgspec.structs.replace(rich.keeper.limits, capacity=1 << 40)
    disk = LowDisk(free=limits.slab_bytes // 2)
    shares, mine = Shares(SlabFolder(rich.root, NAMESPACE, disk), limits), rich.keeper._mine()
    assert shares.excess(rich.keeper.owner, mine) is not None
    assert shares.excess(rich.keeper.owner, mine[:2]) is None
    disk.free = 1 << 40
    assert shares.excess(rich.keeper.owner, mine) is None, "there is room for all"


def test_what_an_idle_model_keeps_is_not_counted_as_what_the_living_have(tmp_path: Path) -> None:
    """Who comes first has all the rest, half of the folder, of which the second is to have half."""
    idle = Engine(tmp_path / "kv", blocks=32, namespace=OTHER)
    idle.put(make_keys(32))
    idle.close()
    first = Engine(tmp_path / "kv", blocks=32, keep_s=1000.0)
    first.put(make_keys(32))
    assert len(first.own_slabs) == 4
    second = Engine(tmp_path / "kv", blocks=32, keep_s=1000.0)
    for start in range(6):
        first.put(make_keys(1, start=100 + start))
        second.keeper._full_until = 0.0
        second.put(make_keys(1, start=200 + start))
    assert (len(first.own_slabs), len(second.own_slabs)) == (2, 2)
    assert len(list(idle.keeper.folder.home.glob("*.table"))) == 4


class SmallDisk(LowDisk):
    """With room for what lies in one folder, less what others have filled since."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(room)
        self.root = root

    def free_bytes(self, path: Path) -> int:
        return self.free - used_bytes(self.root)


@pytest.mark.parametrize("less", ["capacity", "room"])
def test_what_is_served_goes_after_what_nobody_serves(tmp_path: Path, less: str) -> None:
    """Where there is less room than there was."""
    root = tmp_path / "kv"
    disk = SmallDisk(root, 1 << 40)
    idle = Engine(root, blocks=32, namespace=OTHER)
    idle.put(make_keys(16))
    idle.close()
    engine = Engine(root, blocks=32, disk=disk)
    engine.put(make_keys(8))
    if less == "capacity":
        engine.close()
        engine = Engine(root, blocks=16, disk=disk)
    else:
        disk.free = used_bytes(root) * 5 // 8
    for _ in range(12):
        engine.tier.refresh()
    assert engine.hits(make_keys(8)) == make_keys(8)


def test_while_others_have_those_whom_nobody_serves_make_room_nobody_else_gives_up_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the folder's lock meanwhile looks once more."""
    idle = Engine(tmp_path / "kv", blocks=32, namespace=OTHER)
    idle.put(make_keys(16))
    idle.close()
    one = Engine(idle.root, blocks=32)
    one.put(make_keys(16))
    limits = msgspec.structs.replace(one.keeper.limits, capacity=used_bytes(idle.root) - 1)
    folder = one.keeper.folder
    locked = folder.locked

    def locked_by_another_before() -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(folder, "locked", locked)
        assert reclaim(folder, limits, 0)
        return locked()

    monkeypatch.setattr(folder, "locked", locked_by_another_before)
    assert Shares(folder, limits).excess(one.keeper.owner, one.keeper._mine()) is None
    assert used_bytes(idle.root) <= limits.capacity


def test_who_has_its_share_lacks_nothing(rich: Engine) -> None:
    shares, mine = Shares(rich.keeper.folder, rich.keeper.limits), rich.keeper._mine()
    starving(rich)
    slab = rich.keeper.limits.slab_bytes
    found = [shares.lacks(rich.keeper.owner, mine[:count], slab) for count in range(4)]
    assert found == [True, True, False, False]


def rounds(*engines: Engine, count: int = 24) -> None:
    """What keepers do in so many seconds, if what comes is stored meanwhile."""
    for number in range(count):
        for index, engine in enumerate(engines):
            engine.keeper._full_until = 0.0
            if engine.keeper.limits.grows:
                engine.put(make_keys(1, start=1000 * (number + 1) + 500 * index))
            engine.tier.refresh()


def test_of_different_capacities_the_largest_of_those_that_run_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has less would else give up all that it is handed, until nothing is left of anything."""
    rich = Engine(tmp_path / "kv", blocks=32)
    rich.put(make_keys(32))
    small = Engine(rich.root, blocks=8)
    rounds(rich, small)
    there = {key for start in range(1000, 25_000, 500) for key in make_keys(1, start=start)}
    assert len(rich.hits([*make_keys(32), *there])) >= 24, "it is full, but for what is made ahead"
    assert small.capacity < used_bytes(rich.root) <= rich.capacity
    assert min(len(rich.own_slabs), len(small.own_slabs)) >= 3, "each has its part"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "different capacities" in caplog.text
    rich.close()
    for _ in range(16):
        small.tier.refresh()
    assert 0 < used_bytes(small.root) <= small.capacity, "its own, once it is alone"


def test_who_waits_for_room_and_does_not_take_it_costs_others_no_more_than_its_part(
    tmp_path: Path,
) -> None:
    """As one that is stopped, or so busy with its start that its keeper has no turn."""
    rich = Engine(tmp_path / "kv", blocks=32)
    rich.put(make_keys(32))
    (poor,) = starving(rich)
    rounds(rich)
    kept = rich.own_slabs
    assert len(kept) == 4
    rounds(rich)
    assert rich.own_slabs == kept, "nothing goes for what is not taken"
    for number in range(16):
        poor.keeper._full_until = 0.0
        poor.put(make_keys(1, start=number))
    assert len(poor.own_slabs) == 4, "its part was left to it"


def test_who_joins_a_folder_that_is_full_to_the_last_byte_costs_no_slab(rich: Engine) -> None:
    """Its mark takes no room from what is stored."""
    full = used_bytes(rich.root)
    limits = msgspec.structs.replace(rich.keeper.limits, capacity=full)
    reader = Engine(rich.root, grows=False)
    reader.keeper.work(thorough=True)
    assert used_bytes(rich.root) == full
    assert Shares(rich.keeper.folder, limits).excess(rich.keeper.owner, rich.keeper._mine()) is None


def test_who_only_reads_drops_nothing_and_gives_all_back_to_who_stores(tmp_path: Path) -> None:
    """Its capacity says nothing: it has taken over what was stored by who is just started again."""
    first = Engine(tmp_path / "kv", blocks=16)
    first.put(make_keys(16))
    reader = Engine(first.root, blocks=4, grows=False)
    first.close()
    for _ in range(8):
        reader.tier.refresh()
    assert reader.read(make_keys(16)) == make_keys(16)
    again = Engine(first.root, blocks=16)
    for start in range(100, 124):
        reader.tier.refresh()
        again.keeper._full_until = 0.0
        again.put(make_keys(1, start=start))
        again.tier.refresh()
    assert (len(again.own_slabs), len(reader.own_slabs)) == (4, 0)


@pytest.mark.parametrize(("keep_s", "kept"), [(1000.0, 2), (0.0, 0)])
def test_who_only_reads_keeps_the_share_of_a_model_that_is_started_again(
    tmp_path: Path, keep_s: float, kept: int
) -> None:
    """As it would be kept if nobody read it."""
    first = Engine(tmp_path / "kv", blocks=16, keep_s=keep_s)
    first.put(make_keys(16))
    reader = Engine(first.root, grows=False, keep_s=keep_s)
    first.close()
    other = Engine(first.root, blocks=16, namespace=OTHER, keep_s=keep_s)
    rounds(other, reader)
    assert (len(reader.own_slabs), len(other.own_slabs)) == (kept, 4 - kept)
    again = Engine(first.root, blocks=16, keep_s=keep_s)
    rounds(again, other, reader)
    assert [len(each.own_slabs) for each in (again, other, reader)] == [2, 2, 0]


def test_models_that_are_only_read_leave_its_share_to_one_that_is_stored_for(
    tmp_path: Path,
) -> None:
    root = tmp_path / "kv"
    third = msgspec.structs.replace(NAMESPACE, facts={"model": "third"})
    models = [NAMESPACE, OTHER]
    stored = [Engine(root, blocks=24, namespace=each, keep_s=1000.0) for each in models]
    rounds(*stored)
    readers = [
        Engine(root, blocks=24, namespace=each, keep_s=1000.0, grows=False) for each in models
    ]
    for each in stored:
        each.close()
    rounds(*readers)
    assert [len(each.own_slabs) for each in readers] == [3, 3]
    new = Engine(root, blocks=24, namespace=third, keep_s=1000.0)
    rounds(new, *readers)
    assert [len(each.own_slabs) for each in (new, *readers)] == [2, 2, 2]


def test_on_a_full_disk_no_room_is_asked_for_again_at_once(tmp_path: Path) -> None:
    """There is none for a word to the neighbours either."""
    engine = Engine(tmp_path / "kv", disk=LowDisk(free=0))
    keeper = engine.keeper
    mark = owner_path(keeper.folder.owners, keeper.owner)
    mark.unlink()
    mark.symlink_to("/dev/full")
    os.close(keeper._owner_fd)
    keeper._owner_fd = os.open(mark, os.O_RDWR)
    keeper._shares.begin_again()
    keeper._full_until = 0.0
    keeper.work(thorough=True)
    keeper.want_room(1)
    assert not keeper._slots_wanted, "each store would have the whole folder looked through"


def test_a_new_owner_says_anew_that_it_starves(rich: Engine, tmp_path: Path) -> None:
    shares = Shares(rich.keeper.folder, rich.keeper.limits)
    for name in ("first", "second"):
        mark = tmp_path / name
        fd = os.open(mark, os.O_RDWR | os.O_CREAT)
        shares.begin_again()
        shares.tell(fd, lacks_room=True)
        assert mark.read_bytes()[:6] == b"hungry"
        if name == "second":
            shares.tell(fd, lacks_room=False)
            assert mark.read_bytes()[:6] != b"hungry"
        os.close(fd)


def test_a_folder_is_weighed_once_however_many_slabs_have_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is held meanwhile: of terabytes that nobody serves, thousands may go at once."""
    rich = Engine(tmp_path / "kv", blocks=16)
    rich.put(make_keys(16))
    rich.close()
    weighed: list[Path] = []

    def weigh(root: Path) -> int:
        weighed.append(root)
        return used_bytes(root)

    folder = SlabFolder(rich.root, OTHER, Disk())
    monkeypatch.setattr(shares_module, "used_bytes", weigh)
    slabs = sorted(rich.root.rglob("*.table"))
    size = sum(length(slabs[0].with_suffix(suffix)) for suffix in (".table", ".slab"))
    room = used_bytes(rich.root) - 2 * size
    assert reclaim(folder, within(room), size)
    assert len(list(rich.root.rglob("*.table"))) == len(slabs) - 3
    assert weighed == [rich.root]


def test_a_slow_disk_does_not_hold_a_folder_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of slabs may have to go, and who waits longer than ten seconds gives up."""
    rich = Engine(tmp_path / "kv", blocks=16)
    rich.put(make_keys(16))
    rich.close()
    now = 0.0

    class SlowDisk(Disk):
        def unlink(self, path: str | Path) -> None:
            nonlocal now
            now += 1.5
            super().unlink(path)

    folder = SlabFolder(rich.root, OTHER, SlowDisk())
    monkeypatch.setattr(shares_module.time, "monotonic", lambda: now)
    slabs = len(list(rich.root.rglob("*.table")))
    assert slabs > 2
    while reclaim(folder, within(1 << 30), 1 << 40):
        assert now <= 3.0
        slabs -= 1
        assert len(list(rich.root.rglob("*.table"))) == slabs
        now = 0.0
    assert slabs == 0


def table(*entries: bytes) -> bytes:
    return bytes(layout.TABLE_AT) + b"".join(entries)


def test_only_what_is_committed_has_a_key() -> None:
    old, new, other = make_keys(3)
    nothing = BlockKey(b"")
    there = [layout.pack_entries(layout.VALID, [key], 0, 1) for key in (old, new)]
    half = layout.pack_entries(layout.RESERVED, [other], 0, 2)
    used = layout.pack_entries(layout.VALID, [new], 0, 1)
    used = used[: layout.USES_AT] + layout.USES.pack(7, 7) + used[layout.USES_AT + 8 :]
    before = table(there[0], there[1], bytes(layout.ENTRY_BYTES))
    assert changes(b"", before, 3) == ([0, 1], [old, new])
    assert changes(before, table(half, used, bytes(layout.ENTRY_BYTES)), 3) == ([0], [nothing])
    assert changes(before, table(there[0], there[1], half), 3) == ([2], [nothing])
    assert changes(before, table(bytes(layout.ENTRY_BYTES), there[1], there[0]), 3) == (
        [0, 2],
        [nothing, old],
    )
