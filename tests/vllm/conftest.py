"""Small models, stacks in folders of the test, and engines that do not outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from engines.engine import HOST, Engine
from engines.world import World

MODELS = Path(sys.prefix) / "models"
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


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What vLLM sets when a test imports it, or has it make a configuration, goes with the test.
    Else no engine after that could be forked: its environment would be another one (10 s, not 2).
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def model() -> Callable[..., Path]:
    """Builds a small model in the virtual environment, where it is found the next time."""

    def build(family: str, seed: int = 0, layers: int = 4) -> Path:
        target = MODELS / (f"{family}-{seed}" if layers == 4 else f"{family}-{seed}-{layers}")
        command = [sys.executable, str(HOST.parents[1] / "families.py"), str(target)]
        command += ["--family", family, "--seed", str(seed), "--layers", str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return target

    return build


@pytest.fixture(scope="session")
def plain_llama(
    model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The engine without kvtier that says what others must answer; it computes all of it anew,
    whatever other files have asked it."""
    world = World(tmp_path_factory.mktemp("plain"))
    yield world.engine(model("llama"), enable_prefix_caching=False)
    world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Folders and engines of one test."""
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Folders and engines of all tests of a file."""
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
