"""What a drive says of itself, by nvme-cli, where it can be asked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.nvme.drives import drives_of, parse, read_drives
from kvtier.inspect.contents import DriveWear

ANSWER = {"critical_warning": 0, "percent_used": 3, "data_units_written": 2_000_000}


def machine(root: Path, folder: Path, below: dict[str, list[str]], name: str) -> None:
    """A file system on a block device of this name, which has others below it."""
    devices = root / "devices"
    for device, slaves in below.items():
        (devices / device / "slaves").mkdir(parents=True)
        for slave in slaves:
            (devices / device / "slaves" / slave).symlink_to(devices / slave)
    if name.startswith("nvme0n1p"):
        (devices / "nvme0n1" / name).mkdir()
        (devices / "nvme0n1" / name / "partition").write_text("1")
        name = f"nvme0n1/{name}"
    number = folder.stat().st_dev
    numbers = root / "sys/dev/block"
    numbers.mkdir(parents=True)
    (numbers / f"{os.major(number)}:{os.minor(number)}").symlink_to(devices / name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "proc/self").mkdir(parents=True)
    (tmp_path / "root" / "proc/self/mountinfo").write_text("")
    return tmp_path / "root"


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called as nvme."""
    folder.mkdir()
    (folder / "nvme").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvme").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("below", "name", "drives"),
    [
        ({"nvme0n1": []}, "nvme0n1", ["nvme0n1"]),
        ({"nvme0n1": []}, "nvme0n1p1", ["nvme0n1"]),
        (
            {"md0": ["nvme0n1", "nvme1n1"], "nvme0n1": [], "nvme1n1": []},
            "md0",
            ["nvme0n1", "nvme1n1"],
        ),
        ({"dm-1": ["dm-0"], "dm-0": ["nvme0n1"], "nvme0n1": []}, "dm-1", ["nvme0n1"]),
        ({"sda": []}, "sda", []),
    ],
)
def test_the_drives_below_a_folder(
    root: Path, tmp_path: Path, below: dict[str, list[str]], name: str, drives: list[str]
) -> None:
    machine(root, tmp_path, below, name)
    assert drives_of(tmp_path, root) == drives


def test_what_it_says(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(root, tmp_path, {"nvme0n1": []}, "nvme0n1")
    script = (
        f"[ \"$*\" = 'smart-log --output-format=json /dev/nvme0n1' ] && echo '{json.dumps(ANSWER)}'"
    )
    program(tmp_path / "bin", script, monkeypatch)
    assert read_drives(tmp_path, root) == [
        DriveWear(device="/dev/nvme0n1", written=1_024_000_000_000, percent_used=3)
    ]


def test_without_the_right_to_ask_one_line_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(root, tmp_path, {"nvme0n1": []}, "nvme0n1")
    program(tmp_path / "bin", "echo 'Permission denied\nusage' >&2; exit 1", monkeypatch)
    (drive,) = read_drives(tmp_path, root)
    assert drive.problem == "nvme smart-log: Permission denied"


def test_without_the_program_one_line_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(root, tmp_path, {"nvme0n1": []}, "nvme0n1")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert read_drives(tmp_path, root) == [
        DriveWear(device="/dev/nvme0n1", problem="nvme-cli is not installed")
    ]


def test_of_another_disk_one_line_says_so(root: Path, tmp_path: Path) -> None:
    (drive,) = read_drives(tmp_path, root)
    assert drive.written is None
    assert "no NVMe drive" in drive.problem


def test_numbers_as_texts_are_numbers() -> None:
    text = json.dumps({"percent_used": "101", "data_units_written": "18446744073709551615"})
    assert parse("x", text.encode()).percent_used == 101


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data_units_written": -1}',
        b'{"data_units_written": "many"}',
        b'{"data_units_written": 1e400}',
        b'{"data_units_written": 1, "percent_used": 256}',
        b'{"data_units_written": "' + b"9" * 5000 + b'"}',
        b" " * 100_000 + b'{"data_units_written": 1}',
        b"[" * 60_000,
    ],
)
def test_nonsense_is_not_believed(text: bytes) -> None:
    assert parse("x", text).written is None


@given(st.binary(max_size=300))
def test_no_answer_is_an_error(text: bytes) -> None:
    parse("x", text)
