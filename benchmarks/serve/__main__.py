"""vLLM's own benchmark clients against two servers: without a connector, and with kvtier.

    make bench-serve       # ONLY=prefix_repetition,timed_trace TRACE=requests.jsonl ROUNDS=3
    make bench-serve MULTI_TURN=vllm/benchmarks/multi_turn      # chats, too: vLLM's script is there

Both live at the same time and are asked the same in turns, and each round brings requests that
nobody has seen. (vLLM's own offloading does not run on a CPU.) The workloads:

- `prefix_repetition`: vLLM sends a prefix's requests back to back, so that they find each other in
  the engine's own cache. It runs twice: the second time the prefixes have left that cache.
- `timed_trace`: requests when a trace says, as in `make bench-trace`, whose PART it takes.
- `chats`: more chats than the engine's own cache holds, each with a long first message.
- `thirty_users`: thirty users with twenty turns each, and CPU memory for a quarter of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.measure import rotated
from benchmarks.report import Report
from benchmarks.serve.clients import MULTI_TURN, Result
from benchmarks.serve.scale import (
    BLOCK,
    DECODED,
    HIDDEN,
    LAYERS,
    LONGEST,
    MEMORY,
    OWN,
    STEP,
    THIRTY_USERS,
)
from benchmarks.serve.workloads import ROUNDS, Workloads
from kvtier.vllm.server_process import Server

WITHOUT, KVTIER = "without", "kvtier"
ALL = ("prefix_repetition", "timed_trace", "chats", "thirty_users")
WORKLOADS = tuple(os.environ.get("ONLY", ",".join(ALL if MULTI_TURN else ALL[:2])).split(","))
_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
}


class Bench:
    """Servers, in turns."""

    def __init__(self, folder: Path, region: Path) -> None:
        self._served = Served(folder, region, LAYERS, HIDDEN)
        self._workloads = Workloads(folder, self._served.model)
        self.report = Report(f"vLLM's own clients, {LAYERS} layers of {HIDDEN}, {DTYPE}")

    def compare(self, workload: str) -> None:
        """All rounds of one workload."""
        ask: Callable[[Server, int], Result] = getattr(self._workloads, workload)
        tokens = MEMORY
        if workload == "thirty_users":
            users = THIRTY_USERS
            tokens = users.chats * (users.first + users.turns * (users.more + DECODED)) // 4
        found = defaultdict[str, list[Result]](list)

        def turn(servers: list[tuple[str, Server]], seed: int) -> None:
            for again in range(2 if workload == "prefix_repetition" else 1):
                label = f"{workload}, again" if again else workload
                for name, server in servers:
                    result = ask(server, seed)
                    print(f"    {label}, round {seed}, {name}: {result}", flush=True)
                    if seed:  # the first one warms up
                        found[f"{label}; {name}"].append(result)

        with self._server(WITHOUT, tokens) as plain, self._server(KVTIER, tokens) as kept:
            for seed in range(ROUNDS + 1):
                turn(rotated([(WITHOUT, plain), (KVTIER, kept)], seed), seed)
        self._tell(found)

    def _server(self, name: str, memory_tokens: int) -> Server:
        """One of the contestants, with so much CPU memory for its cache."""
        served = self._served
        cpu, nvme = served.cpu(memory_tokens * served.token_bytes), served.nvme("16GiB")
        stack = served.folder / "stack.yaml"
        stack.write_text(json.dumps(served.stack(cpu, nvme)))
        flags = ["--dtype", DTYPE, "--max-model-len", str(LONGEST)]
        flags += ["--block-size", str(BLOCK), "--max-num-batched-tokens", str(STEP)]
        flags += ["--num-gpu-blocks-override", str(OWN // BLOCK + 1)]
        return Server.start(
            str(served.model),
            stack if name == KVTIER else None,
            flags,
            log=served.folder / f"{name}.log",
            environment=_ENVIRONMENT,
        )

    def _tell(self, found: dict[str, list[Result]]) -> None:
        for label, results in found.items():
            first = median(each.mean_first_s for each in results)
            self.report.add(f"{label}: mean first token", first, "s")
            p90 = median(each.p90_first_s for each in results)
            self.report.add(f"{label}: first token, 90 % within", p90, "s")
            rate = median(each.tokens_a_second for each in results)
            self.report.add(f"{label}: prompt tokens a second", rate, "tokens/s")
        for case in [
            label.removesuffix(f"; {KVTIER}") for label in found if label.endswith(KVTIER)
        ]:
            pairs = list(zip(found[f"{case}; {KVTIER}"], found[f"{case}; {WITHOUT}"], strict=True))
            first = median(our.mean_first_s / their.mean_first_s for our, their in pairs)
            self.report.add(f"{case}: mean first token, kvtier to {WITHOUT}", first, "x")
            rate = median(our.tokens_a_second / their.tokens_a_second for our, their in pairs)
            self.report.add(f"{case}: tokens a second, kvtier to {WITHOUT}", rate, "x")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the run
    with folders() as (folder, region):
        bench = Bench(folder, region)
        for workload in WORKLOADS:
            bench.compare(workload)
        bench.report.finish()


if __name__ == "__main__":
    main()
