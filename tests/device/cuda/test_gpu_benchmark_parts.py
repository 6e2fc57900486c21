"""The parts of the GPU benchmark have processes of their own: what they said is kept, however they
end, and the next one begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import beside
from benchmarks.gpu.arena import LOAD, STORE
from benchmarks.gpu.beside import Duplex
from benchmarks.gpu.timeline import Span, tell
from benchmarks.report import Report
from kvtier.device.layout import DeviceBlocks
from kvtier.interfaces.mover import TransferKind

ROOT = Path(__file__).parents[3]

_PARTS = """
import os
import time
from benchmarks.gpu.parts import answer_of, run_part
from benchmarks.report import Report

def ends(part):
    part.add("one", 1, "GB/s")
    part.at_least("two", 2, "", 1)

def fails(part):
    part.add("three", 3, "")
    raise ValueError("a part that fails")

def hangs(part):
    part.add("four", 4, "")
    time.sleep(1000)

def dies(part):
    part.add("five", 5, "")
    os.kill(os.getpid(), 9)

report = Report("parts")
limits = {ends: 600, fails: 600, hangs: 1, dies: 600}
print([run_part(part, report, seconds) for part, seconds in limits.items()])
print(answer_of(lambda: "an answer"), answer_of(lambda: 1 / 0))
"""


def test_what_a_part_said_is_kept_however_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", _PARTS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JSON": str(file)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "[True, False, False, False]\nan answer None\n" in done.stdout
    assert "a part that fails" in done.stderr
    assert "in hangs" in done.stderr
    names = [figure["name"] for figure in json.loads(file.read_text())]
    assert names == ["one", "two", "three", "four", "five"]


class Arena:
    """Whose jobs of some kinds have ended when somebody asks."""

    def __init__(self, ended: set[TransferKind]) -> None:
        self._ended = ended
        self._kinds: list[TransferKind] = []

    def submit(self, kind: TransferKind, slots: range, blocks: DeviceBlocks) -> int:
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def finished(self, names: set[int]) -> bool:
        return all(self._kinds[name] in self._ended for name in names)

    def finish(self, names: Iterable[int]) -> None:
        pass


@pytest.mark.parametrize(
    ("ended", "outlasted"),
    [(set(), True), ({LOAD}, False), ({STORE}, False), ({LOAD, STORE}, False)],
)
def test_what_is_measured_beside_both_directions_is_doubted_once_one_has_ended(
    ended: set[TransferKind], outlasted: bool
) -> None:
    duplex = Duplex.__new__(Duplex)  # otherwise it makes tensors on a device
    arena: Any = Arena(ended)
    duplex.arena, duplex.half, duplex.outlasted = arena, 1, True
    duplex._loads = DeviceBlocks(np.arange(1), [1], [0])
    duplex._stores = [(range(1, 2), duplex._loads)]
    assert duplex.beside(lambda: (1.0,)) == (1.0,)
    assert duplex.outlasted == outlasted


@pytest.mark.parametrize(("seconds", "turns"), [(1.0, 5), (25.0, 2), (100.0, 1)])
def test_slow_turns_are_fewer(monkeypatch: pytest.MonkeyPatch, seconds: float, turns: int) -> None:
    """A part that is over its limit keeps nothing."""
    now = 0.0

    def turn() -> tuple[float, ...]:
        nonlocal now
        now += seconds
        return (now,)

    monkeypatch.setattr(beside.time, "perf_counter", lambda: now)
    assert beside._repeated(turn) == [(seconds * (at + 2),) for at in range(turns)]


def test_a_timeline_says_how_long_the_link_is_idle_and_what_is_there_at_once() -> None:
    spans = [
        Span("Memcpy HtoD (Pinned -> Device)", 10.0, 20.0),
        Span("move_pages", 15.0, 18.0),
        Span("Memcpy HtoD (Pinned -> Device)", 12.0, 16.0),
        Span("Memcpy HtoD (Pinned -> Device)", 25.0, 30.0),
        Span("move_pages", 25.0, 30.0),
    ]
    report = Report("a timeline")
    tell(report, "loads", spans)
    assert [(figure.name, figure.value) for figure in report.figures] == [
        ("loads: copies to the device are on the link", 75.0),
        ("loads: copies to the device at once", 19 / 15),
        ("loads: move_pages takes", 4.0),
    ]
