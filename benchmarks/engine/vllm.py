"""vLLM with and without kvtier: first tokens, decoding, and what the scheduler spends.

    make bench-vllm      # TOKENS=8192 LAYERS=16 HIDDEN=1024 ROUNDS=5 PAIRS=12 STEPS=96
    make bench-vllm ONLY=decoding,scheduler JSON=figures.json
    make bench-vllm DTYPE=float32      # the default where the processor has no bfloat16

Both engines live at the same time and take turns, so that a noisy machine is noisy for both. Where
a few per cent are in question, neighbouring turns are compared pair by pair, and the figure is the
median of these ratios with the interval that holds the true one in 19 of 20 cases.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from engines.engine import Engine

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.report import Report

TOKENS = int(os.environ.get("TOKENS", "8192"))
LAYERS = int(os.environ.get("LAYERS", "16"))
HIDDEN = int(os.environ.get("HIDDEN", "1024"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
PAIRS = int(os.environ.get("PAIRS", "12"))
STEPS = int(os.environ.get("STEPS", "96"))
PARTS = ("scheduler", "decoding", "first_tokens")
ONLY = os.environ.get("ONLY", ",".join(PARTS)).split(",")
_PIECE = 4 << 20
_THREADS = 8
_SCHEDULER_ROUNDS = 3
_MANY, _MANY_TOKENS = 192, 24


class Bench(Served):
    """Engines with and without the stack."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"vLLM, {DTYPE}, {LAYERS} layers, hidden {HIDDEN}, {TOKENS} tokens")

    def engine(self, *, kept: bool) -> Engine:
        """An engine; `kept`: with the stack."""
        stack = self.stack(self.cpu("2GiB"), self.nvme("4GiB"))
        return self.start(stack if kept else None, TOKENS)


def main() -> None:
    with folders() as (folder, region):
        bench = Bench(folder, region)
        with bench.engine(kept=False) as plain, bench.engine(kept=True) as kept:
            for engine in (plain, kept):
                engine.first_token(prompt=bench.prompt(600))
            if "scheduler" in ONLY:
                scheduler(bench, kept)
            if "decoding" in ONLY:
                decoding(bench, plain, kept)
            if "first_tokens" in ONLY:
                prompt, cold = first_tokens(bench, plain, kept)
        if "first_tokens" in ONLY:
            after_restart(bench, prompt, cold)
        bench.report.finish()


