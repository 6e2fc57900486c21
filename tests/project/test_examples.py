"""Every example runs as it stands (examples/custom_tier has a test of its own)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import load

EXAMPLES = Path(__file__).parents[2] / "examples"
STACKS = sorted((EXAMPLES.parent / "configs").glob("*.yaml"))


def test_embedded(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "embedded.py"), str(tmp_path / "blocks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "nvme   100 blocks,  100 hits" in done.stdout


@pytest.mark.parametrize("file", STACKS, ids=lambda file: file.stem)
def test_the_environment_names_the_engine_of_a_ready_stack(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_FOLDER", str(tmp_path / "blocks"))
    monkeypatch.setenv("KVTIER_BUCKET", f"file://{tmp_path}/bucket")
    monkeypatch.setenv("KVTIER_NAME", "second")
    assert load(file).name == "second"
