"""What every benchmark prints and writes: figures with targets, as a table and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table


class Figure(msgspec.Struct):
    """One measured value; `target` is empty where nothing was asked."""

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


class Report:
    """Figures: told and written to the file that `JSON=` asks for as they come, and in the end
    printed as a table."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.figures: list[Figure] = []

    def add(self, name: str, value: float, unit: str) -> None:
        """A figure without a target."""
        self.keep(Figure(name, value, unit))

    def at_least(self, name: str, value: float, unit: str, target: float) -> None:
        """A figure that should not be below its target."""
        self.keep(Figure(name, value, unit, f">= {target:g}", value >= target))

    def at_most(self, name: str, value: float, unit: str, target: float) -> None:
        """A figure that should not be above its target."""
        self.keep(Figure(name, value, unit, f"<= {target:g}", value <= target))

    def keep(self, figure: Figure) -> None:
        """A figure from whomever: what takes minutes shows how far it is, and may be ended."""
        self.figures.append(figure)
        print(f"  {figure.name}: {_shown(figure)} {figure.unit} {figure.target}", flush=True)
        if path := os.environ.get("JSON"):
            Path(path).write_text(json.dumps(msgspec.to_builtins(self.figures), indent=1) + "\n")

    def finish(self) -> None:
        """Print all of them once more."""
        table = Table(title=self.title)
        for heading in ("figure", "value", "unit", "target", "met"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for figure in self.figures:
            met = {None: "", True: "yes", False: "NO"}[figure.met]
            table.add_row(figure.name, _shown(figure), figure.unit, figure.target, met)
        Console(width=None if os.isatty(1) else 120).print(table)


def _shown(figure: Figure) -> str:
    return f"{figure.value:.3g}" if figure.value < 1000 else f"{figure.value:.0f}"