def scheduler(bench: Bench, kept: Engine) -> None:
    """32 requests: what the scheduler's calls into kvtier cost each step; after a first 32, which
    find code and memory cold and are told apart."""
    runs = []
    for _ in range(1 + _SCHEDULER_ROUNDS):
        prompts = [bench.prompt(300) for _ in range(32)]
        runs.append(kept.scheduler_seconds(prompts=prompts, tokens=64))
        kept.settle()
    first = [clock * 1e6 for clock, _ in runs[0]]
    spent = [step for run in runs[1:] for step in run]
    clock, processor = (np.array(each) * 1e6 for each in zip(*spent, strict=True))
    report = bench.report
    report.add("scheduler, mean of a step, the first 32 requests", mean(first), "us")
    report.at_most("scheduler, mean of a step, 32 requests", float(clock.mean()), "us", 200)
    report.add("scheduler, median of a step", float(np.median(clock)), "us")
    report.add("scheduler, 99 of 100 steps", float(np.percentile(clock, 99)), "us")
    report.add("scheduler, processor time, mean", float(processor.mean()), "us")
    report.add("scheduler, processor time, 99 of 100", float(np.percentile(processor, 99)), "us")
    prompts = [bench.prompt(32) for _ in range(_MANY)]
    steps = kept.connector_seconds(prompts=prompts, tokens=_MANY_TOKENS)[-_MANY_TOKENS // 2 :]
    kept.settle()
    spent_in = median(clock * 1e6 for clock, _ in steps)
    report.add(f"connector, median of a step in which {_MANY} requests decode", spent_in, "us")


def decoding(bench: Bench, plain: Engine, kept: Engine) -> None:
    """Prompts, then decoding while their blocks are stored behind.

    Two engines differ by up to ten per cent from start to start, by where their memory happens to
    lie. So there is a third contestant: the engine with kvtier, asked not to store.
    """
    found: dict[str, list[dict[str, float]]] = {"plain": [], "idle": [], "kept": []}
    turns = [("plain", plain), ("idle", kept), ("kept", kept)]
    for _ in range(PAIRS):
        turns.reverse()
        for name, engine in turns:
            prompts = [bench.prompt(512) for _ in range(8)]
            stored = name == "kept"
            found[name].append(engine.decode(prompts=prompts, tokens=STEPS, stored=stored))
            kept.settle()  # what is stored behind shall not be another turn's burden
    report = bench.report
    for what, text, unit, scale, target in (
        ("step", "decode step", "ms", 1e3, 1.02),
        ("prefill", "prefill of 8 x 512", "s", 1, 1.03),
    ):
        without = [each[what] for each in found["plain"]]
        report.add(f"{text} without kvtier", median(without) * scale, unit)
        for other, whom in (("plain", "the engine without"), ("idle", "itself, not storing")):
            ratios = paired(found, what, other)
            report.at_most(f"{text}, against {whom}", median(ratios), "x", target)
            low, high = confidence(ratios)
            report.add(f"{text}, against {whom}, from", low, "x")
            report.add(f"{text}, against {whom}, to", high, "x")
            own = median(paired(found, f"{what}_own", other))
            report.add(f"{text}, against {whom}, its thread's time", own, "x")
        report.add(
            f"{text}, processor time of all threads", median(paired(found, f"{what}_all")), "x"
        )


def paired(found: dict[str, list[dict[str, float]]], what: str, other: str = "idle") -> list[float]:
    """With stores against another contestant, turn by turn, sorted."""
    turns = zip(found[other], found["kept"], strict=True)
    return sorted(kept[what] / without[what] for without, kept in turns)


def confidence(values: list[float]) -> tuple[float, float]:
    """Two of these sorted values between which the median lies in 19 of 20 cases."""
    count, tail, chance = len(values), 0, 0.5 ** len(values)
    while chance + math.comb(count, tail + 1) * 0.5**count <= 0.025 and 2 * tail + 2 < count:
        tail += 1
        chance += math.comb(count, tail) * 0.5**count
    return values[tail], values[-1 - tail]


def first_tokens(bench: Bench, plain: Engine, kept: Engine) -> tuple[list[int], float]:
    """One long prompt, from wherever it may be."""
    report = bench.report
    prompt = bench.prompt(TOKENS + 1)  # all but the last can be known
    without = plain.first_token(prompt=prompt)["seconds"]
    cold = kept.first_token(prompt=prompt)["seconds"]
    kept.settle()
    kept.touch_cache()
    near = _median(lambda: _warm(kept, prompt))
    report.add("first token without kvtier", without, "s")
    report.add("first token, cold", cold, "s")
    report.add("first token, engine's own cache", near, "s")

    copies, reads, cpu, nvme = [], [], [], []
    size = int(kept.loaded_bytes(tokens=TOKENS))
    file = bench.folder / "plain"
    file.write_bytes(os.urandom(_PIECE) * -(-size // _PIECE))
    os.sync()
    for _ in range(ROUNDS):
        copies.append(copy_seconds(size))
        kept.forget_engine_cache()
        cpu.append(_warm(kept, prompt))
        reads.append(read_seconds(file))
        kept.forget_engine_cache()
        kept.clear(tier=0)
        nvme.append(_warm(kept, prompt))
    file.unlink()
    report.add("first token, CPU", median(cpu), "s")
    report.add("first token, NVMe", median(nvme), "s")
    plain_copy, plain_read = median(copies), median(reads)
    report.add(f"plain copy of {size >> 20} MiB", plain_copy, "s")
    report.add("plain read of as much", plain_read, "s")
    report.at_most("load from CPU, against copy", (median(cpu) - near) / plain_copy, "x", 1.3)
    report.at_most(
        "load from NVMe, against read + copy",
        (median(nvme) - near) / (plain_read + plain_copy),
        "x",
        1.5,
    )
    return prompt, cold


def after_restart(bench: Bench, prompt: list[int], cold: float) -> None:
    """The engines were killed; the first request of a new one, shared memory kept and lost."""
    for name, lost in (("kill -9", False), ("reboot", True)):
        if lost:
            for path in bench.region.iterdir():
                shutil.rmtree(path)
        with bench.engine(kept=True) as engine:
            engine.first_token(prompt=bench.prompt(600))
            seconds = _warm(engine, prompt)
        bench.report.add(f"first token, after {name}", seconds, "s")
        bench.report.at_least(f"faster than cold, after {name}", cold / seconds, "x", 20)


def _warm(engine: Engine, prompt: list[int]) -> float:
    found = engine.first_token(prompt=prompt)
    assert found["cached"] >= len(prompt) - 512, f"only {found['cached']} tokens were found"
    return float(found["seconds"])


def _median(run: Callable[[], float]) -> float:
    return median([run() for _ in range(ROUNDS)])


def copy_seconds(size: int) -> float:
    """A plain copy from one piece of memory to another, both touched before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    begin = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin


def read_seconds(path: Path) -> float:
    """A plain read of a file around the page cache, with as many threads as the tier has."""
    size = path.stat().st_size
    target = mmap.mmap(-1, size)
    np.frombuffer(target, np.uint8)[:] = 0
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    view = memoryview(target)

    def read(at: int) -> Any:
        return os.preadv(fd, [view[at : at + _PIECE]], at)

    begin = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, range(0, size, _PIECE)))
    seconds = time.perf_counter() - begin
    os.close(fd)
    return seconds


if __name__ == "__main__":
    main()
