"""The device, where there is one."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module
