"""The project as somebody else gets it: its files, and the figures that are limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from sources import copy_sources

ROOT = Path(__file__).parents[2]
FIGURES: list[str] = []


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has or would have: no build outputs, links as links."""
    target = tmp_path_factory.mktemp("source") / "kvtier"
    copy_sources(target)
    return target


@pytest.fixture
def figure() -> list[str]:
    """Lines to show at the end of the run."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in FIGURES:
        terminalreporter.write_line(line)
