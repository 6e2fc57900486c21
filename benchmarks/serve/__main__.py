"""vLLM's own benchmark clients against servers: without a connector, with kvtier, with vLLM's own.

    make bench-serve       # ONLY=prefix_repetition,timed_trace TRACE=requests.jsonl ROUNDS=3
    make bench-serve MULTI_TURN=vllm/benchmarks/multi_turn      # chats, too: vLLM's script is there
    make bench-serve SCALE=gpu   # a model of eight billion weights, on a GPU

The servers are asked the same in turns, and each round brings requests that nobody has seen. On a
CPU, where vLLM's own offloading does not run, they live at the same time. On a GPU, which has room
for one, each has all its rounds before the next one starts. The workloads:

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
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.engine.served import Served, folders
from benchmarks.measure import rotated
from benchmarks.report import Report
from benchmarks.serve.clients import MULTI_TURN, Result
from benchmarks.serve.scale import SCALE, weightless_model
from benchmarks.serve.workloads import ROUNDS, Workloads
from kvtier.vllm.server_process import Server

WITHOUT, KVTIER, TIERING = "without", "kvtier", "vLLM's tiering"
ALL = ("prefix_repetition", "timed_trace", "chats", "thirty_users")
WORKLOADS = tuple(os.environ.get("ONLY", ",".join(ALL if MULTI_TURN else ALL[:2])).split(","))
_BLOCK = 64
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
        self._folder = folder
        self._region = region
        if SCALE.at_once:
            self._model = Served(folder, region, SCALE.layers, SCALE.hidden).model
        else:
            self._model = weightless_model(folder / "model")
        self._workloads = Workloads(folder, self._model)
        shape = f"{SCALE.layers} layers of {SCALE.hidden}, {SCALE.dtype}"
        self.report = Report(f"vLLM's own clients, {shape}")

    def compare(self, workload: str) -> None:
        """All rounds of one workload."""
        ask: Callable[[Server, int], Result] = getattr(self._workloads, workload)
        tokens = SCALE.memory
        if workload == "thirty_users":
            users = SCALE.thirty_users
            tokens = users.chats * (users.first + users.turns * (users.more + SCALE.decoded)) // 4
        found = defaultdict[str, list[Result]](list)

        def turn(servers: list[tuple[str, Server]], seed: int) -> None:
            for again in range(2 if workload == "prefix_repetition" else 1):
                label = f"{workload}, again" if again else workload
                for name, server in servers:
                    result = ask(server, seed)
                    print(f"    {label}, round {seed}, {name}: {result}", flush=True)
                    if seed:  # the first one warms up
                        found[f"{label}; {name}"].append(result)

        groups = [(WITHOUT, KVTIER)] if SCALE.at_once else [(WITHOUT,), (KVTIER,), (TIERING,)]
        for group in groups:
            with ExitStack() as stack:
                servers = [
                    (name, stack.enter_context(self._server(name, tokens))) for name in group
                ]
                for seed in range(ROUNDS + 1):
                    turn(rotated(servers, seed), seed)
        self._tell(found)

    def _server(self, name: str, memory_tokens: int) -> Server:
        """One of the contestants, with so much CPU memory for its cache."""
        memory = memory_tokens * SCALE.token_bytes
        flags = ["--dtype", SCALE.dtype, "--max-model-len", str(SCALE.longest)]
        flags += ["--block-size", str(_BLOCK), "--max-num-batched-tokens", str(SCALE.step)]
        flags += ["--num-gpu-blocks-override", str(SCALE.own // _BLOCK + 1)]
        if not SCALE.at_once:
            flags += ["--load-format", "dummy"]
        if name == TIERING:
            flags += ["--kv-transfer-config", json.dumps(self._tiering(memory))]
        return Server.start(
            str(self._model),
            self._stack(memory) if name == KVTIER else None,
            flags,
            log=self._folder / f"{name}.log",
            environment=_ENVIRONMENT,
        )

    def _stack(self, memory: int) -> Path:
        cpu = {"kind": "cpu", "path": str(self._region), "capacity": memory}
        nvme = {"kind": "nvme", "path": str(self._folder / "blocks"), "capacity": "16GiB"}
        path = self._folder / "stack.yaml"
        path.write_text(json.dumps({"version": 1, "name": "bench", "tiers": [cpu, nvme]}))
        return path

    def _tiering(self, memory: int) -> dict[str, object]:
        root = self._folder / "tiering"
        root.mkdir(exist_ok=True)
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": memory,
                "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            },
        }

    def _tell(self, found: dict[str, list[Result]]) -> None:
        for label, results in found.items():
            first = median(each.mean_first_s for each in results)
            self.report.add(f"{label}: mean first token", first, "s")
            p90 = median(each.p90_first_s for each in results)
            self.report.add(f"{label}: first token, 90 % within", p90, "s")
            rate = median(each.tokens_a_second for each in results)
            self.report.add(f"{label}: prompt tokens a second", rate, "tokens/s")
        for label, theirs in found.items():
            case, name = label.split("; ")
            ours = found.get(f"{case}; {KVTIER}", [])
            if name == KVTIER or not ours:
                continue
            pairs = list(zip(ours, theirs, strict=True))
            first = median(our.mean_first_s / their.mean_first_s for our, their in pairs)
            self.report.add(f"{case}: mean first token, kvtier to {name}", first, "x")
            rate = median(our.tokens_a_second / their.tokens_a_second for our, their in pairs)
            self.report.add(f"{case}: tokens a second, kvtier to {name}", rate, "x")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the run
    with folders() as (folder, region):
        bench = Bench(folder, region)
        for workload in WORKLOADS:
            bench.compare(workload)
        bench.report.finish()


if __name__ == "__main__":
    main()
