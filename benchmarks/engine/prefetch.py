"""Prompts that wait in the engine's queue, with and without prefetching: the first token of each.

    make bench-prefetch     # QUEUED=32 TOKENS=1044 LAYERS=16 HIDDEN=256 ROUNDS=5 CASES=unseen
    make bench-prefetch JSON=figures.json DTYPE=float32      # twice as many bytes a token

Four requests decode, and fill the engine; behind them wait others, whose prompts lie on a disk that
reads 200 MB/s, or in an S3 server that is 20 ms away and sends 64 MB/s. The four take three
quarters of the time that the loads of all others do. The contestants take turns in one engine.
Then the same with prompts that nobody has seen: there is nothing to be prefetched. On a machine
that others use, the processor's time says more of that than the clock. Answers must be equal.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from engines.engine import Engine
from object_servers import ACCESS_KEY, SECRET_KEY, rclone

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.engine.slow_proxy import slow_proxy
from benchmarks.engine.throttled_reads import throttle
from benchmarks.report import Report

QUEUED = int(os.environ.get("QUEUED", "32"))
TOKENS = int(os.environ.get("TOKENS", "1044"))
UNSEEN_TOKENS = int(os.environ.get("UNSEEN_TOKENS", "192"))
LAYERS = int(os.environ.get("LAYERS", "16"))
HIDDEN = int(os.environ.get("HIDDEN", "256"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
CASES = os.environ.get("CASES", "disk unseen store").split()
RUNNING = 4
ANSWER_TOKENS = 2
DISK_BYTES, STORE_BYTES, STORE_SECONDS = 200e6, 64e6, 0.020
BESIDE = 0.75
"""The four take so much of the time that all loads take."""
GAIN, LOSS = 0.70, 1.02
"""What the first tokens should take at most beside those without prefetching: where loads are the
wait, and where there are none."""
_WARM_ROUNDS = 2
_ON, _OFF = "prefetching", "without"


class Bench(Served):
    """Prompts, and engines in whose queue they wait."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"{QUEUED} prompts of {TOKENS} tokens behind {RUNNING}, {DTYPE}")

    def engine(self, tier: dict[str, Any]) -> Engine:
        """With this tier below CPU memory."""
        cpu = {"kind": "cpu", "path": str(self.region), "capacity": "2GiB", "name": tier["kind"]}
        ahead = {"memory": 0.5}
        stack = {"version": 1, "name": "bench", "prefetch": ahead, "tiers": [cpu, tier]}
        return self.start(stack, TOKENS + 1024, max_num_seqs=RUNNING)

    def compare(self, engine: Engine, case: str, rate: float | None) -> None:
        """Rounds in which each contestant has its turn; `rate` is how fast the tier below is, None
        where it has nothing of the prompts."""
        tokens = TOKENS if rate else UNSEEN_TOKENS
        known = [self.prompt(tokens) for _ in range(QUEUED)]
        running = [self.prompt(64) for _ in range(RUNNING)]
        if rate:
            engine.burst(prompts=known)
            engine.settle()
        loads = QUEUED * engine.loaded_bytes(tokens=tokens) / rate if rate else 1.0
        self.report.add(f"{case}: loads of all", loads if rate else 0.0, "s")
        found = defaultdict[str, list[tuple[float, float, float]]](list)
        shares = defaultdict[str, list[float]](list)
        answers = []
        for turn in range(_WARM_ROUNDS + ROUNDS):
            asked = known if rate else [self.prompt(tokens) for _ in range(QUEUED)]
            for contestant in (_ON, _OFF) if turn % 2 else (_OFF, _ON):
                engine.settle()
                engine.forget_engine_cache()
                engine.clear(tier=0)
                if not rate:
                    engine.clear(tier=1)
                engine.prefetch(on=contestant == _ON)
                ended = engine.behind(
                    running=running,
                    after=BESIDE * loads,
                    prompts=asked,
                    tokens=ANSWER_TOKENS,
                )
                told = ended["answers"]
                seconds = [each["seconds"] for each in told]
                shares[contestant].append(sum(each["cached"] for each in told) / tokens / QUEUED)
                answers.append([each["tokens"] for each in told])
                if turn >= _WARM_ROUNDS:
                    p90 = quantiles(seconds, n=10)[-1]
                    found[contestant].append((mean(seconds), p90, ended["own"]))
            assert answers[-1] == answers[-2], "answers differ"
        for name, at in (("mean", 0), ("p90", 1)):
            for contestant in (_ON, _OFF):
                middle = median(each[at] for each in found[contestant])
                self.report.add(f"{case}: {contestant}, {name} first token", middle, "s")
            pairs = zip(found[_ON], found[_OFF], strict=True)
            ratio = median(ours[at] / theirs[at] for ours, theirs in pairs)
            self.report.at_most(f"{case}: {name}, ratio", ratio, "x", GAIN if rate else LOSS)
        pairs = zip(found[_ON], found[_OFF], strict=True)
        ratio = median(ours[2] / theirs[2] for ours, theirs in pairs)
        self.report.at_most(f"{case}: processor's time of the engine, ratio", ratio, "x", LOSS)
        for contestant in (_ON, _OFF) if rate else ():
            self.report.add(f"{case}: {contestant}, share loaded", mean(shares[contestant]), "")
        counted = engine.facts()["chain"]["prefetch"]
        for name in ("arrived", "used", "wasted", "cancelled"):
            self.report.add(f"{case}: blocks {name}", counted[name][1], "")


def empty(folder: Path) -> None:
    """The region of an engine that is gone, for the next one."""
    for left in folder.iterdir():
        left.unlink()


def main() -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with folders() as (folder, region), ExitStack() as stack:
        bench = Bench(folder, region)
        throttle(folder, DISK_BYTES)
        nvme = {"kind": "nvme", "path": str(bench.blocks), "capacity": "16GiB"}
        with bench.engine(nvme) as engine:
            for case, rate in (("disk", DISK_BYTES), ("unseen", None)):
                if case in CASES:
                    bench.compare(engine, case, rate)
        empty(region)
        if "store" in CASES:
            compare_store(bench, folder, stack)
        bench.report.finish()


def compare_store(bench: Bench, folder: Path, stack: ExitStack) -> None:
    """The same with an S3 server on a way that takes time."""
    program = Path(sys.prefix).with_name(".venv") / "bin/rclone"
    server = stack.enter_context(rclone(folder, program))
    port = stack.enter_context(slow_proxy(server.port, STORE_SECONDS, STORE_BYTES))
    store = {"kind": "object", "url": "s3://bucket/kv", "capacity": "16GiB"}
    with bench.engine(store | {"endpoint": f"http://127.0.0.1:{port}"}) as engine:
        bench.compare(engine, "store", STORE_BYTES)


if __name__ == "__main__":
    main()
