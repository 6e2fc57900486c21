"""Every scenario plays, and finds what is wrong when something is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from campaign.growth import slope
from campaign.power.recording import Kind, Loss, Op, Recording
from campaign.round import Round
from campaign.scenarios import SCENARIOS, damage
from kvtier.record import record

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
needs_a_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if "serving" not in name])
def test_a_round_finds_nothing(tmp_path: Path, name: str) -> None:
    if name == "power" and not shutil.which("cc"):
        pytest.skip("no C compiler here")
    command = ["--only", name, "--round", "0", "--seed", "5", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "campaign", *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("number", range(4))
def test_a_proof_that_looks_at_no_payload_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(damage, "_PASSES", 8)
    monkeypatch.setattr(damage, "_OPENINGS", 0)
    round = Round("damage", 1, number, tmp_path)
    monkeypatch.setattr(record, "check_part", lambda *_: True)
    with pytest.raises(AssertionError, match="wrong bytes were served"):
        damage.Damage().play(round)


def test_a_line_and_its_error() -> None:
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == (2.0, 0.0)
    found, error = slope([(0.0, 0.0), (1.0, 3.0), (2.0, 0.0), (3.0, 3.0)])
    assert found == pytest.approx(0.6)
    assert error > 0.6, "which says nothing, then"


class TestWhatACrashLeaves:
    """Of a file that was written, synced, and written again, and of its name."""

    @pytest.fixture
    def recording(self) -> Recording:
        made = Recording.__new__(Recording)
        made.root = "/r"
        made._notes, made._files = 1, {1, 2}
        made.ops = [
            Op(Kind.CREATE, 1, 0, "/r/notes", b""),
            Op(Kind.MKDIR, 9, 0, "/r/folder", b""),
            Op(Kind.CREATE, 2, 0, "/r/folder/new", b""),
            Op(Kind.WRITE, 2, 0, "", b"first" * 1000),
            Op(Kind.SYNC, 2, 0, "", b""),
            Op(Kind.WRITE, 1, 0, "", b"C 00\n"),
            Op(Kind.RENAME, 2, 0, "/r/folder/new", b"/r/folder/file"),
            Op(Kind.WRITE, 2, 0, "", b"later" * 1000),
        ]
        return made

    def test_all_that_was_not_synced_is_lost_its_name_too(self, recording: Recording) -> None:
        left = recording.crash(8, Loss.ALL, Round("", 1, 0, Path()).dice)
        assert (left.files, left.folders) == ({}, [])
        assert recording.said(8) == ["C 00"]
        assert recording.said(5) == []

    def test_a_synced_folder_keeps_its_names_and_a_synced_file_its_bytes(
        self, recording: Recording
    ) -> None:
        recording.ops += [Op(Kind.SYNC, 9, 0, "", b""), Op(Kind.SYNC, 77, 0, "", b"")]
        left = recording.crash(10, Loss.ALL, Round("", 1, 0, Path()).dice)
        assert left.files == {"folder/file": b"first" * 1000}

    def test_nothing_is_lost(self, recording: Recording) -> None:
        left = recording.crash(8, Loss.NOTHING, Round("", 1, 0, Path()).dice)
        assert left.files == {"folder/file": b"later" * 1000}

    def test_some_pages_are_old_and_some_are_new(self, recording: Recording) -> None:
        recording.ops += [Op(Kind.SYNC, 9, 0, "", b""), Op(Kind.SYNC, 77, 0, "", b"")]
        dice = Round("", 1, 0, Path()).dice
        found = {recording.crash(10, Loss.PAGES, dice).files["folder/file"] for _ in range(40)}
        assert {(data[:5], data[-5:]) for data in found} == {
            (first, last) for first in (b"first", b"later") for last in (b"first", b"later")
        }


LIFE = """
import os, sys
folder = sys.argv[1]
notes = os.open(f"{folder}/notes", os.O_WRONLY | os.O_CREAT)
os.mkdir(f"{folder}/below")
with open(f"{folder}/below/new", "wb") as file:
    file.write(b"abc" * 9999)
os.rename(f"{folder}/below/new", f"{folder}/below/file")
fd = os.open(f"{folder}/below/file", os.O_RDWR)
os.pwritev(fd, [b"12", b"345"], 4000)
os.posix_fallocate(fd, 0, 40000)
os.ftruncate(fd, 39000)
os.fsync(fd)
os.link(f"{folder}/below/file", f"{folder}/other")
os.open(f"{folder}/gone", os.O_WRONLY | os.O_CREAT)
os.unlink(f"{folder}/gone")
"""


@needs_a_compiler
def test_the_recorder_records_all_that_a_process_does_to_files(tmp_path: Path) -> None:
    import campaign.power

    source = Path(campaign.power.__file__).with_name("recorder.c")
    root, log, shim = tmp_path / "root", tmp_path / "log", tmp_path / "recorder.so"
    root.mkdir()
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(shim), str(source)]
    subprocess.run(build, check=True)
    recorded = {"LD_PRELOAD": str(shim), "POWER_ROOT": str(root), "POWER_LOG": str(log)}
    subprocess.run([sys.executable, "-c", LIFE, root], env=ENVIRONMENT | recorded, check=True)
    recording = Recording(log, root, "notes")
    left = recording.crash(len(recording.ops), Loss.NOTHING, Round("", 1, 0, Path()).dice)
    assert left.folders == ["below"]
    assert left.files == {name: (root / name).read_bytes() for name in ("below/file", "other")}
    assert recording.syncs == 1
