"""Closes the engines that a test has opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tiers.nvme_rig import Engine


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    Engine.opened.clear()  # those of other folders' tests, which may have lost their files
    yield
    for engine in Engine.opened.copy():
        engine.close()
