"""The CPU region: outlives its process, is taken over only when that is safe, and never leaks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put, served, settings

from kvtier.backends.cpu import BACKEND, CpuSettings
from kvtier.backends.cpu import huge_page_support as huge
from kvtier.backends.cpu.leftover_regions import leftovers, regions
from kvtier.backends.cpu.region import Region, read_header
from kvtier.backends.cpu.region_locks import in_use
from kvtier.errors import FormatError, MediumError, MediumInUse
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.testing.subject import make_keys, prove
from kvtier.types import Namespace, Presence

OTHER = TierContext(Namespace(facts={"model": "another"}, group_bytes=(8192,)), "test")


def test_what_was_touched_a_moment_ago_is_not_next_to_go(tmp_path: Path) -> None:
    """Touches are told to the policy late: not after it has chosen."""
    keys = make_keys(8)
    with opened(tmp_path) as tier:
        for key in keys:
            put(tier, [key])
        tier.touch(keys[:1])
        assert tier.victims(1) == keys[1:2]
        tier.touch(keys[1:2])
        assert tier.prepare_store(make_keys(1, start=50)).evicted == keys[2:3]


def test_what_takes_the_room_of_others_lies_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(8))
        spec = tier.prepare_store(make_keys(8, start=100)).spec
    assert spec.slots == list(range(8)), "prompts go from their ends"  # type: ignore[attr-defined]


def test_of_two_prompts_that_are_stored_together_neither_goes_from_its_head(
    tmp_path: Path,
) -> None:
    """As they come to a lower tier: so many blocks at a time, whosever they are."""
    first, second = make_keys(4), make_keys(4, start=50)
    chosen = msgspec.structs.replace(settings(tmp_path), eviction="adaptive")
    with contextlib.closing(BACKEND.open_tier(chosen, CONTEXT)) as tier:
        tier.touch(first)
        tier.touch(second)
        tier.tick()
        for keys in (first[:2], second[:2], first[2:] + second[2:]):
            put(tier, keys)
        order = tier.victims(8)
    assert [key for key in order if key in first] == first[::-1]
    assert [key for key in order if key in second] == second[::-1]


def test_after_a_restart_prompts_still_go_from_their_ends(tmp_path: Path) -> None:
    keys = make_keys(8)
    with opened(tmp_path) as tier:
        put(tier, keys)
        before = tier.victims(8)
    assert before == keys[::-1]
    with opened(tmp_path) as tier:
        assert tier.victims(8) == before


def test_workers_of_a_dead_engine_cannot_write_into_the_next_ones_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.backends.cpu.owned_region._DYING_S", 0.1)
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
        straggler = Region.attach(tier.region.path)
    with opened(tmp_path) as tier:
        assert served(tier, make_keys(3)) == []
        put(tier, make_keys(3))
        straggler.record(0)[:] = b"\xff" * 12288
        assert served(tier, make_keys(3)) == make_keys(3)
        straggler.close()


@pytest.mark.parametrize("change", ["namespace", "capacity", "damage", "cut"])
def test_a_region_that_does_not_fit_is_made_anew(tmp_path: Path, change: str) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
        path = tier.region.path
    if change == "damage":
        with path.open("r+b") as file:
            file.write(b"nonsense")
    if change == "cut":
        os.truncate(path, 20000)
    context = OTHER if change == "namespace" else CONTEXT
    with opened(tmp_path, context, blocks=9 if change == "capacity" else 8) as tier:
        assert served(tier, make_keys(3)) == []
        assert tier.stats().bytes_used == 0


@pytest.mark.parametrize(
    "change",
    [{"data_at": 4096}, {"data_at": 8192 + 512}, {"slots": 1 << 16}, {"slot_bytes": 1 << 30}],
)
def test_numbers_that_do_not_fit_are_refused_though_their_checksum_is_right(
    tmp_path: Path, change: dict[str, int]
) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
        path, header = tier.region.path, tier.region.header
    assert header.data_at == 8192
    with path.open("r+b") as file:
        read_header(file.fileno())
        file.write(msgspec.structs.replace(header, **change).pack())
        file.flush()
        with pytest.raises(FormatError):
            read_header(file.fileno())
    with opened(tmp_path) as tier:
        assert served(tier, make_keys(3)) == []


def test_a_region_of_another_user_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder like /dev/shm anybody may make a file of that name."""
    keys = make_keys(2)
    with opened(tmp_path) as tier:
        put(tier, keys)
        path = tier.region.path
    real = os.fstat

    def planted(fd: int) -> os.stat_result:
        found = real(fd)
        there = path.exists() and os.path.samestat(found, path.stat())
        return os.stat_result((*found[:4], found.st_uid + there, *found[5:]))

    monkeypatch.setattr(os, "fstat", planted)
    with opened(tmp_path) as tier:
        assert tier.lookup(keys) == [Presence.MISS] * 2
    assert "it belongs to another user" in caplog.text


