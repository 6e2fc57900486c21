"""A real engine with aborts, preemptions, resets and adapters: what it holds does not grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import campaign
from campaign.growth import judge
from campaign.round import Round, Scenario

_PYTHON = Path(campaign.__file__).parents[1] / ".venv-vllm" / "bin" / "python"
_REQUESTS = 800
"""An engine takes some hundred requests to have all the memory that it will use again."""
_FLAT = {
    "pins": 0.0,
    "slots in flight": 0.0,
    "known requests": 0.0,
    "descriptors": 10.0,
    "threads": 10.0,
    "memory": 32 << 20,
    "mover's memory": 8 << 20,
    "shared memory": 4 << 20,
}
"""What a thousand requests may add, beyond what their error explains."""


class Serving(Scenario):
    name = "serving"
    about = (
        "A real vLLM engine on the CPU platform, with its mover in a process: requests, aborts, "
        "preemptions, resets and changing adapters. At rest no slot is pinned or in flight, and no "
        "request known; descriptors, threads, memory and shared memory do not grow: a regression "
        "line over the second half of each life, with its error."
    )
    share = 0.7
    limit_s = 900.0

    def play(self, round: Round) -> None:
        if not _PYTHON.exists():
            round.counts["no vLLM here: make venv-vllm"] += 1
            return
        looks = self._looks(round)
        round.counts["requests, aborts and resets"] += looks[-1]["requests"] if looks else 0
        round.counts["looks at rest"] += len(looks)
        round.check(len(looks) >= 8, f"only {len(looks)} looks: the engine died")
        for each in looks:
            for what in ("pins", "slots in flight", "known requests", "mistakes"):
                round.check(not each[what], f"{each[what]} {what} at rest: {each}")
            round.check(each["at rest"], f"not at rest: {each}")
        judge(round, looks, _FLAT, of="requests")

    def _looks(self, round: Round) -> list[dict[str, Any]]:
        """In a process group of its own: it starts several."""
        here = Path(campaign.__file__).parents[1]
        path = os.pathsep.join(str(here / each) for each in ("", "tests"))
        command = [str(_PYTHON), "-m", "campaign.serving_life", str(round.folder)]
        log = round.folder / "said"
        with log.open("wb") as said:
            life = subprocess.Popen(
                [*command, str(round.dice.randrange(1 << 20)), str(_REQUESTS)],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            out, _ = life.communicate()
        if life.returncode:
            round.found(f"ended with {life.returncode}: {log.read_text(errors='replace')[-3000:]}")
        if life.returncode == -signal.SIGKILL:
            round.counts["killed from outside"] += 1
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
