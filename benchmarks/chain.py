"""What a chain costs the engine's scheduler for one prompt of 100k tokens in chunks of 256.

Measured per call, with the tiers that are named on the left and a mover that carries nothing out:
the blocks are where they are, and only their bookkeeping counts. Lookup, plan and prepare together
(`lookup`, `worth` and `begin_load`) shall stay under one millisecond. Beside that, what it takes to
look into why all of such a prompt missed, once a request, what the longest step after that takes to
hash a piece of it, and to remember 64 evicted blocks.

    python -m benchmarks.chain              JSON=result.json python -m benchmarks.chain
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Report
from kvtier.chain.context import ChainContext
from kvtier.chain.hits import Shape
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.interfaces.backend import TierContext, backend
from kvtier.interfaces.mover import Mover, MoverStats, Transfer, TransferResult
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, Persistence, TierSettings, WritePolicy
from kvtier.types import BlockKey, Fate, Namespace, Outcome, Presence, block_key
from kvtier.vllm.misses import PromptFacts, RequestMisses
from kvtier.vllm.requests import Column, RequestState

TOKENS, CHUNK = 100_000, 256
BLOCKS = -(-TOKENS // CHUNK)
NAMESPACE = Namespace(facts={"model": "benchmark"}, group_bytes=(4096,))
TARGET_US = 1000.0
WARM_UP = 3
OTHERS = 8
"""Further prompts that fill host memory, so that a promotion has to evict."""


class NullMover(Mover):
    """Says at once that all has been moved."""

    def __init__(self) -> None:
        self._results: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> bool:
        outcomes = [Outcome.OK] * len(transfer.keys)
        self._results.append(
            TransferResult(
                id=transfer.id, outcomes=outcomes, bytes_moved=0, seconds=1e-3, busy_seconds=1e-3
            )
        )
        return True

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, seconds: float) -> bool:
        return bool(self._results)

    def cancel(self, ids: Sequence[int]) -> None:
        pass

    def stats(self) -> MoverStats:
        return MoverStats()

    def close(self) -> None:
        pass


def prompt(number: int) -> list[BlockKey]:
    """The keys of one prompt."""
    return [
        block_key(hashlib.sha256(f"{number}/{index}".encode()).digest()) for index in range(BLOCKS)
    ]


def open_tiers(kinds: Sequence[str], folder: Path) -> list[tuple[Tier, TierSettings]]:
    """Host memory for a few prompts, below it room for many."""
    found = []
    for level, kind in enumerate(kinds):
        blocks = (OTHERS if level == 0 else 4 * OTHERS) * BLOCKS
        fields: dict[str, object] = {"capacity": Capacity(size=ByteSize(blocks * slot_bytes()))}
        if kind == "nvme":
            fields["path"] = str(folder / f"tier{level}")
        else:
            fields["name"] = f"benchmark{level}"
        if kind == "cpu":
            fields["persistence"] = Persistence.DISCARD
        opener = backend(kind)
        settings = opener.settings(**fields)
        context = TierContext(NAMESPACE, f"benchmark-{os.getpid()}")
        tier = opener.open_tier(settings, context)  # which makes no slabs where it only reads
        found.append((tier, msgspec.structs.replace(settings, write=WritePolicy.NEVER)))
    return found


def slot_bytes() -> int:
    return record_bytes(NAMESPACE.payload_bytes)


def fill(tier: Tier, keys: Sequence[BlockKey]) -> None:
    taken = tier.prepare_store(keys)
    tier.complete_store(taken.keys)


class Bench:
    """One stack; each round times the steps of one request."""

    def __init__(self, kinds: Sequence[str], folder: Path) -> None:
        self.name = " + ".join(kinds)
        opened = open_tiers(kinds, folder)
        self.tiers = [tier for tier, _ in opened]
        costs = CostModel()
        costs.observe_prefill(8192, 4.0)
        rules = [rule for _, rule in opened]
        self.chain = TierChain(ChainContext(self.tiers, rules, NullMover(), NAMESPACE, costs))
        self.samples: dict[tuple[str, str], list[float]] = {}

    def round(self, case: str, keys: list[BlockKey]) -> None:
        """One request: asked for, taken in, landed, ended."""
        chain = self.chain
        marks = [time.perf_counter()]
        count = chain.match_prefix(keys, CHUNK)
        marks.append(time.perf_counter())
        found = chain.lookup(keys)
        marks.append(time.perf_counter())
        ticket = chain.begin_load(keys, "request", float("inf"))
        marks.append(time.perf_counter())
        chain.poll()
        marks.append(time.perf_counter())
        chain.end_load(ticket)
        marks.append(time.perf_counter())
        self._take_events()
        assert count == found.count(Presence.HIT) == len(ticket.keys) == len(keys)
        took = [stop - start for start, stop in itertools.pairwise(marks)]
        for step, seconds in zip(STEPS, [*took[:3], sum(took[:3]), *took[3:]], strict=True):
            self._add(case, step, seconds)

    def _add(self, case: str, step: str, seconds: float) -> None:
        self.samples.setdefault((case, step), []).append(seconds * 1e6)

    def prepare(self, case: str, number: int) -> list[BlockKey]:
        """A prompt that is where the case says, in a host memory that is full."""
        keys = prompt(number)
        host, below = self.tiers[0], self.tiers[1]
        fill(below, keys)
        for other in range(OTHERS):
            fill(host, prompt(10**6 + other))
        if case == "all in host memory":
            fill(host, keys)
        elif case == "tail in the tier below":
            fill(host, keys[: BLOCKS // 2])
        elif case == "every other block below":
            fill(host, keys[::2])
        self.chain.poll()
        self._take_events()
        return keys

    def _take_events(self) -> None:
        for tier in self.tiers:
            tier.take_events()


def explaining(chain: TierChain, rounds: int) -> tuple[float, float, float]:
    """Microseconds to begin to explain a miss of a whole prompt, in the longest step after that,
    and to note what became of 64 blocks."""
    misses = RequestMisses(chain, NAMESPACE, lambda _keys: None)
    explained, stepped, noted = [], [], []
    for number in range(rounds):
        keys, tokens = prompt(-1 - number), [number + at for at in range(TOKENS)]
        state = RequestState(limit=TOKENS, hits=set(), columns=[Column(0, [], keys)])
        marks = [time.perf_counter()]
        misses.explain("request", state, {0: Shape(CHUNK)}, 0, PromptFacts(TOKENS, tokens), b"")
        marks.append(time.perf_counter())
        while misses.pending:
            misses.step(0)
            marks.append(time.perf_counter())
        chain.misses.note(0, keys[:64], Fate.FOR_STORE)
        noted.append(time.perf_counter() - marks[-1])
        explained.append(marks[1] - marks[0])
        stepped.append(max(end - start for start, end in itertools.pairwise(marks[1:])))
    began, step, note = (statistics.median(each) * 1e6 for each in (explained, stepped, noted))
    return began, step, note


CASES = (
    "all in host memory",
    "all in the tier below",
    "tail in the tier below",
    "every other block below",
)
STEPS = ("worth", "lookup", "begin_load", "total", "poll after", "end_load")


def main() -> None:
    """Interleave stacks and cases; print a table of the steps, and report their sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--stacks", nargs="+", default=["memory,memory", "cpu,nvme"])
    arguments = parser.parse_args()
    rounds = arguments.rounds
    stacks = [stack.split(",") for stack in arguments.stacks]
    with tempfile.TemporaryDirectory(prefix="kvtier-chain-") as folder:
        benches = [Bench(kinds, Path(folder)) for kinds in stacks]
        explained, stepped, noted = explaining(benches[-1].chain, rounds)
        try:
            for number in range(rounds):
                for case in CASES:
                    for bench in benches:
                        keys = bench.prepare(case, number * len(CASES) + CASES.index(case))
                        gc.collect()
                        bench.round(case, keys)
        finally:
            for bench in benches:
                bench.chain.close()
        print(f"{BLOCKS} blocks: {TOKENS} tokens in chunks of {CHUNK}; median us over {rounds}")
        print(f"{'stack':<16} {'case':<26}" + "".join(f"{step:>12}" for step in STEPS))
        totals = {}
        for bench in benches:
            for case in CASES:
                row = [statistics.median(bench.samples[case, step][WARM_UP:]) for step in STEPS]
                print(f"{bench.name:<16} {case:<26}" + "".join(f"{value:12.0f}" for value in row))
                totals[f"{bench.name}, {case}"] = row[STEPS.index("total")]
        report = Report("lookup, plan and prepare together")
        for name, total in totals.items():
            report.at_most(name, total, "us", TARGET_US)
        report.add("a miss of all of it, looked into", explained, "us")
        report.add("its prompt, hashed: the longest step", stepped, "us")
        report.add("64 evicted blocks, remembered", noted, "us")
        report.finish()


if __name__ == "__main__":
    main()
