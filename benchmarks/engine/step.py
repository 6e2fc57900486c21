"""What a connector costs in a step of requests that only decode.

    make bench-step      # REQUESTS=32,256 TOKENS=2048,8192 STEPS=600
    make bench-step JSON=figures.json

vLLM's scheduler and both sides of a connector, around a model that computes nothing
(tests/engines/stub.py). The contestants take turns in one process: no connector, vLLM's own with
nothing behind it, kvtier with one tier, with two, and with two but without reasons for misses. The
prompts have been stored when the clock starts, and end anywhere in a block, so that in each step
some requests get a new one.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from engines.stub import BLOCK_TOKENS, OWN, StubEngine, kvtier

from benchmarks.engine.served import folders
from benchmarks.report import Report
from kvtier.vllm import tiny_model

REQUESTS = [int(each) for each in os.environ.get("REQUESTS", "32,256").split(",")]
TOKENS = [int(each) for each in os.environ.get("TOKENS", "2048,8192").split(",")]
STEPS = int(os.environ.get("STEPS", "600"))
TURN = 50
WITHOUT, THEIRS = "without", "vLLM's own"
UNEXPLAINED = "CPU and NVMe, misses: ignore"
TARGET_US = 25
_TOLD = 4


class Contest:
    """Engines with so many requests of so many tokens."""

    def __init__(self, report: Report, folder: Path, region: Path, requests: int, tokens: int):
        self._report = report
        self._title = f"{requests} x {tokens}"
        self._requests, self._tokens = requests, tokens
        cpu = {"kind": "cpu", "path": str(region), "capacity": "1GiB"}
        nvme = {"kind": "nvme", "path": str(folder / "blocks"), "capacity": "2GiB"}
        name = f"step-{requests}-{tokens}"
        self._settings = {
            WITHOUT: None,
            THEIRS: OWN,
            "CPU": kvtier({"version": 1, "name": f"{name}-a", "tiers": [cpu]}),
            "CPU and NVMe": kvtier({"version": 1, "name": f"{name}-b", "tiers": [cpu, nvme]}),
            UNEXPLAINED: kvtier(
                {
                    "version": 1,
                    "name": f"{name}-c",
                    "misses": "ignore",
                    "tiers": [cpu, nvme | {"path": str(folder / "others")}],
                }
            ),
        }

    def run(self, model: Path) -> None:
        blocks = self._requests * ((self._tokens + 4 * STEPS) // BLOCK_TOKENS + 2)
        with ExitStack() as opened:
            engines = {
                name: opened.enter_context(closing(StubEngine(model, each, blocks, self._requests)))
                for name, each in self._settings.items()
            }
            for engine in engines.values():
                engine.begin(self._requests, self._tokens, spread=True)
            steps: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(max(1, STEPS // TURN)):
                for name, engine in engines.items():
                    steps[name] += engine.seconds(TURN)
            plain = self._tell("a step without", median(steps.pop(WITHOUT)))
            theirs = self._tell(f"{THEIRS}, more", median(steps.pop(THEIRS)) - plain)
            self._hooks(THEIRS, engines[THEIRS])
            for name, spent in steps.items():
                more = self._tell(f"{name}, more", median(spent) - plain)
                self._report.add(f"{self._title}: {name}, against vLLM's own", more / theirs, "x")
                self._hooks(name, engines[name])

    def _hooks(self, name: str, engine: StubEngine) -> None:
        """The connector alone: how long, where, and by how many calls."""
        spent = {hook: median(each) for hook, each in engine.hook_seconds(2 * TURN).items()}
        hooks = sum(spent.values()) * 1e6
        told = f"{self._title}: {name}, its hooks"
        if name == THEIRS:
            self._report.add(told, hooks, "us")
        else:
            self._report.at_most(told, hooks, "us", TARGET_US)
        for hook in sorted(spent, key=spent.__getitem__)[: -_TOLD - 1 : -1]:
            self._report.add(f"{self._title}: {name}, {hook}", spent[hook] * 1e6, "us")
        calls = [sum(step.values()) for each in engine.calls(TURN).values() for step in each]
        self._report.add(f"{self._title}: {name}, Python calls", median(calls), "")

    def _tell(self, name: str, seconds: float) -> float:
        self._report.add(f"{self._title}: {name}", seconds * 1e6, "us")
        return seconds


def main() -> None:
    model = tiny_model.build(Path(sys.prefix) / "models" / "bench-1-128", "llama", 1, 128)
    report = Report("a step of requests that decode (requests x tokens)")
    with folders() as (folder, region):
        for requests in REQUESTS:
            for tokens in TOKENS:
                Contest(report, folder, region, requests, tokens).run(model)
    report.finish()


if __name__ == "__main__":
    main()
