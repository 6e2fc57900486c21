"""What could only be done in part: the rest is done, and both parts are said."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.processes.cli_world import command

from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.use_counts import Uses
from kvtier.cli import app
from kvtier.record.record import record_bytes
from kvtier.slab.files import folder_locked
from kvtier.slab.folder_inspect import find_garbage
from kvtier.slab.layout import TABLE_AT
from kvtier.testing.subject import NAMESPACE
from kvtier.types import BlockKey

pytestmark = pytest.mark.slow

FAILING = "Input/output error; its disk may be failing: see dmesg"


@pytest.fixture
def read_only_lock(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As where the disk has been mounted read-only meanwhile."""

    def locked(root: Path) -> contextlib.AbstractContextManager[None]:
        if "disk" in root.parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root / "lock"))
        return folder_locked(root)

    # First: what is imported later would keep it for ever.
    monkeypatch.setattr("kvtier.slab.folder_inspect.folder_locked", locked)
    return filled


def test_clear_goes_on_with_the_rest(
    read_only_lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["clear", "--yes", "--json", "-c", str(read_only_lock)]) == 1
    out, err = capsys.readouterr()
    cleared = json.loads(out)
    assert [(each["kind"], bool(each["kept"])) for each in cleared] == [
        ("cpu", False),
        ("nvme", True),
    ]
    assert "lock: Read-only file system; name a place that can be written to" in err


def test_gc_goes_on_with_the_rest(read_only_lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["gc", "--idle", "0s", "-c", str(read_only_lock)]
    assert app.run([*args, "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [("host" in Path(row["where"]).parts, row["removed"]) for row in report["found"]] == [
        (True, True),
        (False, False),
    ]
    assert "Read-only file system" in report["troubles"][0]
    assert "Read-only file system" in err


def test_gc_says_what_it_removed_before_something_could_not_be_looked_at(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(root: Path, *given: Any) -> Any:
        if "disk" in root.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "blocks")
        return find_garbage(root, *given)

    monkeypatch.setattr("kvtier.slab.folder_inspect.find_garbage", unreadable)
    assert app.run(["gc", "--idle", "0s", "-c", str(filled)]) == 1
    out, err = capsys.readouterr()
    assert "1 was removed" in out
    assert "blocks: Input/output error" in err


@pytest.mark.parametrize("words", [["ls"], ["du"], ["verify"], ["gc"]])
def test_a_table_that_its_disk_does_not_give_hides_no_other_tier(
    words: list[str],
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = os.pread

    def read_all_but_entries(fd: int, size: int, at: int) -> bytes:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if size > TABLE_AT and path.suffix == ".table" and "disk" in path.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", read_all_but_entries)
    assert app.run([*words, "--json", "--config", str(filled)]) == 1
    out, err = capsys.readouterr()
    tables = [*(filled.parent / "disk").rglob("*.table")]
    assert [f"kvtier: {each}: {FAILING}" for each in sorted(tables)] == err.splitlines()
    assert words == ["gc"] or str(8 * record_bytes(NAMESPACE.payload_bytes)) in out


def test_a_file_that_its_disk_does_not_give_is_not_said_to_be_nobodys(filled: Path) -> None:
    table = next((filled.parent / "disk").rglob("*.table"))
    table.unlink()
    table.symlink_to("/proc/self/mem")  # a file whose first bytes are an error
    done = command("ls", "-c", filled)
    assert (done.code, done.err) == (1, f"kvtier: {table}: {FAILING}\n")


@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.EBADMSG, errno.ESTALE])
def test_nor_is_one_in_a_damaged_file_system(
    number: int, filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As XFS says it where a checksum of its own is wrong, and NFS of what it has lost."""
    read = os.pread

    def read_no_table(fd: int, size: int, at: int) -> bytes:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".table":
            raise OSError(number, os.strerror(number))
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", read_no_table)
    assert app.run(["ls", "-c", str(filled)]) == 1
    err = capsys.readouterr().err
    assert f".table: {os.strerror(number)}; " in err
    assert "remove it" not in err


def test_a_copy_is_whole_without_its_statistics(
    filled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(uses: Uses, used: Mapping[BlockKey, tuple[int, float]]) -> None:
        raise StoreError("no room: free some")

    monkeypatch.setattr(Uses, "carry", full)
    assert app.run(["snapshot", "-c", str(filled), "--to", f"file://{tmp_path}/s"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("8 of 8 blocks copied")
    assert "did not come along: no room: free some" in err
