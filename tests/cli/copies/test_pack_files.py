"""`kvtier export` and `import`: blocks in one file, which may be anything when it is read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cli_world import command, every_kind, run, served

pytestmark = pytest.mark.slow

BLOCKS = 8


@every_kind
def test_out_and_in(filled: Path, fresh: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kvpack"
    (report,) = run("export", file, "-c", filled)["namespaces"]
    assert report["copied"] == BLOCKS
    assert file.stat().st_mode & 0o777 == 0o600
    (report,) = run("import", file, "-c", fresh)["namespaces"]
    assert report["copied"] == BLOCKS
    assert served(fresh) == BLOCKS
    (report,) = run("import", file, "-c", fresh)["namespaces"]
    assert (report["copied"], report["already_there"]) == (0, BLOCKS)


def test_a_file_that_is_there_stays(filled: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kvpack"
    file.write_text("mine")
    assert "--force" in command("export", file, "-c", filled).err
    assert file.read_text() == "mine"
    assert command("export", file, "-c", filled, "--force").code == 0


def test_what_a_link_of_that_name_names_stays(filled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "blocks.kvpack.making").symlink_to(other)
    assert command("export", tmp_path / "blocks.kvpack", "-c", filled).code == 1
    assert other.read_text() == "mine"


@pytest.mark.parametrize("cut", [0, 5, 100, 6000, -1, -9000])
def test_a_file_cut_short(filled: Path, fresh: Path, tmp_path: Path, cut: int) -> None:
    file = tmp_path / "blocks.kvpack"
    run("export", file, "-c", filled)
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    done = command("import", file, "-c", fresh)
    assert done.code == (0 if cut == -1 else 1)
    assert served(fresh) == (BLOCKS if cut == -1 else BLOCKS - 1 if cut == -9000 else 0)


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_are_never_taken_in(
    filled: Path, fresh: Path, tmp_path: Path, seed: int
) -> None:
    file = tmp_path / "blocks.kvpack"
    run("export", file, "-c", filled)
    body = bytearray(file.read_bytes())
    body[random.Random(seed).randrange(len(body))] ^= 1 << seed % 8
    file.write_bytes(body)
    command("import", file, "-c", fresh)
    assert served(fresh) <= BLOCKS


def test_a_newer_version(filled: Path, fresh: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kvpack"
    run("export", file, "-c", filled)
    with file.open("r+b") as data:
        data.seek(8)
        data.write(b"\2")
    assert "update kvtier" in command("import", file, "-c", fresh).err


def test_another_kind_of_file(fresh: Path) -> None:
    done = command("import", fresh, "-c", fresh)
    assert done.code == 1
    assert "not a file of kvtier export" in done.err


def test_a_pipe_is_not_waited_for(fresh: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = command("import", tmp_path / "pipe", "-c", fresh)
    assert done.code == 1
    assert "no ordinary file" in done.err


def test_a_missing_file(fresh: Path, tmp_path: Path) -> None:
    assert "name one that exists" in command("import", tmp_path / "x", "-c", fresh).err
