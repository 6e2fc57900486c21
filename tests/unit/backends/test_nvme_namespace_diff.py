"""Which of the models in a folder is named where one is not found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.slab.folder import differs_in
from kvtier.testing.subject import NAMESPACE
from kvtier.types import NAMESPACE_BYTES_MAX, Namespace


def alike(**facts: str) -> Namespace:
    return Namespace(
        facts=NAMESPACE.facts | facts,
        group_bytes=NAMESPACE.group_bytes,
        parts=NAMESPACE.parts,
    )


def leave(root: Path, name: str, described: bytes, at: float) -> None:
    home = root / name
    home.mkdir()
    (home / "namespace.json").write_bytes(described)
    os.utime(home, (at, at))


@pytest.mark.parametrize("latest", ["one", "other"])
def test_the_one_that_changed_last_is_named(tmp_path: Path, latest: str) -> None:
    for said in ("one", "other"):
        other = alike(dialect=said)
        leave(tmp_path, other.id, other.to_json(), 2e9 if said == latest else 1e9)
    assert latest in differs_in(tmp_path, alike(dialect="mine"))


@pytest.mark.parametrize(
    "described",
    [b"", b"{}", b"\xff\xfe", b"[" * 5000, b'{"facts": 7}'],
)
def test_what_describes_nothing_hides_nothing(tmp_path: Path, described: bytes) -> None:
    for digit in "0f":
        leave(tmp_path, digit * 32, described, 2e9)
    (tmp_path / ("e" * 32)).mkdir()
    other = alike(dialect="theirs")
    leave(tmp_path, other.id, other.to_json(), 1e9)
    assert "theirs" in differs_in(tmp_path, alike(dialect="mine"))


def test_a_description_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    other = alike(dialect="theirs")
    leave(tmp_path, other.id, other.to_json() + b" " * NAMESPACE_BYTES_MAX, 1e9)
    assert differs_in(tmp_path, alike(dialect="mine")) == ""


def test_a_folder_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert differs_in(tmp_path / "gone", NAMESPACE) == ""
