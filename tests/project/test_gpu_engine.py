"""`make gpu-engine`: pieces that are carried one by one, and a run of which nothing that fails is
the end. (tests/vllm/device/test_gpu_engine.py runs it on the CPU platform.)"""

from __future__ import annotations

import importlib.metadata
import random
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.processes.clocks import Clock

from benchmarks.gpu_engine.results import Deadline, Results, Row, Stage, run_stages, table

TOOLS = Path(__file__).parents[2] / "tools"
PIECE = 100_000


@pytest.fixture(scope="module")
def tools() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The tool for pieces, and the one that makes them."""
    sys.path.insert(0, str(TOOLS))
    import gpu_engine_pieces
    import gpu_engine_wheels

    yield gpu_engine_pieces, gpu_engine_wheels
    sys.path.remove(str(TOOLS))


def a_wheel(folder: Path, name: str, **files: bytes) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            wheel.writestr(f"{name}/{file}", data)
        wheel.writestr(f"{name}-1.0.data/purelib/{name}_beside.py", b"x = 1\n")
        wheel.writestr(f"{name}/kernel.cuh", b"header")
    return path


@pytest.fixture
def pieces(tools: tuple[ModuleType, ModuleType], tmp_path: Path) -> tuple[Path, bytes]:
    """A folder with the pieces of a made-up wheel, and its large file."""
    pieces, wheels = tools
    large, folder = random.Random(1).randbytes(5 * PIECE), tmp_path / "pieces"
    folder.mkdir()
    wheel = a_wheel(tmp_path, "vllm", large=large)
    archive = tmp_path / "engine.tar.xz"
    wheels.pack([wheel], archive, lambda name: not wheels.NOT_NEEDED.fullmatch(name), preset=0)
    cut = pieces.split(archive, folder, PIECE)
    assert len(cut) >= 6
    pieces.write_manifest(
        folder,
        {
            "engine": {"of": [], "installed": {}, "pieces": cut},
            "usual": {
                "of": [],
                "installed": {"pytest": "1.0"},
                "pieces": [{"name": "x", "sha256": "y", "bytes": 1}],
            },
        },
    )
    return folder, large


def test_what_was_cut_is_joined_elsewhere(
    tools: tuple[ModuleType, ModuleType], pieces: tuple[Path, bytes], tmp_path: Path
) -> None:
    tool, (folder, large), site = tools[0], pieces, tmp_path / "site"
    assert max(path.stat().st_size for path in folder.glob("*.piece")) == PIECE
    assert tool.missing(folder) == [], "and what this Python has anyway is not asked for"
    assert tool.unpack(folder, site)
    assert (site / "vllm" / "large").read_bytes() == large
    assert (site / "vllm_beside.py").exists()
    assert not (site / "vllm" / "kernel.cuh").exists(), "no engine needs it"
    (site / "vllm" / "large").unlink()
    assert not tool.unpack(folder, site), "once"


def test_a_piece_that_is_there_is_not_carried_again(
    tools: tuple[ModuleType, ModuleType], pieces: tuple[Path, bytes], tmp_path: Path
) -> None:
    tool, there = tools[0], tmp_path / "there"
    there.mkdir()
    with pytest.raises(tool.PiecesError, match="carry it here"):
        tool.missing(there)
    (there / tool.MANIFEST).write_bytes((pieces[0] / tool.MANIFEST).read_bytes())
    lacking = tool.missing(there)
    for at, name in enumerate(lacking):
        with pytest.raises(tool.PiecesError, match=f"{len(lacking) - at} of {len(lacking)} pieces"):
            tool.unpack(there, tmp_path / "site")
        (there / name).write_bytes((pieces[0] / name).read_bytes())
    with (there / lacking[1]).open("r+b") as file:  # as a carrier may
        file.write(b"damaged")
    assert tool.missing(there) == [lacking[1]]
    assert not (there / lacking[1]).exists()


def test_the_same_wheels_make_the_same_pieces(
    tools: tuple[ModuleType, ModuleType], pieces: tuple[Path, bytes], tmp_path: Path
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in pieces[0].glob("*.piece")}
    archive = tmp_path / "again.tar.xz"
    wheel = a_wheel(tmp_path, "vllm", large=pieces[1])
    tools[1].pack([wheel], archive, lambda name: not name.endswith(".cuh"), preset=0)
    cut = tools[0].split(archive, pieces[0], PIECE)
    assert [each["name"] for each in cut] == list(
        dict.fromkeys(each["name"] for each in cut if each["name"] in before)
    )
    assert before == {path.name: path.stat().st_mtime_ns for path in pieces[0].glob("*.piece")}


def test_an_archive_cannot_write_elsewhere(
    tools: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    tool, archive, folder = tools[0], tmp_path / "a.tar.xz", tmp_path / "pieces"
    folder.mkdir()
    with tarfile.open(archive, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    cut = tool.split(archive, folder)
    tool.write_manifest(folder, {"a": {"of": [], "installed": {}, "pieces": cut}})
    with pytest.raises(tarfile.FilterError):
        tool.unpack(folder, tmp_path / "site")
    assert not (tmp_path / "outside").exists()


def test_all_that_the_engine_needs_is_named_but_what_comes_with_torch(
    tools: tuple[ModuleType, ModuleType],
) -> None:
    requires = {
        "engine": ["torch==2", "Needs_Much[more]>1", 'old; python_version < "3.12"'],
        "needs-much": ["deep", 'extra-part; extra == "more"', 'never; extra == "other"'],
        "deep": ["engine", "nvidia-cudnn", "triton"],
        "extra-part": [],
        "old": [],
        "never": [],
    }

    class Installed:
        version = "1.5"

        def __init__(self, name: str) -> None:
            key = tools[1].canonical(name)
            if key not in requires:
                raise importlib.metadata.PackageNotFoundError(name)
            self.requires = requires[key]

    names = tools[1].closure("engine", Installed)
    assert names == ["deep==1.5", "extra-part==1.5", "needs-much==1.5"]


# -- the run -------------------------------------------------------------------------------


def a_stage(results: Results, name: str, error: Exception | None = None) -> Stage:
    def run(deadline: Deadline) -> None:
        results.add(Row(stage=name, engine="kvtier", what="first token", values=[1.0], unit="ms"))
        if error is not None:
            raise error

    return Stage(name, 1.0, 10.0, run)


def test_a_stage_that_fails_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    results = Results(tmp_path, {"device": "a card"})
    stages = [
        a_stage(results, "one"),
        a_stage(results, "two", RuntimeError("no such card")),
        a_stage(results, "three"),
    ]
    assert not run_stages(stages, results, Deadline(60.0))
    assert [(row.stage, row.failed) for row in results.rows] == [
        ("one", ""),
        ("two", ""),
        ("two", "no such card"),
        ("three", ""),
    ]
    again = Results(tmp_path, {"device": "a card"})
    assert run_stages(
        [a_stage(again, name) for name in ("one", "two", "three")], again, Deadline(9)
    )
    assert [row.stage for row in again.rows] == ["one", "three", "two"], "two alone was run again"
    assert not Results(tmp_path, {"device": "another"}).rows


def test_a_stage_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    assert not run_stages([a_stage(results, "one")], results, Deadline(0.5))
    (row,) = results.rows
    assert "it takes 1: run again" in row.failed


def test_deadlines_end_with_the_run() -> None:
    clock = Clock()
    whole = Deadline(100.0, clock)
    part = whole.within(30.0)
    assert (part.left(), part.left(5.0), whole.within(500.0).left()) == (30.0, 5.0, 100.0)
    clock.now += 30.0
    with pytest.raises(TimeoutError):
        part.left()
    assert whole.left() == 70.0


def test_the_table_has_contestants_side_by_side(tmp_path: Path) -> None:
    row = {"stage": "a", "what": "8k cold", "unit": "ms", "values": [3.0, 1.0, 2.0]}
    rows = [
        Row(**row, engine="without"),
        Row(**{**row, "values": [4.0]}, engine="kvtier", equal="3 of 3 equal"),
        Row(stage="matrix", engine="windows", what="cold", equal="6 of 6 equal", more={"cpu": 6}),
        Row(stage="matrix", engine="sleep", what="", failed="it | died"),
        Row(stage="tiering", what="the rest of it", failed="no | time"),
    ]
    made = table({"device": "a card"}, rows)
    for line in (
        "| | without | kvtier |",
        "| 8k cold, ms | 2 (1 to 3) | 4 3 of 3 equal |",
        "| windows | cold | 6 of 6 equal | cpu 6 |  |",
        "| sleep | - |  |  | it / died |",
        "- tiering:  the rest of it: no | time",
    ):
        assert line in made.splitlines()
