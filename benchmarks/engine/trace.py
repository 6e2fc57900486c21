"""A chat service's requests, served by an engine whose own cache is small, with kvtier and without.

    make bench-trace      # TRACE=requests.jsonl REQUESTS=600 PART=0.6 LAYERS=4 HIDDEN=512 OWN=24576
    make bench-trace JSON=figures.json DTYPE=float32      # as in benchmarks/engine/vllm.py

Requests come when the trace says, whether the engine keeps up or not, and so fast that an engine
without any cache would compute prompts for PART of the time. The third contestant is what kvtier
would be at its best: an engine without it, whose own cache is endless. All three live at the same
time and serve the same slices of the trace in turns.

A trace has a JSON object a line, with a `timestamp` in milliseconds and the `hash_ids` of the
prompt's blocks (as those of Mooncake). Whole conversations of it are taken. Without one, chats of
two paces are made up.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

from engines.engine import Engine

from benchmarks.engine.served import DTYPE, Served, folders, own_cache
from benchmarks.eviction.workloads import paces
from benchmarks.measure import rotated
from benchmarks.report import Report
from kvtier.cli.trace_simulation import Request, read_trace

TRACE = os.environ.get("TRACE")
REQUESTS = int(os.environ.get("REQUESTS", "600"))
PART = float(os.environ.get("PART", "0.6"))
LAYERS = int(os.environ.get("LAYERS", "4"))
HIDDEN = int(os.environ.get("HIDDEN", "512"))
SLICES = 6
BLOCK = 64
"""Tokens for each block of the trace: prompts are as many times shorter as the model is smaller."""
TOKENS_MAX = 4096
DECODED = 16
OWN_TOKENS = int(os.environ.get("OWN", 24 << 10))
"""What the engine's own cache holds: a few dozen prompts, as that of a GPU does of real ones."""
_COMMON = 0.05
_WARM = 8
PLAIN, OURS, ENDLESS = "without", "with kvtier", "endless cache"


class Asked(NamedTuple):
    """When, and what."""

    at: float
    prompt: list[int]


def conversations(requests: Sequence[Request], wanted: int) -> list[Request]:
    """About so many requests, in whole conversations: what begins alike, but for what many have."""
    seen = Counter(block for request in requests for block in request.blocks)
    common = _COMMON * len(requests)

    def first(request: Request) -> int:
        own = (block for block in request.blocks if seen[block] < common)
        return next(own, request.blocks[-1])

    one_in = max(1, len(requests) // wanted)
    chosen = [r for r in requests if r.blocks and not random.Random(first(r)).randrange(one_in)]
    return chosen[:wanted]


def prompts(requests: Sequence[Request]) -> list[Asked]:
    """Tokens that follow from the blocks' numbers, and an end that nobody else has."""
    asked = []
    for number, request in enumerate(requests):
        tokens: list[int] = []
        for block in request.blocks[: TOKENS_MAX // BLOCK - 1]:
            tokens += random.Random(block).choices(range(256), k=BLOCK)
        tail = random.Random(-1 - number).choices(range(256), k=BLOCK // 2)
        asked.append(Asked(request.time, tokens + tail))
    return asked


class Bench(Served):
    """The contestants."""

    def __init__(self, folder: Path, region: Path, asked: Sequence[Asked]) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.asked = asked
        self.tokens = sum(len(each.prompt) for each in asked)
        self.report = Report(f"{len(asked)} requests of a trace, {self.tokens} tokens, {DTYPE}")

    def engine(self, name: str) -> Engine:
        """One of them."""
        own = self.tokens + OWN_TOKENS if name == ENDLESS else OWN_TOKENS
        tiers = self.cpu(self.tokens * self.token_bytes // 3), self.nvme("16GiB")
        stack = self.stack(*tiers, chunk_tokens=BLOCK)
        more = own_cache(own // BLOCK + 1, BLOCK)
        return self.start(stack if name == OURS else None, TOKENS_MAX, **more)

    def replay(self, engines: dict[str, Engine]) -> None:
        """All slices on all engines, the first of them another one each time."""
        pace = self._pace(engines[PLAIN])
        self.report.add("the trace takes", self.asked[-1].at * pace, "s")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        size = -(-len(self.asked) // SLICES)
        for number in range(SLICES):
            part = self.asked[number * size : (number + 1) * size]
            timed = [((each.at - part[0].at) * pace, each.prompt) for each in part]
            for name in rotated(engines, number):
                found[name].append(engines[name].replay(requests=timed, tokens=DECODED))
        self._tell(found)

    def _pace(self, engine: Engine) -> float:
        """Seconds for each of the trace's, so that computing all prompts is PART of the time."""
        fresh = [self.prompt(self.tokens // len(self.asked)) for _ in range(_WARM)]
        took = engine.replay(requests=[(0.0, each) for each in fresh], tokens=DECODED)
        a_token = max(last for _, last, _ in took["answers"]) / sum(map(len, fresh))
        return float(self.tokens * a_token / PART / self.asked[-1].at)

    def _tell(self, found: dict[str, list[dict[str, Any]]]) -> None:
        means = {}
        for name, slices in found.items():
            answers = [answer for each in slices for answer in each["answers"]]
            firsts, lasts, cached = zip(*answers, strict=True)
            means[name] = mean(firsts)
            cuts = quantiles(firsts, n=100)
            self.report.add(f"{name}: mean first token", means[name], "s")
            for cut in (50, 90, 99):
                self.report.add(f"{name}: first token, {cut} % within", cuts[cut - 1], "s")
            self.report.add(f"{name}: mean last token", mean(lasts), "s")
            self.report.add(f"{name}: tokens cached", sum(cached) / self.tokens * 100, "%")
            self.report.add(f"{name}: processor", sum(each["spent"] for each in slices), "s")
        ours = means[OURS]
        self.report.at_most("first token, with kvtier to without", ours / means[PLAIN], "x", 1.0)
        self.report.at_most("and to an endless cache", ours / means[ENDLESS], "x", 1.25)


def main() -> None:
    requests = read_trace(Path(TRACE)) if TRACE else paces()
    asked = prompts(conversations(requests, REQUESTS))
    with folders() as (folder, region):
        bench = Bench(folder, region, asked)
        with (
            bench.engine(PLAIN) as plain,
            bench.engine(OURS) as ours,
            bench.engine(ENDLESS) as endless,
        ):
            bench.replay({PLAIN: plain, OURS: ours, ENDLESS: endless})
        bench.report.finish()


if __name__ == "__main__":
    main()
