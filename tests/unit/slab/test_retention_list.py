"""The list of retained blocks in a file: exact, private, and no trap whatever stands in it."""

from __future__ import annotations

import math
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.cpu import BACKEND, CpuSettings
from kvtier.errors import FormatError, NewerFormat
from kvtier.eviction.retention import BLOCKS_MAX, RetainedBlocks
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import retention_list
from kvtier.slab.files import list_path
from kvtier.slab.folder import SlabFolder
from kvtier.slab.retention_list import RetentionFiles
from kvtier.slab.watch import Problems
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

OURS = b"n" * 16
KEYS = make_keys(8)
LIST = {"a": {KEYS[0]: 2e9, KEYS[1]: 2e9}, "": {KEYS[0]: math.inf}}


def sealed(body: bytes, version: int = retention_list.VERSION) -> bytes:
    """A file with a right checksum, whatever its body is."""
    digest = xxhash.xxh3_64_intdigest(body)
    return struct.pack("<8sIIQ16s", retention_list.MAGIC, version, len(body), digest, OURS) + body


def test_it_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "retained-x.bin"
    (tmp_path / "retained-x.bin.making").write_bytes(b"a writer died")
    retention_list.write(Disk(), path, LIST, OURS)
    assert retention_list.read(path, OURS) == LIST
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    retention_list.write(Disk(), path, {"a": {}}, OURS)
    assert not path.exists()
    assert retention_list.read(path, OURS) == {}


@given(at=st.integers(0, 200), bit=st.integers(0, 7), cut=st.integers(0, 200))
def test_damage_is_found(at: int, bit: int, cut: int) -> None:
    data = bytearray(retention_list.encode(LIST, OURS))
    data[at % len(data)] ^= 1 << bit
    for broken in (bytes(data), bytes(data[:cut])):
        with pytest.raises(FormatError):
            retention_list.decode(broken, OURS)


@given(body=st.binary(max_size=300))
def test_what_others_write_with_a_right_checksum_is_no_trap(body: bytes) -> None:
    try:
        found = retention_list.decode(sealed(body), OURS)
    except FormatError:
        return
    assert all(0 < len(key) <= 40 for blocks in found.values() for key in blocks)


@pytest.mark.parametrize(
    "rows",
    [
        [["a", math.nan, [KEYS[0]]]],
        [["a", 1.0, [b"x" * 41]]],
        [["a", 1.0, [b""]]],
        [["a" * 2000, 1.0, [KEYS[0]]]],
        [["a", 1.0, [KEYS[0]], "more"]],
        [[f"s{n}", 1.0, [KEYS[0]]] for n in range(1100)],
        [["a", 1.0, [KEYS[0]] * (2 * BLOCKS_MAX + 1)]],
        {"a": 1},
        [[[[[[1]]]]]],
    ],
)
def test_rows_that_kvtier_does_not_write(rows: object) -> None:
    with pytest.raises(FormatError):
        retention_list.decode(sealed(msgspec.msgpack.encode(rows)), OURS)


def test_it_is_of_one_version_and_one_namespace() -> None:
    with pytest.raises(NewerFormat):
        retention_list.decode(sealed(b"", retention_list.VERSION + 1), OURS)
    with pytest.raises(FormatError, match="another namespace"):
        retention_list.decode(retention_list.encode(LIST, OURS), b"m" * 16)


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    pipe, folder, link = (tmp_path / name for name in ("pipe", "folder", "link"))
    os.mkfifo(pipe)
    folder.mkdir()
    retention_list.write(Disk(), tmp_path / "real", LIST, OURS)
    link.symlink_to(tmp_path / "real")
    for path in (pipe, folder, link):
        with pytest.raises((FormatError, OSError)):
            retention_list.read(path, OURS)


class Full(Disk):
    """A disk on which there is no room, until there is."""

    full = True

    def open(self, path: os.PathLike[str] | str, **how: bool) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().open(path, **how)


def kept_in(
    folder: Path,
    retained: RetainedBlocks,
    disk: Disk | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RetentionFiles:
    found = SlabFolder(folder, NAMESPACE, disk or Disk())
    return RetentionFiles(retained, found, Problems(folder).warn_once, clock)


def test_a_list_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, disk = [0.0], Full()
    retained = RetainedBlocks(lambda: 1.0)
    retained.allow(4)
    kept = kept_in(tmp_path, retained, disk, lambda: now[0])
    kept.begin("a")
    retained.retain(KEYS[:2], "a", 100.0, lambda _: True)
    for _ in range(3):
        kept.look()
        now[0] += 100.0
    assert len(caplog.records) == 1
    assert retained.changed, "it is not written yet"
    disk.full = False
    kept.look()
    again = RetainedBlocks(lambda: 2.0)
    again.allow(4)
    kept_in(tmp_path, again).begin("a")
    assert [BlockKey(key) in again for key in KEYS[:3]] == [True, True, False]


def test_a_list_of_host_memory_lies_beside_it(tmp_path: Path) -> None:
    """Its keeper writes it: no step of an engine waits for that."""
    settings = CpuSettings(capacity=Capacity(size=ByteSize(1 << 20)), path=str(tmp_path))
    opened = BACKEND.open_tier(settings, TierContext(NAMESPACE, "retaining"))
    opened.retain_at_most(8)
    opened.retain(KEYS[:4], "a", math.inf)
    opened.tick()
    assert not opened.unwritten
    opened.close()
    (path,) = tmp_path.rglob("retained-retaining.bin")
    assert retention_list.read(path, NAMESPACE.digest) == {"a": dict.fromkeys(KEYS[:4], math.inf)}


def test_a_list_that_is_damaged_is_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retained = RetainedBlocks()
    retained.allow(4)
    kept = kept_in(tmp_path, retained)
    list_path(tmp_path / NAMESPACE.id, "a").write_bytes(b"rubbish" * 20)
    kept.begin("a")
    assert "is not any more" in caplog.text
    assert len(retained) == 0
