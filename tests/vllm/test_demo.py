"""The demonstration runs as the README says, and shows what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_the_cache_survives_a_kill_and_a_reboot() -> None:
    kvtier = Path(sys.executable).with_name("kvtier")
    done = subprocess.run(
        [str(kvtier), "demo", "--tokens", "1500", "--layers", "2", "--hidden", "128"],
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line.split()[-4:] for line in done.stdout.splitlines()}
    assert rows["cold"][:2] == ["0", "0"]
    assert int(rows["after kill -9 and a new start"][0]) >= 1280
    assert int(rows["after a reboot"][1]) >= 1280
    assert done.stdout.count("the same") == 5
