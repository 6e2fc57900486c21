"""What `benchmarks.serve` asks a server, by vLLM's own clients."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.trace import PART, TRACE, conversations
from benchmarks.eviction.workloads import paces
from benchmarks.serve.clients import Clients, Result
from benchmarks.serve.scale import (
    BLOCK,
    CHATS,
    DECODED,
    LONGEST,
    OWN,
    PREFIX,
    SUFFIX,
    THIRTY_USERS,
    Chats,
)
from kvtier.cli.trace_simulation import Request, read_trace
from kvtier.vllm.server_process import Server

REQUESTS = int(os.environ.get("REQUESTS", "200"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
_PACE_PROMPTS = 6


class Workloads:
    """Each method asks what belongs to a seed, and says how that went."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = str(model)
        self._clients = Clients(folder, model)

    def prefix_repetition(self, server: Server, seed: int) -> Result:
        """Twice as many prefixes as the engine's own cache holds, four requests of each."""
        prefixes = 2 * OWN // (PREFIX + SUFFIX)
        options = ["--prefix-repetition-prefix-len", str(PREFIX)]
        options += ["--prefix-repetition-suffix-len", str(SUFFIX), "--max-concurrency", "8"]
        options += ["--prefix-repetition-num-prefixes", str(prefixes)]
        options += ["--prefix-repetition-output-len", str(DECODED), "--ignore-eos"]
        name = "prefix_repetition"
        return self._clients.bench(server.url, 4 * prefixes, name, seed, *options)

    def timed_trace(self, server: Server, seed: int) -> Result:
        """A slice of the trace for each seed."""
        path = self._folder / f"trace-{seed}.jsonl"
        if not path.exists():
            requests = read_trace(Path(TRACE)) if TRACE else paces()
            chosen = conversations(requests, REQUESTS * (ROUNDS + 1))
            chosen = chosen[seed * REQUESTS : (seed + 1) * REQUESTS]
            _write_trace(path, chosen, self._pace(server, chosen))
        options = ["--dataset-path", str(path), "--timed-trace-sec-multiplier", "0.001"]
        options += ["--timed-trace-chunk-hash-size", str(BLOCK)]
        count = len(path.read_text().splitlines())
        return self._clients.bench(server.url, count, "timed_trace", seed, *options)

    def chats(self, server: Server, seed: int) -> Result:
        """More of them than the engine's own cache holds."""
        return self._chats(server, seed, CHATS)

    def thirty_users(self, server: Server, seed: int) -> Result:
        """Chats that all go on at the same time."""
        return self._chats(server, seed, THIRTY_USERS)

    def _chats(self, server: Server, seed: int, sizes: Chats) -> Result:
        return self._clients.chat(
            server.url,
            sizes.chats,
            sizes.users,
            seed,
            turns=sizes.turns,
            first=sizes.first,
            more=sizes.more,
            said=DECODED,
        )

    def _pace(self, server: Server, requests: Sequence[Request]) -> float:
        """Seconds of the replay for each of the trace's, so that computing takes PART of them."""
        tokens = sum(_length(request) for request in requests)
        dice = random.Random(len(requests))
        length = tokens // len(requests)
        fresh = [dice.choices(range(256), k=length) for _ in range(_PACE_PROMPTS)]
        begin = time.perf_counter()
        for each in fresh:
            server.complete(self._model, each, DECODED)
        a_token = (time.perf_counter() - begin) / sum(map(len, fresh))
        return tokens * a_token / PART / (requests[-1].time - requests[0].time)


def _length(request: Request) -> int:
    return min(len(request.blocks) * BLOCK, LONGEST - 2 * DECODED)


def _write_trace(path: Path, requests: Sequence[Request], pace: float) -> None:
    with path.open("w") as file:
        for request in requests:
            line = {
                "timestamp": round((request.time - requests[0].time) * pace * 1000),
                "input_length": _length(request),
                "output_length": DECODED,
                "hash_ids": [int(block) for block in request.blocks],
            }
            file.write(json.dumps(line) + "\n")
