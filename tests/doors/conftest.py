"""Tests beside a real neighbour that is too heavy for all others' environments: `make test-doors`
installs these, and runs what is here. Elsewhere each test says what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.fixtures import environment_as_before, model, world
from support.processes.dynamo_indexer import PYTHON, Indexer

__all__ = ["environment_as_before", "model", "world"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.doors)
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    """Dynamo's."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-doors")
    if not PYTHON.exists():
        pytest.skip("ai-dynamo-runtime is not installed: make test-doors")
    indexer = Indexer(tmp_path / "indexer.log")
    yield indexer
    indexer.close()
