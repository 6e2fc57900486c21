"""A prompt that an engine of another tensor-parallel size has computed: the first token's time.

    make bench-handover     # TOKENS=4096 LAYERS=16 HIDDEN=512 ROUNDS=7 WAYS="memory bucket"
    make bench-handover WAYS=mooncake RANKS="1 1"       # by a pool, between engines of one size

Two engines, of one rank and of two, share CPU memory, or each has its own and both a bucket of an
S3 server on this machine, or a Mooncake pool. One computes a prompt for one token; then, and with
what it answered, the other is asked for the first token, while the first still stores. In turns,
both ways round, with a prompt that the other has to compute itself.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from engines.engine import Engine
from support.processes.mooncake_pool import MooncakePool

from benchmarks.engine.served import DTYPE, Served, bucket_server, folders
from benchmarks.measure import median_ratio
from benchmarks.report import Report

TOKENS = int(os.environ.get("TOKENS", "4096"))
LAYERS = int(os.environ.get("LAYERS", "16"))
HIDDEN = int(os.environ.get("HIDDEN", "512"))
ROUNDS = int(os.environ.get("ROUNDS", "7"))
WAYS = os.environ.get("WAYS", "memory bucket").split()
RANKS = tuple(map(int, os.environ.get("RANKS", "1 2").split()))
_WARM_ROUNDS = 2
_COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}


class Bench(Served):
    """Prompts, and two engines on the same stack or on two."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"prompts of {TOKENS} tokens between engines, {DTYPE}")

    def engines(self, *tiers: dict[str, Any]) -> list[Engine]:
        """One of each size; with tiers below CPU memory each has that for itself."""
        found = []
        for at, ranks in enumerate(RANKS):
            region = self.region / str(at if tiers else "both")
            region.mkdir(exist_ok=True)
            cpu = self.cpu("1GiB") | {"path": str(region)}
            stack = self.stack(cpu, *tiers, across_degrees=True)
            found.append(self.start(stack, TOKENS, tensor_parallel_size=ranks))
        return found

    def compare(self, way: str, computes: Engine, answers: Engine, which: str) -> None:
        """Rounds, of which each engine has two turns."""
        handed, computed, found = [], [], 0
        for turn in range(_WARM_ROUNDS + ROUNDS):
            before = sum(answers.facts()["chain"]["hits"])
            ours, theirs = self.handed_over(computes, answers), self.computed(answers)
            if turn >= _WARM_ROUNDS:
                found += sum(answers.facts()["chain"]["hits"]) - before
                handed.append(ours)
                computed.append(theirs)
        for name, seconds in (("handed over", handed), ("computed", computed)):
            self.report.add(f"{way}, {which}: first token, {name}", median(seconds), "s")
        self.report.add(f"{way}, {which}: ratio", median_ratio(handed, computed), "x")
        self.report.add(f"{way}, {which}: share loaded", found * 256 / TOKENS / ROUNDS, "")

    def handed_over(self, computes: Engine, answers: Engine) -> float:
        """Seconds from when the one engine has answered to the other's first token."""
        prompt = self.prompt(TOKENS + 1)
        said = computes.generate_with(prompt=prompt, tokens=1, limits=_COMPUTE)["transfer"]
        with ThreadPoolExecutor() as beside:
            stored = beside.submit(computes.settle)
            seconds: float = answers.first_token(prompt=prompt, said=said)["seconds"]
            stored.result()
        answers.settle()
        return seconds

    def computed(self, answers: Engine) -> float:
        """Seconds to the first token of a prompt that nobody has computed."""
        seconds: float = answers.first_token(prompt=self.prompt(TOKENS + 1))["seconds"]
        answers.settle()
        return seconds


def main() -> None:
    with folders() as (folder, region):
        bench = Bench(folder, region)
        for way in WAYS:
            with ExitStack() as stack:
                tiers = []
                if way == "bucket":
                    server = stack.enter_context(bucket_server(folder))
                    bucket = {"kind": "object", "url": "s3://bucket/kv", "capacity": "16GiB"}
                    tiers = [bucket | {"endpoint": server.endpoint, "refresh": "200ms"}]
                elif way == "mooncake":
                    pool = MooncakePool(folder, lent=2 << 30)
                    stack.callback(pool.close)
                    tiers = [{"kind": "mooncake", "master": pool.address, "capacity": "2GiB"}]
                one, other = map(stack.enter_context, bench.engines(*tiers))
                bench.compare(way, other, one, f"from {RANKS[1]} to {RANKS[0]}")
                bench.compare(way, one, other, f"from {RANKS[0]} to {RANKS[1]}")
        bench.report.finish()


if __name__ == "__main__":
    main()
