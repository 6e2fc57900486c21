"""Agents that pause for their tools, with hints, with what kvtier learns by itself, and with LRU.

    make bench-agents       # AGENTS=24 REQUESTS=600 ROUNDS=1 ROUND_S=150 SIZES="0.05 0.1 0.2"
    make bench-agents JSON=figures.json DTYPE=float32      # as in benchmarks/engine/vllm.py

Made-up sessions (`benchmarks.eviction.hints`), first simulated, beside other policies and
the bound of Belady. Then on engines; time runs so fast that a round takes ROUND_S. Below an
engine's own cache, which is small, there is only CPU memory, for a part of all that is asked. Three
engines live at the same time, and each request goes to one after the other: whatever else the
machine does hits all of them. The hints are those of the guide: a session's name with each request,
and with its last one that it is over.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from engines.engine import Engine

from benchmarks.engine.served import DTYPE, Served, folders, own_cache
from benchmarks.eviction.hints import (
    BLOCK,
    REQUESTS,
    SHARE,
    SIZES,
    different_blocks,
    sessions,
    simulate_all,
)
from benchmarks.measure import median_ratio, rotated
from benchmarks.report import Report
from kvtier.record.record import record_bytes

ROUNDS = int(os.environ.get("ROUNDS", "1"))
ROUND_S = float(os.environ.get("ROUND_S", "150"))
LAYERS, HIDDEN = 4, 256
OWN_TOKENS, RUNNING, TOKENS_MAX = 5 << 10, 2, 4 << 10
HINTS, LEARNING, LRU = "hints", "learning alone", "LRU"


class Bench(Served):
    """The contestants."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.rounds = [sessions(seed) for seed in range(ROUNDS)]
        tokens = sum(len(each.prompt) for asked in self.rounds for each in asked)
        self.report = Report(f"{ROUNDS} rounds of {REQUESTS} requests, {tokens} tokens, {DTYPE}")
        self.blocks_of_all = median(map(different_blocks, self.rounds))

    def engine(self, name: str, size: float, region: Path) -> Engine:
        """One of them, with so large a part of what is asked in CPU memory."""
        block = record_bytes(BLOCK * self.token_bytes) + 64
        room = int(size * self.blocks_of_all) * block + (64 << 10)
        cpu = self.cpu(room, eviction="lru" if name == LRU else "adaptive") | {"path": str(region)}
        stack = self.stack(cpu, chunk_tokens=BLOCK, retain={"share": SHARE})
        own = own_cache(OWN_TOKENS // BLOCK, BLOCK)
        return self.start(stack, TOKENS_MAX, max_num_seqs=RUNNING, **own)

    def compare(self, size: float, engines: dict[str, Engine]) -> None:
        """All rounds; of the engines another one is asked first each time."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for asked in self.rounds:
            begin, pace = time.perf_counter(), ROUND_S / asked[-1].at
            for number, each in enumerate(asked):
                time.sleep(max(0.0, begin + each.at * pace - time.perf_counter()))
                for name in rotated(engines, number):
                    said = each.said if name == HINTS else None
                    found[name].append(engines[name].first_token(prompt=each.prompt, said=said))
            for engine in engines.values():
                engine.settle()
                engine.forget_engine_cache()
        self._tell(size, found)

    def _tell(self, size: float, found: dict[str, list[dict[str, Any]]]) -> None:
        what = f"memory for {size:.0%} of all"
        tokens = sum(len(each.prompt) for asked in self.rounds for each in asked)
        seconds = {}
        for name, answers in found.items():
            cached = sum(each["cached"] for each in answers)
            seconds[name] = [each["seconds"] for each in answers]
            self.report.add(f"{what}: {name}, tokens cached", 100 * cached / tokens, "%")
            self.report.add(f"{what}: {name}, mean first token", mean(seconds[name]), "s")
        for name, other in ((HINTS, LRU), (HINTS, LEARNING), (LEARNING, LRU)):
            ratio = mean(seconds[name]) / mean(seconds[other])
            self.report.add(f"{what}: mean first token, {name} / {other}", ratio, "x")
            ratio = median_ratio(seconds[name], seconds[other])
            self.report.add(f"{what}: median of each request's ratio, {name} / {other}", ratio, "x")


def main() -> None:
    with folders() as (folder, region):
        bench = Bench(folder, region)
        simulate_all(bench.report)
        for size in SIZES:
            with ExitStack() as stack:
                engines: dict[str, Engine] = {}
                for name in (HINTS, LEARNING, LRU):
                    own = region / f"{size}-{len(engines)}"
                    own.mkdir()
                    engines[name] = stack.enter_context(bench.engine(name, size, own))
                bench.compare(size, engines)
        bench.report.finish()


if __name__ == "__main__":
    main()
