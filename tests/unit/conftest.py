"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scheduler.asking import TWO_GROUPS, host_memory

from kvtier import Stack
from kvtier.interfaces import backend as registry


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Host memory alone, for the scheduler's side."""
    with Stack.open(host_memory(tmp_path), TWO_GROUPS) as stack:
        yield stack


@pytest.fixture
def other_tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package is installed, with the kinds `bench` (host memory) and `shelf` (a folder)."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "plugin")
    _look_again()
    yield
    monkeypatch.undo()
    _look_again()


def _look_again() -> None:
    registry._points.cache_clear()
    registry.backend.cache_clear()
