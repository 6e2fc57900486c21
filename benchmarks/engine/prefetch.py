"""Prompts that wait in the engine's queue, with and without prefetching: the first token of each.

    make bench-prefetch     # QUEUED=32 TOKENS=1044 LAYERS=16 HIDDEN=256 ROUNDS=5 CASES=unseen
    make bench-prefetch JSON=figures.json DTYPE=float32      # twice as many bytes a token

Four requests decode, and fill the engine; behind them wait others, whose prompts lie on a disk that
reads 200 MB/s, or in an S3 server that is 20 ms away and sends 64 MB/s. The four take three
quarters of the time that the loads of all others do. The contestants take turns in one engine.
Then the same with prompts that nobody has seen: there is nothing to be prefetched. On a machine
that others use, the processor's time says more of that than the clock. Answers must be equal.

In the end (storm) honest requests beside hostile ones, each of which names another cold prefix and
is aborted. The hostile requests wait behind the honest ones: what they cost is their place in the
queue, and what is prefetched for them. The contestants: no hostile requests, and storms with
prefetching and without. First with honest prompts that are to be computed. Then with such that lie
on the same disk, where vLLM begins to serve hostile requests, too, while honest ones load: only
with a storm without prefetching can that be compared.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from engines.engine import Engine
from support.processes.mooncake_pool import StallingProxy

from benchmarks.engine.served import DTYPE, Served, bucket_server, folders
from benchmarks.engine.slow import Rate, throttle
from benchmarks.measure import median_ratio, rotated
from benchmarks.report import Report

HONEST, HONEST_TOKENS = 16, 16
SHORT_TOKENS = 192
"""Less than a block: no tier ever has anything of such a prompt."""
HOSTILE = 64
EVERY = tuple(map(int, os.environ.get("STORM_EVERY", "4 1").split()))
"""A hostile request comes with every so many steps of the honest ones: storms of several speeds."""
LIFE_STEPS = 8
"""A hostile request is aborted so many steps after it came."""
AT_MOST = 1.03
"""How long honest requests may take beside those that nobody disturbs."""
_STORM_WARM_ROUNDS = 1


class Storm(NamedTuple):
    """A contestant: how often hostile requests come (0: never), and what is done for them."""

    every: int = 0
    prefetching: bool = True

    def __str__(self) -> str:
        if not self.every:
            return "no storm"
        return f"every {self.every}" + ("" if self.prefetching else ", no prefetching")


_QUIET = Storm()
_Figures = dict[Storm, list[tuple[float, float]]]


def compare_storm(
    served: Served, report: Report, engine: Engine, tokens: int, rounds: int, running: int
) -> None:
    """Rounds of both kinds of honest prompts; hostile prompts have so many `tokens`."""
    hostile = [served.prompt(tokens) for _ in range(HOSTILE)]
    known = [served.prompt(tokens) for _ in range(HONEST)]
    engine.burst(prompts=hostile + known)
    engine.settle()
    for case, stored, speeds in (("computed", None, EVERY), ("on the disk", known, EVERY[:1])):
        storms = [Storm(every, on) for every in speeds for on in (True, False)]
        order = [_QUIET, *storms] if stored is None else storms
        found: _Figures = defaultdict(list)
        rates = defaultdict[int, list[float]](list)
        for turn in range(_STORM_WARM_ROUNDS + rounds):
            honest = stored or [served.prompt(SHORT_TOKENS) for _ in range(HONEST)]
            answers = []
            for contestant in rotated(order, turn):
                told = _besiege(engine, contestant, honest, hostile, running + 2)
                answers.append(told["answers"])
                if turn >= _STORM_WARM_ROUNDS:
                    found[contestant].append((mean(told["seconds"]), told["own"]))
                    rates[contestant.every].append(told["hostile"] / told["whole"])
            assert all(each == answers[0] for each in answers), "answers differ"
        _tell(report, f"storm, honest prompts {case}", found, rates)
    counted = engine.facts()["chain"]["prefetch"]
    for name in ("arrived", "used", "wasted", "cancelled"):
        report.add(f"storm: blocks {name}", counted[name][1], "")


def _besiege(
    engine: Engine,
    storm: Storm,
    honest: list[list[int]],
    hostile: list[list[int]],
    at_once: int,
) -> dict[str, Any]:
    engine.settle()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    engine.prefetch(on=storm.prefetching)
    told: dict[str, Any] = engine.besieged(
        honest=honest,
        hostile=hostile if storm.every else [],
        tokens=HONEST_TOKENS,
        life=LIFE_STEPS,
        priority=1,
        at_once=at_once,
        every=storm.every,
    )
    return told


def _tell(report: Report, what: str, found: _Figures, rates: dict[int, list[float]]) -> None:
    for contestant, figures in found.items():
        middle = median(seconds for seconds, _ in figures)
        report.add(f"{what}: {contestant}, mean time of a request", middle, "s")
    for every in filter(None, rates):
        report.add(f"{what}: every {every}: hostile requests", median(rates[every]), "/s")
    for ours in filter(lambda each: each.every and each.prefetching, found):
        for other in (ours._replace(prefetching=False), _QUIET):
            for at, name in enumerate(("time of a request", "processor's time of the engine")):
                if other in found:
                    both = ([each[at] for each in found[who]] for who in (ours, other))
                    ratio = median_ratio(*both)
                    report.at_most(f"{what}: {name}, {ours} / {other}", ratio, "x", AT_MOST)


QUEUED = int(os.environ.get("QUEUED", "32"))
TOKENS = int(os.environ.get("TOKENS", "1044"))
UNSEEN_TOKENS = int(os.environ.get("UNSEEN_TOKENS", "192"))
LAYERS = int(os.environ.get("LAYERS", "16"))
HIDDEN = int(os.environ.get("HIDDEN", "256"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
CASES = os.environ.get("CASES", "disk unseen store storm").split()
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

    def engine(self, tier: dict[str, Any], **more: Any) -> Engine:
        """With this tier below CPU memory."""
        cpu = self.cpu("2GiB", name=tier["kind"])
        stack = self.stack(cpu, tier, prefetch={"memory": 0.5})
        return self.start(stack, TOKENS + 1024, max_num_seqs=RUNNING, **more)

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
            ratio = median_ratio(*([each[at] for each in found[who]] for who in (_ON, _OFF)))
            self.report.at_most(f"{case}: {name}, ratio", ratio, "x", GAIN if rate else LOSS)
        ratio = median_ratio(*([each[2] for each in found[who]] for who in (_ON, _OFF)))
        self.report.at_most(f"{case}: processor's time of the engine, ratio", ratio, "x", LOSS)
        for contestant in (_ON, _OFF) if rate else ():
            self.report.add(f"{case}: {contestant}, share loaded", mean(shares[contestant]), "")
        counted = engine.facts()["chain"]["prefetch"]
        for name in ("arrived", "used", "wasted", "cancelled"):
            self.report.add(f"{case}: blocks {name}", counted[name][1], "")


def empty(folder: Path) -> None:
    """The memory of an engine that is gone, for the next one."""
    for left in folder.iterdir():
        shutil.rmtree(left)


def main() -> None:
    with folders() as (folder, region), ExitStack() as stack:
        bench = Bench(folder, region)
        throttle(folder, DISK_BYTES)
        nvme = bench.nvme("16GiB")
        first = {"disk": DISK_BYTES, "unseen": None}
        if not first.keys().isdisjoint(CASES):
            with bench.engine(nvme) as engine:
                for case, rate in first.items():
                    if case in CASES:
                        bench.compare(engine, case, rate)
        empty(region)
        if "storm" in CASES:
            with bench.engine(nvme, scheduling_policy="priority") as engine:
                compare_storm(bench, bench.report, engine, TOKENS, ROUNDS, RUNNING)
            empty(region)
        if "store" in CASES:
            compare_store(bench, folder, stack)
        bench.report.finish()


class SlowWay(StallingProxy):
    """To a server: so long for each request, and so many bytes a second of all answers."""

    def __init__(self, target: str, seconds: float, bytes_a_second: float) -> None:
        self._seconds = seconds
        self._rate = Rate(bytes_a_second)
        super().__init__(target)

    def hold(self, data: bytes, *, asked: bool) -> None:
        if asked:
            time.sleep(self._seconds)
        else:
            self._rate.take(len(data))


def compare_store(bench: Bench, folder: Path, stack: ExitStack) -> None:
    """The same with an S3 server on a way that takes time."""
    server = stack.enter_context(bucket_server(folder))
    way = SlowWay(f"127.0.0.1:{server.port}", STORE_SECONDS, STORE_BYTES)
    stack.callback(way.close)
    store = {"kind": "object", "url": "s3://bucket/kv", "capacity": "16GiB"}
    with bench.engine(store | {"endpoint": f"http://{way.address}"}) as engine:
        bench.compare(engine, "store", STORE_BYTES)


if __name__ == "__main__":
    main()
