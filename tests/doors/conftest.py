"""Tests beside a real neighbour that is too heavy for all others' environments: `make test-doors`
installs these, and runs what is here. Elsewhere each test says what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines.fixtures import environment_as_before, model, world
from support.processes.dynamo_indexer import PYTHON, Indexer
from support.processes.mooncake_pool import MooncakePool, tool

from kvtier.backends.mooncake.client import store_module
from kvtier.errors import MediumError

__all__ = ["environment_as_before", "model", "world"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.doors)
            item.add_marker(pytest.mark.slow)
            if "dynamo" in item.path.name and not (PYTHON.exists() and has("vllm")):
                item.add_marker(pytest.mark.skip("needs vLLM and Dynamo: make test-doors"))
            if "mooncake" in item.path.name and (lack := lacks_mooncake()):
                item.add_marker(pytest.mark.skip(f"{lack}: make test-doors"))
            if "mooncake_engines" in item.path.name and not has("vllm"):
                item.add_marker(pytest.mark.skip("needs vLLM: make test-doors"))
            if "sglang" in item.fixturenames and not has("sglang"):
                item.add_marker(pytest.mark.skip("needs SGLang: make test-sglang"))


def has(name: str) -> bool:
    """Of the same name are this project's own tests, a folder without a file of its own."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def lacks_mooncake() -> str:
    """What there is not of Mooncake; empty if all is there."""
    if not has("mooncake") or tool("mooncake_master") is None:
        return "needs Mooncake"
    try:
        store_module()
    except MediumError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    """Mooncake's, for all tests of a file: who breaks it mends it."""
    pool = MooncakePool(tmp_path_factory.mktemp("mooncake"))
    yield pool
    pool.close()


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    """Dynamo's."""
    indexer = Indexer(tmp_path / "indexer.log")
    yield indexer
    indexer.close()
