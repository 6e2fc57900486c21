"""Which folders of CPU memory go, and when, and which are never touched."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, settings, writer

from kvtier.backends.cpu import BACKEND
from kvtier.backends.cpu.folder import former_regions, leftovers, remove, root_of
from kvtier.errors import MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.settings import Duration
from kvtier.slab.files import LOCK
from kvtier.testing.subject import NAMESPACE


def stack(name: str) -> TierContext:
    return TierContext(NAMESPACE, name, stack=name)


def root(folder: Path, name: str = "default") -> Path:
    return root_of(settings(folder), name)


def test_folders_that_nobody_will_come_back_to_are_found(tmp_path: Path) -> None:
    now = time.time()
    with opened(tmp_path, stack("living")), writer(tmp_path) as pid:
        assert leftovers(tmp_path, now + 100) == [], "what is in use is nobody's leftover"
        os.kill(pid, signal.SIGKILL)
    assert leftovers(tmp_path, now) == [], "what is kept may be asked for again"
    assert len(leftovers(tmp_path, now + 8 * 86400)) == 2, "but not for ever"


def test_who_lacks_room_hears_whose_memory_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, stack("old")):
        pass
    monkeypatch.setattr("kvtier.system.disk.Disk.free_bytes", lambda self, path: 4096)
    with pytest.raises(MediumError, match=f"no engine uses {root(tmp_path, 'old')} now"):
        BACKEND.open_tier(settings(tmp_path), CONTEXT)


@pytest.mark.parametrize("used_at", [0, 4_000_000_000])
def test_keep_for_is_the_age_after_which_memory_goes(tmp_path: Path, used_at: int) -> None:
    """So does that of days to come, by a clock that was wrong: it would be held till then."""
    with opened(tmp_path, stack("old")):
        pass
    os.utime(root(tmp_path, "old") / LOCK, (used_at, used_at))
    assert settings(tmp_path).keep_for == Duration(7 * 86400.0)
    kept = tmp_path / "kvtier-0-notes.txt"
    kept.write_text("no folder")
    with opened(tmp_path):
        assert not root(tmp_path, "old").exists()
    assert kept.exists()


def test_each_is_kept_for_as_long_as_its_own_engine_says(tmp_path: Path) -> None:
    """Not for as long as the one that starts beside it, or whose stack `gc` is given."""
    short = msgspec.structs.replace(settings(tmp_path), keep_for=Duration(60.0))
    tiers = [
        BACKEND.open_tier(each, stack(name))
        for each, name in ((settings(tmp_path), "weeks"), (short, "minutes"))
    ]
    now = time.time()
    for tier in tiers:
        tier.close()
    weeks, minutes = root(tmp_path, "weeks"), root(tmp_path, "minutes")
    assert leftovers(tmp_path, now + 3600) == [minutes]
    assert set(leftovers(tmp_path, now + 8 * 86400)) == {weeks, minutes}


def test_what_others_put_there_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    """All users share /dev/shm, and nobody can remove there what is another's."""
    theirs = tmp_path / f"kvtier-{os.getuid()}-theirs-1.region"
    theirs.mkdir()
    os.mkfifo(tmp_path / f"kvtier-{os.getuid()}-pipe")
    (tmp_path / f"kvtier-{os.getuid()}-link").symlink_to("/dev")
    before = set(tmp_path.iterdir())
    with opened(tmp_path):
        assert set(tmp_path.iterdir()) == {*before, root(tmp_path)}
    assert leftovers(tmp_path, time.time() + 10.0) == []


def test_memory_of_the_version_before_goes_unless_an_engine_has_it(tmp_path: Path) -> None:
    region = tmp_path / f"kvtier-{os.getuid()}-kv-engine.region"
    for suffix in (".region", ".owner", ".retained"):
        region.with_suffix(suffix).write_bytes(bytes(4096))
    assert len(list(former_regions(tmp_path))) == 3
    with opened(tmp_path):
        assert list(tmp_path.iterdir()) == [root(tmp_path)]


def test_what_somebody_has_begun_to_use_is_not_removed(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert not remove(root(tmp_path))
        handler = BACKEND.open_handler(settings(tmp_path), CONTEXT)
    assert not remove(root(tmp_path)), "a worker has it"
    handler.close()
    assert remove(root(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_engine_that_has_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path):
        pass
    monkeypatch.setattr(os, "posix_fallocate", full)
    with opened(tmp_path) as tier:
        assert tier.has_room
