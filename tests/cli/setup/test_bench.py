"""`kvtier bench`: measures beside a stack, and leaves no trace."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from msgspec import structs
from support.processes.cli_world import KVTIER, command, every_kind, put, run, with_store

from kvtier.cli import app
from kvtier.cli import bench as measure
from kvtier.config import load
from kvtier.inspect import inspector
from kvtier.inspect.inspector import BENCH_MARK
from kvtier.stack import Stack
from kvtier.system import memory as memory_limits
from kvtier.testing.subject import make_keys

SMALL = ["--chunk", "8KiB", "--blocks", "4", "--rounds", "2"]


def everything(folder: Path) -> dict[str, int]:
    """All files below a folder with their sizes, but for what the stack's own file is."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


@every_kind
def test_every_tier_is_measured(
    stack_file: Path, second_tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["bench", "--config", str(stack_file), *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [(tier["tier"], tier["hits"], tier["blocks"]) for tier in report["tiers"]] == [
        ("cpu", 12, 12),
        (second_tier, 8, 8),
    ]
    for tier in report["tiers"]:
        assert tier["store_bytes_per_s"] > 0
        assert tier["load_bytes_per_s"] > 0
        assert tier["block_worst_s"] >= tier["block_s"] > 0


def test_a_table(stack_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "8/8" in out
    assert "nvme" in out


@every_kind
def test_nothing_is_left_behind(stack_file: Path, tmp_path: Path) -> None:
    before = everything(tmp_path)
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 0
    assert everything(tmp_path) == before
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_leaves_nothing(number: int, stack_file: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [KVTIER, "bench", "-c", stack_file, "--rounds=100", "--blocks=4000", "--chunk=4KiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # it may be ignored here
    )
    host = tmp_path / "host"
    while not list(host.rglob("*.slab")):
        assert process.poll() is None
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (128 + number, "", "")
    assert list(host.iterdir()) == []
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_is_being_measured_is_no_garbage(
    stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes, and in whatever kind of place."""
    with_store(stack_file, tmp_path / "disk" / "store")
    measured, seen = measure._measure_lower, []

    def look_meanwhile(*args: object) -> object:
        found = measured(*args)  # type: ignore[arg-type]
        for path in (tmp_path / "disk").glob(f"{BENCH_MARK}*"):
            os.utime(path, (0, 0))
            seen.append(inspector._lives(path))
        return found

    monkeypatch.setattr(measure, "_measure_lower", look_meanwhile)
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 0
    assert seen == [True, True]


def test_wrong_bytes_are_told(
    stack_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of the bytes is a real one: with another expectation, all of them are wrong."""
    count = measure._count

    def expect_others(result: object, stack: object, ticket: object, blocks: object) -> None:
        for key in blocks.payloads:  # type: ignore[attr-defined]
            blocks.payloads[key] = memoryview(bytes(8192))  # type: ignore[attr-defined]
        count(result, stack, ticket, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "_count", expect_others)
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 1
    assert "cpu: 12 blocks came back WRONG" in capsys.readouterr().out


def test_a_tier_that_is_only_read_is_not_written(
    stack_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack_file.write_text(stack_file.read_text().replace("free_floor: 0", "write: never"))
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 0
    assert "only read" in capsys.readouterr().out


def test_too_little_room_is_said_before(
    stack_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack_file.write_text(stack_file.read_text().replace("free_floor: 0", "free_floor: 8000TiB"))
    assert load(stack_file)
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 1
    assert "fewer blocks" in capsys.readouterr().err


def test_too_little_memory_is_said_of_what_is_measured(
    stack_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not of the stack's own capacity, which is in order."""
    text = stack_file.read_text()
    stack_file.write_text(text.replace("16MiB", "600MiB").replace("4MiB", "600MiB"))
    asked = ["--chunk", "512MiB", "--blocks", "65536"]  # 32 TiB, and as much again
    assert app.run(["bench", "-c", str(stack_file), *asked]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'host'} has too little free room to measure with 64" in said
    assert "fewer blocks" in said
    assert list((tmp_path / "host").iterdir()) == []


def test_where_no_memory_is_left_nothing_is_measured(
    stack_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_limits, "in_memory", lambda folder: True)
    monkeypatch.setattr(memory_limits, "memory_left", lambda: 0)
    assert app.run(["bench", "-c", str(stack_file), *SMALL]) == 1
    assert "too little free room" in capsys.readouterr().err


class TestAStoreInUse:
    """What lies in a tier's own store is never what measuring removes."""

    @pytest.fixture
    def kept(self, stack_file: Path, tmp_path: Path) -> dict[str, int]:
        with_store(stack_file, tmp_path / "store")
        put(stack_file, make_keys(8))
        found = everything(tmp_path / "store")
        assert len(found) > 8
        return found

    @pytest.mark.parametrize("ended_by", [OSError, KeyboardInterrupt])
    def test_ended_before_it_has_a_place_of_its_own(
        self,
        stack_file: Path,
        tmp_path: Path,
        kept: dict[str, int],
        monkeypatch: pytest.MonkeyPatch,
        ended_by: type[BaseException],
    ) -> None:
        """For want of room, or by Ctrl-C as of a bucket, beside which no folder is made."""

        def begin(*_: object) -> AbstractContextManager[Path]:
            if ended_by is not KeyboardInterrupt:
                raise OSError(errno.ENOSPC, "No space left on device")
            signal.raise_signal(signal.SIGINT)
            return nullcontext(tmp_path / "own")

        monkeypatch.setattr("kvtier.inspect.inspector.folder_beside", begin)
        config = load(stack_file)
        with (
            pytest.raises(ended_by),
            measure._bench_stack(config, measure.Size(8192, 4, 1), 2),
        ):
            pass
        assert everything(tmp_path / "store") == kept


@pytest.fixture
def store_down(stack_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack whose third tier is a store that is down."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    down = 'url: "s3://bucket/kv", region: none, endpoint: "http://127.0.0.1:9"'
    stack_file.write_text(f"{stack_file.read_text()}  - {{kind: object, capacity: 1GiB, {down}}}\n")
    return stack_file


def test_why_a_tier_has_no_figures_leaves_the_table_one(store_down: Path) -> None:
    done = command("bench", "-c", store_down, *SMALL, columns=80)
    assert done.code == 1
    header, _, *rows = done.out.splitlines()[1:6]
    assert header.split() == ["tier", "store", "load", "one", "block", "worst", "hits"]
    assert [row.split()[0] for row in rows] == ["cpu", "nvme", "object"]
    assert "object: nothing listens at http://127.0.0.1:9" in done.out


def test_interrupted_while_a_store_is_down_it_does_not_go_on(
    store_down: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing can be removed there at the moment."""
    begun: list[str] = []

    def interrupt(stack: Stack, *_: object) -> None:
        begun.append(stack.chain.tiers[1].medium)
        raise KeyboardInterrupt

    config = load(store_down)
    monkeypatch.setattr(measure, "_measure_lower", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(
            structs.replace(config, tiers=(config.tiers[0], config.tiers[2])),
            measure.Size(8192, 4, 1),
            lambda text: None,
        )
    assert begun == ["object"]


# What other packages bring: blocks behind a url that is no store of ours, and in a folder.
PACKAGE = """
from pathlib import Path
from kvtier.testing.memory import MemoryBackend, MemorySettings
from kvtier.inspect import Inspector
class Cave(MemorySettings, frozen=True, kw_only=True, tag="cave"):
    url: str
class Chest(MemorySettings, frozen=True, kw_only=True, tag="chest"):
    path: Path
class CaveBackend(MemoryBackend):
    kind, settings, host = "cave", Cave, False
    def open_inspector(self, settings, context):
        return Inspector(self, settings, context)
    def open_tier(self, settings, context):
        raise AssertionError("what is there is left alone")
class ChestBackend(MemoryBackend):
    kind, settings, host = "chest", Chest, False
    def open_inspector(self, settings, context):
        return Inspector(self, settings, context)
    def open_tier(self, settings, context):
        assert list(settings.path.iterdir()) == []
        return super().open_tier(settings, context)
CAVE, CHEST = CaveBackend(), ChestBackend()
"""
ENTRY_POINTS = "[kvtier.backends]\ncave = caves_and_chests:CAVE\nchest = caves_and_chests:CHEST\n"


@pytest.mark.slow
class TestTiersOfAnotherPackage:
    @pytest.fixture
    def stack(self, stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        package, info = tmp_path / "package", tmp_path / "package" / "caves-1.0.dist-info"
        info.mkdir(parents=True)
        (package / "caves_and_chests.py").write_text(PACKAGE)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: caves\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        (tmp_path / "chest").mkdir()
        (tmp_path / "chest" / "kept").touch()
        tiers = '  - {kind: cave, url: "cave://here", name: a, capacity: 64MiB}\n'
        tiers += f'  - {{kind: chest, path: "{tmp_path}/chest", name: b, capacity: 64MiB}}\n'
        stack_file.write_text(stack_file.read_text() + tiers)
        return stack_file

    def test_only_a_place_of_our_own_is_measured(self, stack: Path, tmp_path: Path) -> None:
        tiers = run("bench", "-c", stack, *SMALL)["tiers"]
        assert [(tier["tier"], tier["hits"]) for tier in tiers[2:]] == [("cave", 0), ("chest", 8)]
        assert "beside" in tiers[2]["note"]
        assert [path.name for path in (tmp_path / "chest").iterdir()] == ["kept"]

    def test_a_doctor_looks_at_the_others(self, stack: Path) -> None:
        findings = run("doctor", "-c", stack)["findings"]
        said = {each["area"]: each["what"] for each in findings}
        assert said["2 cave"].startswith("not measured: ")
        assert said["3 chest"].startswith("stores ")
