"""What the reasons for misses cost the engine's scheduler, for one prompt of 100k tokens.

The chain has chunks of 256 tokens, and nothing of the prompt. Measured are the look into why all of
it missed, once a request, the longest step after that, which hashes a piece of it, and remembering
64 evicted blocks.

    python -m benchmarks.chain              JSON=result.json python -m benchmarks.chain
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.report import Report
from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.chain.tier_chain import TierChain
from kvtier.types import BlockKey, Fate, Namespace, block_key
from kvtier.vllm.misses import PromptFacts, RequestMisses
from kvtier.vllm.requests import Column, RequestState

TOKENS, CHUNK = 100_000, 256
BLOCKS = -(-TOKENS // CHUNK)
NAMESPACE = Namespace(facts={"model": "benchmark"}, group_bytes=(4096,))


def prompt(number: int) -> list[BlockKey]:
    """The keys of one prompt."""
    return [
        block_key(hashlib.sha256(f"{number}/{index}".encode()).digest()) for index in range(BLOCKS)
    ]


def explaining(chain: TierChain, rounds: int) -> tuple[float, float, float]:
    """Microseconds to begin to explain a miss of a whole prompt, in the longest step after that,
    and to note what became of 64 blocks."""
    misses = RequestMisses(chain, NAMESPACE, lambda _keys: None)
    explained, stepped, noted = [], [], []
    for number in range(rounds):
        keys, tokens = prompt(number), [number + at for at in range(TOKENS)]
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
    began, step, note = (median(each) * 1e6 for each in (explained, stepped, noted))
    return began, step, note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="kvtier-chain-") as folder:
        tiers: list[dict[str, object]] = [
            {"kind": "cpu", "path": folder, "capacity": "25MiB", "persistence": "discard"},
            {"kind": "nvme", "path": str(Path(folder) / "nvme"), "capacity": "98MiB"},
        ]
        config = {"version": 1, "tiers": tiers, "mover": {"mode": "threads"}}
        with Stack.open(config, NAMESPACE, serving=True) as stack:
            explained, stepped, noted = explaining(stack.chain, rounds)
    report = Report(f"a prompt of {TOKENS} tokens in chunks of {CHUNK}, of which nothing is found")
    report.add("a miss of all of it, looked into", explained, "us")
    report.add("its prompt, hashed: the longest step", stepped, "us")
    report.add("64 evicted blocks, remembered", noted, "us")
    report.finish()


if __name__ == "__main__":
    main()
