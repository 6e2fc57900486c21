"""Many prompts at once: whether loads that are slower than computing pay where the engine is busy.

    make bench-crowd     # PROMPTS=14 TOKENS=1500 LAYERS=8 HIDDEN=768 ROUNDS=3
    make bench-crowd JSON=figures.json DTYPE=float32      # as in benchmarks/engine/vllm.py

Prompts that lie on a disk, one burst after the other. The contestants take turns in one engine: the
cost model as it is, one that weighs each request alone, loading all, and prompts that nobody has
seen. First with a disk that takes 1.5 times as long as computing and room for all, then with the
disk as it is and room in CPU memory for three prompts at a time.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from engines.engine import Engine

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.report import Report

PROMPTS = int(os.environ.get("PROMPTS", "14"))
TOKENS = int(os.environ.get("TOKENS", "1500"))
LAYERS = int(os.environ.get("LAYERS", "8"))
HIDDEN = int(os.environ.get("HIDDEN", "768"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
SLOWER = 1.5
SLOW, CRAMPED = "slow disk", "little room"
_WARM_ROUNDS = 2


class Bench(Served):
    """Prompts, and engines that keep them on a disk."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"{PROMPTS} prompts of {TOKENS} tokens at once, {DTYPE}")

    def prompts(self, count: int = PROMPTS) -> list[list[int]]:
        """Prompts that nobody has seen."""
        return [self.prompt(TOKENS) for _ in range(count)]

    def engine(self, capacity: int) -> Engine:
        """With so much CPU memory, and the reads of its disk in its own process."""
        tiers = self.cpu(capacity), self.nvme("16GiB")
        return self.start(self.stack(*tiers, mover={"mode": "threads"}), TOKENS)

    def compare(self, engine: Engine, case: str, contestants: list[str]) -> None:
        """Bursts in turns; the mean first token and the last, by contestant."""
        known = self.prompts()
        engine.burst(prompts=known)
        engine.settle()
        found = defaultdict[str, list[tuple[float, float, float]]](list)
        for turn in range(_WARM_ROUNDS + ROUNDS):
            for contestant in contestants:
                engine.settle()
                engine.forget_engine_cache()
                engine.clear(tier=0)
                engine.weigh(how="crowd" if contestant == "unseen" else contestant)
                asked = self.prompts() if contestant == "unseen" else known
                seconds, cached = zip(*engine.burst(prompts=asked), strict=True)
                if turn >= _WARM_ROUNDS:
                    found[contestant].append(
                        (mean(seconds), max(seconds), sum(cached) / TOKENS / PROMPTS)
                    )
        means = {}
        for contestant in contestants:
            middle, last, share = (median(each) for each in zip(*found[contestant], strict=True))
            means[contestant] = middle
            self.report.add(f"{case}: {contestant}, mean first token", middle, "s")
            self.report.add(f"{case}: {contestant}, last first token", last, "s")
            self.report.add(f"{case}: {contestant}, share of tokens loaded", share, "")
        ours = means.pop("crowd")
        for contestant, theirs in means.items():
            name = f"{case}: crowd against {contestant}"
            self.report.at_most(name, ours / theirs, "x", 1.1)


def main() -> None:
    with folders() as (folder, region):
        bench = Bench(folder, region)
        with bench.engine(4 << 30) as engine:
            compute = slow(bench, engine)
            bench.report.add("computing one prompt", compute, "s")
            bench.compare(engine, SLOW, ["crowd", "alone", "always", "unseen"])
            used = engine.cpu_bytes() // PROMPTS
        shutil.rmtree(region)
        region.mkdir(mode=0o700)
        with bench.engine(used * 7 // 2) as engine:
            engine.burst(prompts=bench.prompts(1))
            bench.compare(engine, CRAMPED, ["crowd", "alone", "always", "unseen"])
        bench.report.finish()


def slow(bench: Bench, engine: Engine) -> float:
    """Make the disk so slow that a prompt's load takes longer than its computing, which this
    answers with."""
    engine.burst(prompts=bench.prompts(1))
    (one,) = bench.prompts(1)
    ((compute, _),) = engine.burst(prompts=[one])
    engine.settle()
    engine.weigh(how="always")
    pause = SLOWER * compute
    engine.slow_reads(pause=pause)
    engine.forget_engine_cache()
    engine.clear(tier=0)
    ((load, _),) = engine.burst(prompts=[one])
    engine.slow_reads(pause=pause * pause / load)  # several reads, some of them side by side
    return float(compute)


if __name__ == "__main__":
    main()
