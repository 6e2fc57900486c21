"""The program of `make gpu-engine`, whole, on the CPU platform: on a GPU only the GPU is new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STAGES = ["without", "kvtier", "matrix"]


def test_the_run_is_whole_and_answers_are_equal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_engine", "--device", "cpu", "--short"]
    command += ["--cases", "1", "--out", str(tmp_path / "out"), "--folder", str(tmp_path)]
    command += ["--seconds", "1700", "--only", ",".join(STAGES)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    told = json.loads((tmp_path / "out" / "engine.json").read_text())
    assert told["done"] == STAGES
    for row in told["rows"]:
        if equal := row.get("equal"):
            same, _, asked = equal.split()[:3]
            assert same == asked, row
    rows = {(row.get("engine"), row["what"]): row for row in told["rows"]}
    kept = rows["kvtier", "32k from memory kept over kill -9"]
    loaded = rows["kvtier", "32k from disk after a restart, load_policy: always"]
    assert kept["cached"] == loaded["cached"] == [1600 // 256 * 256]
    (case,) = {row["engine"] for row in told["rows"] if row["stage"] == "matrix"}
    assert rows[case, "disk alone"]["more"]["nvme"] > 0
    assert rows[case, "CPU memory"]["more"]["cpu"] > 0
    assert not list(Path("/dev/shm").glob("gpu-engine-*"))