def test_a_view_that_outlives_its_region_keeps_nobody_from_using_or_removing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(1)
    with opened(tmp_path) as tier:
        put(tier, keys)
        path, view = tier.region.path, tier.region.record(0)
    assert not in_use(path)
    assert prove(view, keys[0]).ok
    assert list(regions(tmp_path)) == [path]
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert list(regions(tmp_path)) == [], "those of others are not ours to remove"


@pytest.mark.parametrize("restarted", [True, False])
def test_a_block_that_is_stored_anew_looks_like_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """Even in the same slot and second: who copies it meanwhile must see that it was replaced."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    keys = make_keys(1)
    with contextlib.ExitStack() as stack:
        tier = stack.enter_context(opened(tmp_path, blocks=1))
        put(tier, keys)
        before = tier.region.entry(0)
        if restarted:
            stack.close()
            tier = stack.enter_context(opened(tmp_path, blocks=1))
            assert layout.same_block(tier.region.entry(0), before)
        tier.forget(keys)
        put(tier, keys)
        after = tier.region.entry(0)
        assert (before[0], after[0]) == (layout.VALID, layout.VALID)
        assert not layout.same_block(before, after)


def test_an_entry_with_an_impossible_key_is_free(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(8))
        tier.region.table[layout.entry_at(0) + 1] = 200
        tier.region.table[layout.entry_at(1)] = 77
    with opened(tmp_path) as tier:
        assert len(served(tier, make_keys(8))) == 6
        put(tier, make_keys(2, start=100))
        assert tier.stats().evicted == 0


def test_a_discarded_region_leaves_nothing(tmp_path: Path) -> None:
    BACKEND.open_tier(settings(tmp_path, keep=False), CONTEXT).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [True, False])
def test_whether_a_region_is_kept_is_up_to_its_last_owner(tmp_path: Path, keep: bool) -> None:
    """Who made it may have wanted it otherwise; nobody is there to say so after a death."""
    for wanted in (not keep, keep):
        tier = BACKEND.open_tier(settings(tmp_path, keep=wanted), CONTEXT)
        if wanted != keep:
            put(tier, make_keys(3))
        assert served(tier, make_keys(3)) == make_keys(3), "taken over"
        tier._owned_region.close(remove=False)  # as a death leaves it
    assert bool(leftovers(tmp_path, time.time())) is not keep


def test_a_handler_needs_an_owner_first(tmp_path: Path) -> None:
    with pytest.raises(MediumError, match="its engine makes it first"):
        BACKEND.open_handler(settings(tmp_path), CONTEXT)


def test_too_little_shared_memory_is_explained(tmp_path: Path) -> None:
    name = f"huge-{uuid.uuid4().hex}"
    huge = CpuSettings(path="/dev/shm", capacity=Capacity(size=ByteSize(1 << 50)), name=name)
    with pytest.raises(MediumError, match="lower the cpu tier's capacity"):
        BACKEND.open_tier(huge, CONTEXT)
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_huge_pages_are_asked_for_and_their_absence_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        wanted = CpuSettings(
            path=str(tmp_path), capacity=Capacity(size=ByteSize(1 << 20)), huge_pages=True
        )
        BACKEND.open_tier(wanted, CONTEXT).close()
    assert ("has no huge pages" in caplog.text) == (huge.why_none(tmp_path) is not None)


def test_a_link_in_the_place_of_an_owner_is_not_followed(tmp_path: Path) -> None:
    """Whoever lays it could have us make a file wherever we may."""
    with opened(tmp_path) as tier:
        owner = tier.region.path.with_suffix(".owner")
    owner.unlink()
    owner.symlink_to(tmp_path / "anywhere")
    with pytest.raises(MediumError, match="symbolic links"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)
    assert not (tmp_path / "anywhere").exists()


def test_a_link_in_the_place_of_a_region_is_not_followed(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
        put(tier, make_keys(1))
    other = path.rename(tmp_path / "anothers")
    path.symlink_to(other)
    with pytest.raises(MediumError):
        Region.attach(path)
    with opened(tmp_path) as tier:
        assert not path.is_symlink()
        assert served(tier, make_keys(1)) == []


def test_a_lock_that_was_removed_before_it_was_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def too_late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        next(tmp_path.glob("*.owner")).unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with opened(tmp_path), pytest.raises(MediumInUse):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)


def test_who_only_asks_whether_a_region_is_used_keeps_nobody_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
    for name in (path, path.with_suffix(".owner")):
        asking = os.open(name, os.O_RDWR)
        fcntl.flock(asking, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", lambda seconds, fd=asking: os.close(fd))
            if name == path:
                Region.attach(path).close()
            else:
                with opened(tmp_path):
                    pass


def test_a_folder_in_the_place_of_a_region_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
    path.unlink()
    path.mkdir()
    with pytest.raises(MediumError, match=f"{path.name} anew.*: remove it"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)
