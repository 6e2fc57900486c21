"""Stores and files that somebody else has written to, and meant no good."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from kvtier.backends.object.object_names import block_name
from kvtier.cli import inspect as work
from kvtier.cli.inspect import bounded_map
from kvtier.record.codec import Codec
from kvtier.record.record import HEADER_BYTES, Header, part_sum, put_sum
from kvtier.slab.files import is_empty
from kvtier.testing.subject import make_keys
from kvtier.types import Namespace

pytestmark = pytest.mark.slow


def with_a_store(stack: Path, root: Path) -> Path:
    stack.write_text(
        f'{stack.read_text()}  - {{kind: object, url: "{root.as_uri()}", capacity: 1GiB}}\n'
    )
    return stack


# -- more than there is memory for -------------------------------------------------------------

ZEROS = 128 << 20
BOMBS = 8

# The command line, which says at the end how much memory it took at the most, in KiB.
WEIGHED = """
import resource
from kvtier.cli import main
try:
    main.main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture
def bombs(stack_file: Path, tmp_path: Path) -> Path:
    """A store of a few kilobytes whose blocks are a gigabyte when all are unpacked."""
    root = tmp_path / "store"
    namespace = Namespace(facts={"model": "bomb"}, group_bytes=(ZEROS,))
    zeros = bytes(ZEROS)
    packed, checksum = zstandard.ZstdCompressor().compress(zeros), part_sum(memoryview(zeros))
    assert len(packed) < 16 << 10
    (root / namespace.id).mkdir(parents=True)
    (root / namespace.id / "namespace.json").write_bytes(namespace.to_json())
    for key in make_keys(BOMBS):
        head = memoryview(bytearray(HEADER_BYTES))
        Header(key, namespace.digest, ZEROS, 1, Codec.ZSTD, len(packed)).write(head)
        put_sum(head, 0, checksum)
        path = root / block_name(namespace.id, key)
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(head) + packed)
    return with_a_store(stack_file, root)


def test_few_blocks_are_unpacked_at_once(bombs: Path) -> None:
    words = [sys.executable, "-c", WEIGHED, "verify", "-c", bombs, "--tier", "object", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    said, weight = done.stdout.rsplit("\n", 2)[:2]
    assert json.loads(said)["counts"]["good"] == BOMBS, done.stderr
    assert int(weight) << 10 < work.BYTES_MAX + ZEROS


def test_what_is_under_way_is_bounded_by_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes more than all may is alone; the results come in order."""
    monkeypatch.setattr(work, "BYTES_MAX", 10)
    lock = threading.Lock()
    begun: list[int] = []
    handed_out: list[int] = []
    most = 0

    def begin(size: int) -> int:
        nonlocal most
        with lock:
            begun.append(size)
            most = max(most, sum(begun) - sum(handed_out))
        return size

    sizes = [4, 4, 4, 1, 1, 12, 3, 3, 3, 3, 25, 1]

    def taken() -> Iterator[int]:
        for _, size in bounded_map(begin, sizes, 4, lambda size: size):
            with lock:
                handed_out.append(size)
            yield size

    assert list(taken()) == sizes
    assert most <= 25


# -- tables that nobody could read to their end ------------------------------------------------


@pytest.mark.parametrize("what", ["device", "sparse"])
def test_a_table_without_an_end_is_not_read_to_it(tmp_path: Path, what: str) -> None:
    table = tmp_path / "00000001.table"
    if what == "device":
        table.symlink_to("/dev/zero")
    else:
        with table.open("wb") as file:
            file.truncate(1 << 40)
    assert not is_empty(table)
