"""Rows of what was measured, written as they come, and the tables made of them; and stages that
give rows, in their order and each within its time. One that fails is a row with its reason."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measurement, or why there is none."""

    stage: str
    engine: str = ""
    what: str
    values: list[float] = []
    unit: str = ""
    cached: list[int] = []
    """Tokens that need not be computed, of each request."""
    equal: str = ""
    """How many answers had the tokens that they had before."""
    failed: str = ""
    more: dict[str, Any] = {}


class Kept(msgspec.Struct):
    """The file."""

    about: dict[str, Any]
    done: list[str]
    rows: list[Row]


class Results:
    """All rows of a run, and of earlier ones that it goes on with."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._table = folder / "engine.json", folder / "engine.md"
        self._kept = Kept(about, [], [])
        self._turns = threading.Lock()
        if self._path.exists():
            earlier = msgspec.json.decode(self._path.read_bytes(), type=Kept)
            if earlier.about == about:  # else of another machine, or of other sizes
                self._kept = earlier

    @property
    def rows(self) -> list[Row]:
        return self._kept.rows

    def done(self, stage: str) -> bool:
        """Whether a stage was whole, now or in an earlier run."""
        return stage in self._kept.done

    def begin(self, stage: str) -> None:
        """What an earlier attempt has left of it counts no more."""
        self._kept.rows = [row for row in self._kept.rows if row.stage != stage]

    def add(self, row: Row) -> None:
        """From any thread."""
        shown = row.failed or " ".join(f"{value:.4g}" for value in row.values[:8])
        with self._turns:
            self._kept.rows.append(row)
            told = f"  {row.stage}: {row.engine} {row.what}: {shown} {row.unit} {row.equal}"
            print(told, flush=True)
            self._write()

    def end(self, stage: str) -> None:
        self._kept.done.append(stage)
        self._write()

    def _write(self) -> None:
        making = self._path.with_suffix(".making")
        making.write_bytes(msgspec.json.format(msgspec.json.encode(self._kept), indent=1) + b"\n")
        making.replace(self._path)
        self._table.write_text(table(self._kept.about, self._kept.rows))


def table(about: dict[str, Any], rows: Iterable[Row]) -> str:
    """All of it in Markdown: contestants side by side, then the matrix, then what failed."""
    rows = list(rows)
    measured = [row for row in rows if row.values and row.stage != "matrix"]
    engines = list(dict.fromkeys(row.engine for row in measured))
    lines = [f"# vLLM on {about.get('device', 'a device')}", "", f"`{json.dumps(about)}`", ""]
    lines += [f"| | {' | '.join(engines)} |", f"|---|{'---|' * len(engines)}"]
    for what, unit in dict.fromkeys((row.what, row.unit) for row in measured):
        found = {row.engine: row for row in measured if (row.what, row.unit) == (what, unit)}
        cells = [_cell(found[name]) if name in found else "-" for name in engines]
        lines.append(f"| {what}, {unit} | {' | '.join(cells)} |")
    if matrix := [row for row in rows if row.stage == "matrix"]:
        lines += ["", "| matrix | state | equal | blocks found | |", "|---|---|---|---|---|"]
        for row in matrix:
            told = ", ".join(f"{name} {value:g}" for name, value in row.more.items())
            what, problem = row.what or "-", row.failed.replace("|", "/")
            lines.append(f"| {row.engine} | {what} | {row.equal} | {told} | {problem} |")
    if failed := [row for row in rows if row.failed and row.stage != "matrix"]:
        lines += ["", "Not measured:", ""]
        lines += [f"- {row.stage}: {row.engine} {row.what}: {row.failed}" for row in failed]
    return "\n".join([*lines, ""])


def _cell(row: Row) -> str:
    shown = f"{median(row.values):.4g}"
    if len(row.values) > 1:
        shown += f" ({min(row.values):.4g} to {max(row.values):.4g})"
    return shown + (f" {row.equal}" if row.equal and "of" in row.equal else "")


class Deadline:
    """When something has to be over."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds until then, or so many if that is less; raises TimeoutError if it is over."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimeoutError("no time left")
        return min(left, at_most)

    def within(self, seconds: float) -> Deadline:
        """One that is over then, or with this one."""
        return Deadline(max(0.0, min(seconds, self._end - self._clock())), self._clock)


class Stage(NamedTuple):
    """Something that gives rows."""

    name: str
    least: float
    """It is not begun with fewer seconds left."""
    most: float
    run: Callable[[Deadline], None]


def run_stages(stages: list[Stage], results: Results, deadline: Deadline) -> bool:
    """Run those that are not done yet; whether all are now."""
    for stage in stages:
        if results.done(stage.name):
            print(f"== {stage.name}: done before", flush=True)
            continue
        results.begin(stage.name)
        began = time.monotonic()
        try:
            left = deadline.left()
            if left < stage.least:
                raise TimeoutError(f"{left:.0f} s left, and it takes {stage.least:.0f}: run again")
            stage.run(deadline.within(stage.most))
        except Exception as error:  # noqa: BLE001 - the others are worth as much
            reason = str(error) or type(error).__name__
            results.add(Row(stage=stage.name, what="the rest of it", failed=reason[:500]))
            how = "FAILED"
        else:
            results.end(stage.name)
            how = "whole"
        print(f"== {stage.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
    return all(results.done(stage.name) for stage in stages)
