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
    """Collects figures, then prints the table and writes the JSON that `JSON=` asks for."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.figures: list[Figure] = []

    def add(self, name: str, value: float, unit: str) -> None:
        """A figure without a target."""
        self.figures.append(Figure(name, value, unit))

    def at_least(self, name: str, value: float, unit: str, target: float) -> None:
        """A figure that should not be below its target."""
        self.figures.append(Figure(name, value, unit, f">= {target:g}", value >= target))

    def at_most(self, name: str, value: float, unit: str, target: float) -> None:
        """A figure that should not be above its target."""
        self.figures.append(Figure(name, value, unit, f"<= {target:g}", value <= target))

    def finish(self) -> None:
        """Print and write everything."""
        table = Table(title=self.title)
        for heading in ("figure", "value", "unit", "target", "met"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for figure in self.figures:
            met = {None: "", True: "yes", False: "NO"}[figure.met]
            value = f"{figure.value:.3g}" if figure.value < 1000 else f"{figure.value:.0f}"
            table.add_row(figure.name, value, figure.unit, figure.target, met)
        Console(width=None if os.isatty(1) else 120).print(table)
        self.save()

    def save(self) -> None:
        """Write what is known so far."""
        if path := os.environ.get("JSON"):
            Path(path).write_text(json.dumps(msgspec.to_builtins(self.figures), indent=1) + "\n")
