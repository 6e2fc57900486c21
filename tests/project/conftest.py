"""The project as somebody else gets it: its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.sources import copy_sources


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has or would have: no build outputs, links as links."""
    target = tmp_path_factory.mktemp("source") / "kvtier"
    copy_sources(target)
    return target
