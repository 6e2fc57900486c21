"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.scheduler.asking import TWO_GROUPS, host_memory, small_above_large

from kvtier import Stack
from kvtier.interfaces import backend as registry


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Host memory alone, for the scheduler's side."""
    with Stack.open(host_memory(tmp_path), TWO_GROUPS) as stack:
        yield stack


@pytest.fixture
def open_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Opens stacks of host memory and a disk, whose chains prefetch as an engine's do."""
    with ExitStack() as held:

        def open_it(
            slots: int = 32, *, eviction: str = "adaptive", write: str = "through", **more: Any
        ) -> Stack:
            config = small_above_large(tmp_path, slots) | more
            config["prefetch"] = {"memory": 0.5, "warmup_share": 0}
            config["tiers"][0]["eviction"] = eviction
            config["tiers"][1]["write"] = write
            return held.enter_context(Stack.open(config, TWO_GROUPS, serving=True))

        yield open_it


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
