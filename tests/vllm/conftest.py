"""Small models, stacks in folders of the test, and engines that do not outlive it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from engines.engine import Engine
from engines.fixtures import environment_as_before, model, world
from engines.world import World

__all__ = ["environment_as_before", "model", "world"]

HANGS_S = 1800
"""A test starts several engines, each of which takes half a minute where processors are busy."""
LOG_LINES = 60
LONGEST = (
    "test_readme.py",
    "test_gpu_rehearsal.py",
    "test_server.py",
    "test_gpu_engine.py",
    "test_demo.py",
    "test_handoff.py",
)
"""They begin first: the workers share whole files, and all wait for the one that ends last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(HANGS_S))
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure goes what the engines of the test logged last."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"end of {log.name}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def plain_llama(
    model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The engine without kvtier that says what others must answer; it computes all of it anew,
    whatever other files have asked it."""
    world = World(tmp_path_factory.mktemp("plain"))
    yield world.engine(model("llama"), enable_prefix_caching=False)
    world.close()


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Folders and engines of all tests of a file."""
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
