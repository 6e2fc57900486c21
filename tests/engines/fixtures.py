"""Fixtures of all tests that start engines: small models, and stacks in folders of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.engine import HOST
from engines.world import World

MODELS = Path(sys.prefix) / "models"


_AT_FIRST = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What vLLM sets when a test imports it, or has it make a configuration, goes with the test;
    what it set for the fixtures of a file goes before. Else no engine after that could be forked:
    its environment would be another one (10 s, not 2).
    """
    _restore_environment()
    yield
    _restore_environment()


def _restore_environment() -> None:
    for name in os.environ.keys() - _AT_FIRST.keys():
        if not name.startswith("PYTEST_"):
            del os.environ[name]
    os.environ.update(_AT_FIRST)


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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Folders and engines of one test."""
    world = World(tmp_path)
    yield world
    world.close()
