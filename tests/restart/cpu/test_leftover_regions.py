"""Which regions of CPU memory go, and when, and which are never touched."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, settings, writer

from kvtier.backends.cpu import BACKEND
from kvtier.backends.cpu.leftover_regions import leftovers, remove, unfinished
from kvtier.backends.cpu.region_locks import in_use
from kvtier.errors import MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.settings import Duration
from kvtier.testing.subject import NAMESPACE


def test_a_region_is_in_use_from_its_owner_on_and_nothing_of_his_is_a_leftover(
    tmp_path: Path,
) -> None:
    path = tmp_path / f"kvtier-{os.getuid()}-x.region"
    making, owner = path.with_suffix(".making"), path.with_suffix(".owner")
    assert not in_use(path)
    making.touch()
    assert unfinished(tmp_path) == [path]
    with owner.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert in_use(path)
        assert unfinished(tmp_path) == []
    assert unfinished(tmp_path) == [path]
    path.touch()
    assert unfinished(tmp_path) == [], "the region is there: it is looked at itself"


def test_regions_that_nobody_will_attach_to_are_found(tmp_path: Path) -> None:
    now = time.time()
    with opened(tmp_path, TierContext(NAMESPACE, "living")), writer(tmp_path) as pid:
        assert leftovers(tmp_path, now + 100) == [], "regions in use are nobody's leftovers"
        os.kill(pid, signal.SIGKILL)
    assert leftovers(tmp_path, now) == [], "a kept one may be attached to again"
    assert len(leftovers(tmp_path, now + 8 * 86400)) == 2, "but not for ever"


def test_the_next_engine_removes_leftovers(tmp_path: Path) -> None:
    old = BACKEND.open_tier(settings(tmp_path, keep=False), TierContext(NAMESPACE, "old"))
    path = old.region.path
    old._discard = False  # die without cleaning up
    old.close()
    assert path.exists()
    kept = tmp_path / "kvtier-0-notes.txt"
    kept.write_text("not a region")
    with opened(tmp_path):
        assert not path.exists()
    assert kept.exists()


def test_who_lacks_room_hears_whose_region_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    renamed = TierContext(NAMESPACE, "renamed")
    with opened(tmp_path):
        old = BACKEND.open_tier(settings(tmp_path), TierContext(NAMESPACE, "old"))
        old.close()
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MediumError) as raised:
            BACKEND.open_tier(settings(tmp_path), renamed)
    path = tmp_path / f"kvtier-{os.getuid()}-kv-old.region"
    assert f"no engine uses {path} now" in str(raised.value)


@pytest.mark.parametrize("used_at", [0, 4_000_000_000])
def test_keep_for_is_the_age_after_which_regions_go(tmp_path: Path, used_at: int) -> None:
    """So do those of days to come, by a clock that was wrong: they would hold memory till then."""
    with opened(tmp_path, TierContext(NAMESPACE, "old")) as tier:
        path = tier.region.path
    os.utime(path, (used_at, used_at))
    assert settings(tmp_path).keep_for == Duration(7 * 86400.0)
    with opened(tmp_path):
        assert not path.exists()


def test_each_region_is_kept_for_as_long_as_its_own_engine_says(tmp_path: Path) -> None:
    """Not for as long as the one that starts beside it, or whose stack `gc` is given."""
    short = msgspec.structs.replace(settings(tmp_path), keep_for=Duration(60.0))
    tiers = [
        BACKEND.open_tier(each, TierContext(NAMESPACE, name))
        for each, name in ((settings(tmp_path), "weeks"), (short, "minutes"))
    ]
    now = time.time()
    for tier in tiers:
        tier.close()
    weeks, minutes = (tier.region.path for tier in tiers)
    assert leftovers(tmp_path, now + 3600) == [minutes]
    assert set(leftovers(tmp_path, now + 8 * 86400)) == {weeks, minutes}


def test_a_region_whose_maker_died_before_it_said_how_long_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
        tier.region.table[136:140] = bytes(4)
        assert leftovers(tmp_path, time.time() + 3600) == [], "it is in use"
    assert leftovers(tmp_path, time.time() + 1) == [path]


def test_a_region_that_was_never_finished_is_removed_by_the_next_engine(tmp_path: Path) -> None:
    with opened(tmp_path, TierContext(NAMESPACE, "living")) as tier:
        making = tier.region.path.with_suffix(".making")
        making.write_bytes(bytes(4096))
        dead = tmp_path / making.name.replace("living", "dead")
        dead.write_bytes(bytes(4096))
        with opened(tmp_path):
            assert not dead.exists(), "its maker is"
            assert making.exists(), "its maker lives"


def test_what_others_put_beside_regions_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    """All users share /dev/shm, and nobody can remove there what is another's."""
    theirs = tmp_path / f"kvtier-{os.getuid()}-theirs-1.making"
    theirs.mkdir()
    with opened(tmp_path) as tier:
        assert sorted(tmp_path.iterdir()) == sorted(
            [theirs, tier.region.path, tier.region.path.with_suffix(".owner")]
        )


def test_a_region_that_is_used_lately_is_no_leftover(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
        os.utime(path, (0, 0))
        tier.tick()
        assert time.time() - path.stat().st_mtime < 60


def test_a_region_is_used_lately_though_the_clock_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that was made before the machine had the time would be a leftover at once when its
    engine is killed, for whoever starts first."""
    now, steady = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now + 30 * 86400)
    with opened(tmp_path) as tier:
        path = tier.region.path
        tier.tick()
        os.utime(path, (now + 30 * 86400,) * 2)
        monkeypatch.setattr(time, "time", lambda: now)
        monkeypatch.setattr(time, "monotonic", lambda: steady + 2 * 3600)
        tier.tick()
        assert abs(path.stat().st_mtime - now) < 60


def test_what_somebody_has_begun_to_use_is_not_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = tier.region.path
        assert not remove(path)
    handler = BACKEND.open_handler(settings(tmp_path), CONTEXT)
    assert not remove(path)
    handler.close()
    assert remove(path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_no_region_to_look_into(tmp_path: Path) -> None:
    """To open a pipe that nobody writes to would be to wait for ever."""
    os.mkfifo(tmp_path / f"kvtier-{os.getuid()}-pipe-1.region")
    (tmp_path / f"kvtier-{os.getuid()}-link-1.region").symlink_to("/dev/zero")
    assert leftovers(tmp_path, time.time() + 10.0) == []
