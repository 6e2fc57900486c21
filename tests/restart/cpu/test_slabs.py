"""An engine's CPU memory: outlives its process, and is taken over only when that is safe."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put, served, settings
from support.tiers.nvme_rig import open_files

from kvtier.backends.cpu import BACKEND, CpuSettings, Region
from kvtier.backends.cpu.folder import in_use, root_of
from kvtier.backends.cpu.medium import Mark
from kvtier.backends.cpu.memory import no_huge_pages
from kvtier.errors import MediumError, MediumInUse
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.testing.subject import make_keys, prove
from kvtier.types import Namespace, Presence

OTHER = TierContext(Namespace(facts={"model": "another"}, group_bytes=(8192,)), "test")


def root(folder: Path) -> Path:
    return root_of(settings(folder), CONTEXT.stack)


def table_of(folder: Path) -> Path:
    [table] = root(folder).rglob("*.table")
    return table


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


def test_a_handler_needs_an_owner_first(tmp_path: Path) -> None:
    with pytest.raises(MediumError, match="its engine makes it first"):
        BACKEND.open_handler(settings(tmp_path), CONTEXT)


def test_huge_pages_are_asked_for_and_their_absence_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        wanted = CpuSettings(
            path=str(tmp_path), capacity=Capacity(size=ByteSize(1 << 20)), huge_pages=True
        )
        BACKEND.open_tier(wanted, CONTEXT).close()
    assert ("has no huge pages" in caplog.text) == (no_huge_pages(tmp_path) is not None)


def test_workers_of_a_dead_engine_keep_others_from_its_slabs(tmp_path: Path) -> None:
    """They may write there until they are gone."""
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
        straggler = Region.attach(tier.region.path)
    with opened(tmp_path, TierContext(CONTEXT.namespace, "next")) as tier:
        assert served(tier, make_keys(3)) == make_keys(3), "they are read"
        assert not tier.has_room, "and not written to"
        straggler.record(0)[:] = b"\xff" * 12288
        straggler.close()
        tier.refresh()
        assert tier.has_room
        assert tier.recovered == 3


@pytest.mark.parametrize("change", ["namespace", "damage", "cut"])
def test_what_does_not_fit_makes_way(tmp_path: Path, change: str) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
    if change == "damage":
        with table_of(tmp_path).open("r+b") as file:
            file.write(b"nonsense")
    if change == "cut":
        os.truncate(table_of(tmp_path), 2000)
    with opened(tmp_path, OTHER if change == "namespace" else CONTEXT) as tier:
        assert tier.lookup(make_keys(3)) == [Presence.MISS] * 3
        assert tier.stats().bytes_used == 0
        assert tier.stats().free == 8


def test_another_capacity_keeps_what_fits(tmp_path: Path) -> None:
    keys = make_keys(2000)
    with opened(tmp_path, blocks=2000) as tier:
        put(tier, keys)
    with opened(tmp_path, blocks=4000) as tier:
        assert len(served(tier, keys)) > 1900
        assert tier.stats().bytes_capacity > 3900 * 12288


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder like /dev/shm anybody may make one of that name."""
    with opened(tmp_path) as tier:
        put(tier, make_keys(2))
    user, mine = os.getuid(), root(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    mine.rename(root(tmp_path))
    with pytest.raises(MediumError, match="is not a folder of this user"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """Whoever lays it could have us make files wherever we may."""
    (tmp_path / "anywhere").mkdir()
    root(tmp_path).symlink_to(tmp_path / "anywhere")
    with pytest.raises(MediumError, match="is not a folder of this user"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)
    assert list((tmp_path / "anywhere").iterdir()) == []


def test_a_view_that_outlives_its_engine_keeps_nobody_from_using_or_removing_its_memory(
    tmp_path: Path,
) -> None:
    keys = make_keys(1)
    with opened(tmp_path) as tier:
        put(tier, keys)
        view = tier.region.record(0)
    assert not in_use(root(tmp_path))
    assert prove(view, keys[0]).ok


def test_an_entry_with_an_impossible_key_is_free(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(8))
        tier.region.table[layout.entry_at(0) + 1] = 200
        tier.region.table[layout.entry_at(1)] = 77
    with opened(tmp_path) as tier:
        assert len(served(tier, make_keys(8))) == 6
        put(tier, make_keys(2, start=100))
        assert tier.stats().evicted == 0


def test_what_is_not_to_be_kept_leaves_nothing(tmp_path: Path) -> None:
    BACKEND.open_tier(settings(tmp_path, keep=False), CONTEXT).close()
    assert list(tmp_path.iterdir()) == []


def test_too_little_shared_memory_is_explained(tmp_path: Path) -> None:
    huge = CpuSettings(path=str(tmp_path), capacity=Capacity(size=ByteSize(1 << 50)))
    with pytest.raises(MediumError, match="lower the cpu tier's capacity"):
        BACKEND.open_tier(huge, CONTEXT)
    assert list(tmp_path.iterdir()) == []


def test_two_engines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(MediumInUse):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)
    with opened(tmp_path):
        pass


def test_a_mark_that_cannot_be_written_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full tmpfs, say, by a process that lives on and tries again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files()
    monkeypatch.setattr(Mark, "begin", full)
    with pytest.raises(MediumError, match="free some room"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)
    assert open_files() == before
    assert not in_use(root(tmp_path))


def test_an_engine_whose_folder_is_removed_starts_over_and_so_do_its_workers(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as tier:
        put(tier, make_keys(3))
        worker = Region.attach(tier.region.path)
        before = tier.region.path
        root(tmp_path).rename(tmp_path / "removed")  # at once: its keeper makes another
        shutil.rmtree(tmp_path / "removed")
        tier.refresh()
        assert tier.lookup(make_keys(3)) == [Presence.MISS] * 3
        with tier._keeper._mutex:  # which opens files as it looks around
            files = open_files()
            with tier.region.path.open("rb") as asking:  # whether it is held, as neighbours do
                fcntl.flock(tier.region._fd, fcntl.LOCK_UN)
                fcntl.flock(asking, fcntl.LOCK_EX)
                worker.refresh()
                fcntl.flock(asking, fcntl.LOCK_UN)
                fcntl.flock(tier.region._fd, fcntl.LOCK_SH)
            assert open_files() == files
        put(tier, make_keys(2, start=50))
        assert served(tier, make_keys(2, start=50)) == make_keys(2, start=50)
        worker.refresh()
        assert worker.path == tier.region.path != before
        spec = tier.prepare_load(make_keys(1, start=50))
        slot = spec.slots[0]  # type: ignore[attr-defined]
        assert prove(worker.record(slot), make_keys(1, start=50)[0]).ok
        worker.close()
