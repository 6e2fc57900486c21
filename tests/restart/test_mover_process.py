"""The mover's process keeps the contract of every mover, whatever happens to either process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.core.backend import TierContext
from kvtier.core.transfer import Mover, TransferKind
from kvtier.errors import MoverError
from kvtier.move.process import ProcessMover
from kvtier.testing.media import MediumSettings, install
from kvtier.testing.mover import FAR, HOST, NEAR, MoverContract, MoverRig
from kvtier.types import Outcome


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's backends are found in the mover's process like those that anybody installs."""
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


class TestProcessMover(MoverContract):
    def open_mover(self, tiers: Sequence[MediumSettings], context: TierContext) -> Mover:
        return ProcessMover(tiers, context, staging_bytes=1 << 16)
