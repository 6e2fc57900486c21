"""Movers in processes of their own, whose backends are the tests'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.movers.contract import MoverRig
from support.movers.media import install


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's backends are found in the mover's process like those that anybody installs."""
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    for each in (Path(__file__).parents[1], folder):
        monkeypatch.setenv("PYTHONPATH", str(each), prepend=os.pathsep)


@pytest.fixture
def media(tmp_path: Path) -> Iterator[MoverRig]:
    """A rig whose mover the test opens."""
    rig = MoverRig(tmp_path)
    yield rig
    rig.close_media()
