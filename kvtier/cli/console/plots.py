"""Plots that commands write beside their tables."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from kvtier.errors import naming


def check(file: Path | None) -> None:
    """That a plot can be written at the end is seen to before all that it will show."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise typer.BadParameter(
            f"{file}: name a file in a folder where you may write", param_hint="--svg"
        )
    if file.exists() and not _may_be_replaced(file):
        raise typer.BadParameter(f"{file} exists, and is no plot: name another", param_hint="--svg")


def _may_be_replaced(file: Path) -> bool:
    if not file.is_file():
        return not file.is_block_device()
    with file.open("rb") as found:
        return found.read(4) in (b"<svg", b"")


def write(file: Path, svg: str) -> None:
    """Write what `check` saw that can be written."""
    with naming(file):
        file.write_text(svg, encoding="utf-8")
