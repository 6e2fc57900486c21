"""`make vllm-drill`: what a port to a version would have to change, by its wheel alone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEDULER = """
class Scheduler:
    def __init__(self):
        self.connector = None
    def set_pause_state(self, pause_state): ...
    def get_num_unfinished_requests(self): ...
    def finish_requests(self, request_ids, finished_status): ...
"""


def test_a_wheel_with_little_in_it(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.94.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/v1/core/sched/scheduler.py", SCHEDULER)
    command = [sys.executable, str(ROOT / "tools" / "vllm_drill.py"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "vLLM 0.94.0, by its sources alone:"
    assert "ok    vllm.v1.core.sched.scheduler:Scheduler (engine.py)" in lines
    assert "      - module vllm.v1.engine.core is not there" in lines
    assert lines[-1].startswith("1 of ")
