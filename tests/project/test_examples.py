"""Every example runs as it stands (examples/custom_tier has a test of its own)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_embedded(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "embedded.py"), str(tmp_path / "blocks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "nvme   100 blocks,  100 hits" in done.stdout


def test_ask_says_at_once_that_a_file_is_missing(tmp_path: Path) -> None:
    """And does not wait for a server first."""
    command = [sys.executable, str(EXAMPLES / "ask.py"), "http://127.0.0.1:9", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'x'}: No such file or directory\n"
