"""The format of a manifest, and merging: what is read back, what is refused, which entry counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.object import manifests as manifest
from kvtier.backends.object.manifests import ADDED, REMOVED, Entries, merge
from kvtier.errors import FormatError, NewerFormat
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, block_key

DIGEST = NAMESPACE.digest

keys = st.binary(min_size=1, max_size=36).map(block_key)
rows = st.tuples(
    st.sampled_from([ADDED, REMOVED]),
    keys,
    st.integers(0, 0xFFFF),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 1 << 53),
)


def entries_of(some: list[tuple[int, BlockKey, int, int, int]]) -> Entries:
    pieces = [manifest.pack_entries(kind, [k], [g], [s], [t]) for kind, k, g, s, t in some]
    return np.concatenate([np.zeros(0, manifest.ENTRY), *pieces])


def rows_of(entries: Entries) -> list[tuple[int, BlockKey, int, int, int]]:
    return list(
        zip(
            entries["kind"].tolist(),
            keys_of(entries),
            entries["generation"].tolist(),
            entries["size"].tolist(),
            entries["time_us"].tolist(),
            strict=True,
        )
    )


def packed(entries: Entries, covers: list[str] | None = None) -> bytes:
    return b"".join(bytes(piece) for piece in manifest.pack(DIGEST, entries, covers or []))


@given(some=st.lists(rows, max_size=9), covers=st.lists(st.text("0123456789abcdef-", min_size=1)))
def test_what_is_written_is_read(
    some: list[tuple[int, BlockKey, int, int, int]], covers: list[str]
) -> None:
    entries, covered = manifest.unpack(memoryview(packed(entries_of(some), covers)), DIGEST)
    assert rows_of(entries) == some
    assert covered == covers


@given(some=st.lists(rows, max_size=12))
def test_of_each_object_the_latest_entry_counts(
    some: list[tuple[int, BlockKey, int, int, int]],
) -> None:
    latest: dict[tuple[BlockKey, int], tuple[int, int]] = {}
    for kind, key, generation, _, at in some:
        latest[key, generation] = max(latest.get((key, generation), (0, 0)), (at, kind))
    merged = rows_of(merge([entries_of([one]) for one in some]))
    assert {(key, gen): (at, kind) for kind, key, gen, _, at in merged} == latest
    assert [row[4] for row in merged] == sorted(row[4] for row in merged)
    assert len(merged) == len(latest)


@pytest.mark.parametrize("order", [(ADDED, REMOVED), (REMOVED, ADDED)])
def test_of_equal_times_a_removal_counts(order: tuple[int, int]) -> None:
    pieces = [manifest.pack_entries(kind, make_keys(2), [0, 1], [0] * 2, [7] * 2) for kind in order]
    assert merge(pieces)["kind"].tolist() == [REMOVED] * 2


def test_no_flipped_byte_and_no_cut_is_overlooked() -> None:
    good = packed(entries_of([(ADDED, key, 0, 5, 9) for key in make_keys(2)]), ["a-1", "b-2"])
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises((FormatError, NewerFormat)):
            manifest.unpack(memoryview(bad), DIGEST)
        with pytest.raises(FormatError):
            manifest.unpack(memoryview(good[:at]), DIGEST)
    with pytest.raises(FormatError, match="another namespace"):
        manifest.unpack(memoryview(good), bytes(16))


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    for some in (data, manifest.MAGIC + data, manifest.MAGIC + b"\1\0\0\0" + data):
        with pytest.raises((FormatError, NewerFormat)):
            manifest.unpack(memoryview(some), DIGEST)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", 3),
        ("key_bytes", 0),
        ("key_bytes", 41),
        ("size", 1 << 63),
        ("time_us", (1 << 53) + 1),
        ("time_us", (1 << 64) - 1),
    ],
)
def test_sums_that_are_right_do_not_make_figures_right(field: str, value: int) -> None:
    entries = entries_of([(ADDED, key, 0, 5, 9) for key in make_keys(2)])
    entries[field][1] = value
    with pytest.raises(FormatError, match="inconsistent"):
        manifest.unpack(memoryview(packed(entries)), DIGEST)


def test_what_stands_behind_a_key_makes_no_other_object_of_it() -> None:
    [key] = make_keys(1)
    entries = np.repeat(entries_of([(ADDED, key, 0, 5, 9)]), 2)
    entries["key"][1] = np.frombuffer(key.ljust(40, b"\1"), "V40")[0]
    assert keys_of(entries) == [key, key]
    with pytest.raises(FormatError, match="inconsistent"):
        manifest.unpack(memoryview(packed(entries)), DIGEST)
