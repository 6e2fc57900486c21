"""Prompts that lie in a Mooncake pool while it fails: the first token of each, beside computing it.

    make bench-pool  # TOKENS=2048 STEP_S=2 ROUNDS=5 CASES="well stalls stops amid owner full ..."

Two engines with stacks of their own, and no disk, share the memory of a pool on this machine. One
computes prompts, and the other has found and loaded each of them once. Then something happens to
the pool: the way to its master stalls, who lends the memory stands still, at once or amid the first
load, the master or the owner is killed; or from the beginning there is memory for a few blocks. The
other is asked for the prompts again, in turns with prompts that nobody has seen and that are not
stored. Nothing is waited for in between, so that the first requests meet what nobody knows yet. In
the end all is well again, and prompts are asked for until they come from the pool.

The model is small, and a step of its engines that computes a prompt takes STEP_S longer, as with a
large model on a device of its own. What kvtier costs is what a request waits before it is computed;
all else that lies between first tokens is the processors', which others use, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from engines.engine import Engine
from support.processes.mooncake_pool import MooncakePool, StallingProxy

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.report import Report

TOKENS = int(os.environ.get("TOKENS", "2048"))
LAYERS = int(os.environ.get("LAYERS", "8"))
HIDDEN = int(os.environ.get("HIDDEN", "128"))
CHUNK = int(os.environ.get("CHUNK", "64"))
STEP_S = float(os.environ.get("STEP_S", "2"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
CASES = os.environ.get("CASES", "well stalls stops amid master owner full").split()
AT_MOST = 1.1
SLICES = int(os.environ.get("SLICES", "3"))
RUNS_S, RESTS_S = 0.003, 0.03
_NOT_STORED = {"max_offload_tokens": 0}
_RECOVERS_S = 120.0


class Bench(Served):
    """Two engines, and a pool that both reach by way of a proxy."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self.report = Report(f"prompts of {TOKENS} tokens in a pool, {DTYPE}")

    def run(self, case: str) -> None:
        """One case, with processes of its own."""
        with ExitStack() as opened:
            lent = (16 if case == "full" else 2048) << 20
            self.pool = MooncakePool(self.folder, lent)
            opened.callback(self.pool.close)
            self.proxy = StallingProxy(self.pool.address)
            opened.callback(self.proxy.close)
            self.stores, self.asks = (opened.enter_context(self.engine(at)) for at in "ab")
            for engine in (self.stores, self.asks):
                engine.slow_prefill(pause=STEP_S)
            known = [self.prompt(TOKENS + 1) for _ in range(ROUNDS)]
            for prompt in [self.prompt(TOKENS + 1), *known]:
                self.stored(prompt)
            self.asks.clear(tier=0)
            self.asks.forget_engine_cache()
            fault, mended = self.faults()[case]
            fault()
            self.compare(case, known)
            mended()
            if case not in ("well", "full"):
                self.recovers(case)

    def engine(self, name: str) -> Engine:
        (region := self.region / name).mkdir(exist_ok=True)
        cpu = self.cpu("1GiB") | {"path": str(region)}
        pool = {"kind": "mooncake", "master": self.proxy.address, "capacity": "2GiB"}
        return self.start(self.stack(cpu, pool) | {"chunk_tokens": CHUNK}, TOKENS)

    def stored(self, prompt: list[int]) -> int:
        """How much of it the one finds after the other has computed it."""
        self.stores.first_token(prompt=prompt)
        self.stores.settle()
        self.stores.clear(tier=0)
        self.computed()
        found: int = self.asks.first_token(prompt=prompt)["cached"]
        self.asks.settle()
        return found

    def computed(self) -> float:
        """Seconds to the first token of a prompt that nobody has seen."""
        prompt = self.prompt(TOKENS + 1)
        seconds: float = self.asks.first_token(prompt=prompt, said=_NOT_STORED)["seconds"]
        return seconds

    def faults(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """What happens to the pool, and how that ends."""
        pool, proxy = self.pool, self.proxy

        def tell_owner(what: signal.Signals) -> Callable[[], None]:
            return lambda: os.kill(pool.owner.pid, what)

        return {
            "well": (lambda: None, lambda: None),
            "full": (lambda: None, lambda: None),
            "stalls": (proxy.stall, proxy.flow),
            "stops": (tell_owner(signal.SIGSTOP), tell_owner(signal.SIGCONT)),
            "amid": (self.stop_amid_load, tell_owner(signal.SIGCONT)),
            "master": (pool.kill_master, pool.restart_master),
            "owner": (pool.kill_owner, pool.start_owner),
        }

    def stop_amid_load(self) -> None:
        """Let who lends the memory run for a moment now and then, and then no more."""
        owner = self.pool.owner.pid

        def slow_down() -> None:
            for _ in range(SLICES):
                os.kill(owner, signal.SIGCONT)
                time.sleep(RUNS_S)
                os.kill(owner, signal.SIGSTOP)
                time.sleep(RESTS_S)

        os.kill(owner, signal.SIGSTOP)
        threading.Thread(target=slow_down).start()

    def compare(self, case: str, known: list[list[int]]) -> None:
        """Ask for all of these, in turns with others."""
        asked: list[dict[str, Any]] = []
        computed = []
        for prompt in known:
            asked.append(self.asks.wait_and_first_token(prompt=prompt))
            computed.append(self.computed())
        waited, computing = [each["waited"] / median(computed) for each in asked], median(computed)
        print(f"  {case}: {asked} beside {computed}")
        self.report.add(f"{case}: computed", computing, "s")
        seconds = median(each["seconds"] for each in asked)
        self.report.at_most(f"{case}: asked", seconds / computing, "x", AT_MOST)
        self.report.at_most(f"{case}: the first waited", waited[0], "x", AT_MOST - 1)
        self.report.at_most(
            f"{case}: others waited at most", max(waited[1:], default=0), "x", AT_MOST - 1
        )
        share = sum(each["cached"] for each in asked) / TOKENS / len(asked)
        self.report.add(f"{case}: share loaded", share, "")
        self.report.add(f"{case}: of the first", asked[0]["cached"] / TOKENS, "")

    def recovers(self, case: str) -> None:
        """Seconds until what is stored is found again."""
        begin = time.monotonic()
        while not self.stored(self.prompt(TOKENS + 1)):
            if time.monotonic() > begin + _RECOVERS_S:
                break
        self.report.add(f"{case}: found again after", time.monotonic() - begin, "s")


def main() -> None:
    with folders() as (folder, region):
        bench = Bench(folder, region)
        for case in CASES:
            bench.run(case)
        bench.report.finish()


if __name__ == "__main__":
    main()
