"""vLLM's own benchmark clients against two servers, without kvtier and with it.

    make bench-serve       # ONLY=prefix_repetition ROUNDS=3 LAYERS=4 HIDDEN=512
    make bench-serve MULTI_TURN=vllm/benchmarks/multi_turn      # chats, too: vLLM's script is there

The servers live at the same time and are asked the same in turns; each round brings requests that
nobody has seen. `vllm bench serve` comes with vLLM. Its script for chats lies in vLLM's sources
alone; MULTI_TURN names the folder that holds it. The workloads:

- `prefix_repetition`: vLLM sends a prefix's requests back to back, so that they find each other in
  the engine's own cache. It runs twice: the second time the prefixes have left that cache.
- `chats`: more chats than the engine's own cache holds, each with a long first message.
- `thirty_users`: thirty users with twenty turns each, and CPU memory for a quarter of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.engine.served import DTYPE, Served, folders
from benchmarks.measure import median_ratio
from benchmarks.report import Report
from kvtier.vllm.serving.server_process import Server

LAYERS = int(os.environ.get("LAYERS", "4"))
HIDDEN = int(os.environ.get("HIDDEN", "512"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
MULTI_TURN = os.environ.get("MULTI_TURN")
SCRIPT = "benchmark_serving_multi_turn.py"
ALL = ("prefix_repetition", "chats", "thirty_users")
WORKLOADS = os.environ.get("ONLY", ",".join(ALL if MULTI_TURN else ALL[:1])).split(",")
WITHOUT, KVTIER = "without", "kvtier"
TOKEN_BYTES = LAYERS * HIDDEN * (4 if DTYPE == "float32" else 2)
"""Of KV cache: half as many heads of keys and of values as the model has."""
OWN_TOKENS, MEMORY_TOKENS = 16 << 10, 192 << 10
"""What the engine's own cache and CPU memory hold; thirty users get a quarter of what they need."""
PREFIX, SUFFIX, DECODED, BLOCK = 1024, 64, 16, 64
_CLIENT_S = 1800
_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# What `vllm bench serve` runs. Its command asks for the version of a distribution of the name
# "vllm", which the build for CPUs does not have.
_BENCH = (
    "from vllm.benchmarks import serve\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "serve.add_cli_args(parser)\n"
    "serve.main(parser.parse_args())\n"
)


class Chats(NamedTuple):
    """Chats of the multi-turn script: so many, as many at a time as there are users; tokens before
    the first message, and of each message."""

    chats: int
    users: int
    turns: int
    first: int
    more: int


CHATS = {"chats": Chats(24, 12, 8, 1280, 256), "thirty_users": Chats(30, 30, 20, 1024, 96)}


class Result(NamedTuple):
    """What a client says of one run."""

    seconds: float
    mean_first_s: float
    p90_first_s: float
    prompt_tokens: int

    @property
    def tokens_a_second(self) -> float:
        """Of prompts."""
        return self.prompt_tokens / self.seconds


class Clients:
    """Runs vLLM's clients, each as a process, with the files that they need in one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = str(model)
        self._found = folder / "client.json"

    def prefix_repetition(self, url: str, seed: int) -> Result:
        """Twice as many prefixes as the engine's own cache holds, four requests of each."""
        prefixes = 2 * OWN_TOKENS // (PREFIX + SUFFIX)
        options: dict[str, Any] = {
            "backend": "vllm",
            "base-url": url,
            "model": self._model,
            "dataset-name": "prefix_repetition",
            "seed": seed,
            "num-prompts": 4 * prefixes,
            "temperature": 0,
            "percentile-metrics": "ttft",
            "metric-percentiles": 90,
            "max-concurrency": 8,
            "result-filename": self._found,
            "prefix-repetition-prefix-len": PREFIX,
            "prefix-repetition-suffix-len": SUFFIX,
            "prefix-repetition-num-prefixes": prefixes,
            "prefix-repetition-output-len": DECODED,
        }
        said = self._run("-c", _BENCH, "--save-result", "--disable-tqdm", "--ignore-eos", **options)
        if said["completed"] != 4 * prefixes:
            raise SystemExit(f"only {said['completed']} of {4 * prefixes} requests were answered")
        firsts = said["mean_ttft_ms"] / 1000, said["p90_ttft_ms"] / 1000
        return Result(said["duration"], *firsts, said["total_input_tokens"])

    def chat(self, sizes: Chats, url: str, seed: int) -> Result:
        """vLLM's multi-turn script."""
        if MULTI_TURN is None:
            raise SystemExit(f"MULTI_TURN names no folder with {SCRIPT}")
        options: dict[str, Any] = {
            "input-file": self._chats(sizes, seed),
            "model": self._model,
            "url": url,
            "num-clients": sizes.users,
            "max-active-conversations": sizes.users,
            "seed": seed,
            "stats-json-output": self._found,
        }
        turns = self._run(str(Path(MULTI_TURN, SCRIPT).absolute()), "--no-early-stop", **options)
        firsts = [turn["ttft_ms"] / 1000 for turn in turns]
        begin = min(turn["start_time_ms"] for turn in turns)
        end = max(turn["start_time_ms"] + turn["latency_ms"] for turn in turns)
        tokens = sum(turn["input_num_tokens"] for turn in turns)
        return Result((end - begin) / 1000, mean(firsts), quantiles(firsts, n=10)[-1], tokens)

    def _chats(self, sizes: Chats, seed: int) -> Path:
        """The file that describes them; no two seeds cut theirs from the same text."""
        path, text = self._folder / f"chats-{seed}.json", self._folder / f"text-{seed}.txt"
        dice = random.Random(seed)
        words = ("".join(dice.choices("etaoinshrdlu", k=5)) for _ in range(400_000))
        text.write_text(" ".join(words))

        def always(value: int) -> dict[str, Any]:
            return {"distribution": "constant", "value": value}

        asked = {"num_turns": always(2 * sizes.turns), "common_prefix_num_tokens": always(0)}
        asked |= {"prefix_num_tokens": always(sizes.first), "num_tokens": always(sizes.more)}
        description = {
            "filetype": "generate_conversations",
            "num_conversations": sizes.chats,
            "text_files": [str(text)],
            "print_stats": False,
            "prompt_input": asked,
            "prompt_output": {"num_tokens": always(DECODED)},
        }
        path.write_text(json.dumps(description))
        return path

    def _run(self, *command: str, **options: Any) -> Any:
        """What a client has written of its run."""
        named = [part for name, each in options.items() for part in (f"--{name}", str(each))]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        log = self._folder / "client.log"
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, *command, *named],
                cwd=self._folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_CLIENT_S,
                check=False,
            )
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"the client ended with {done.returncode}:\n{end}")
        return json.loads(self._found.read_text())


class Bench(Served):
    """Servers, in turns."""

    def __init__(self, folder: Path, region: Path) -> None:
        super().__init__(folder, region, LAYERS, HIDDEN)
        self._clients = Clients(folder, self.model)
        self.report = Report(f"vLLM's own clients, {LAYERS} layers of {HIDDEN}, {DTYPE}")

    def compare(self, workload: str) -> None:
        """All rounds of one workload; the first one warms up."""
        tokens = MEMORY_TOKENS
        ask: Callable[[str, int], Result] = self._clients.prefix_repetition
        if sizes := CHATS.get(workload):
            ask = lambda url, seed: self._clients.chat(sizes, url, seed)  # noqa: E731
        if workload == "thirty_users" and sizes:
            tokens = sizes.chats * (sizes.first + sizes.turns * (sizes.more + DECODED)) // 4
        found = defaultdict[str, dict[str, list[Result]]](lambda: defaultdict(list))
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(self._server(name, tokens)) for name in (WITHOUT, KVTIER)
            }
            for seed in range(ROUNDS + 1):
                names = list(servers) if seed % 2 else list(reversed(servers))
                for again in range(2 if workload == "prefix_repetition" else 1):
                    label = f"{workload}, again" if again else workload
                    for name in names:
                        result = ask(servers[name].url, seed)
                        print(f"    {label}, round {seed}, {name}: {result}", flush=True)
                        if seed:
                            found[label][name].append(result)
        for label, results in found.items():
            self._tell(label, results)

    def _server(self, name: str, memory_tokens: int) -> Server:
        """One of the contestants, with so much CPU memory for its cache."""
        flags = ["--dtype", DTYPE, "--max-model-len", "4096", "--max-num-batched-tokens", "2048"]
        flags += ["--block-size", str(BLOCK)]
        flags += ["--num-gpu-blocks-override", str(OWN_TOKENS // BLOCK + 1)]
        cpu = self.cpu(memory_tokens * TOKEN_BYTES)
        path = self.folder / "stack.yaml"
        path.write_text(json.dumps(self.stack(cpu, self.nvme("16GiB"))))
        return Server.start(
            str(self.model),
            path if name == KVTIER else None,
            flags,
            log=self.folder / f"{name}.log",
            environment=_ENVIRONMENT,
        )

    def _tell(self, label: str, found: dict[str, list[Result]]) -> None:
        for name, results in found.items():
            for what, unit, values in (
                ("mean first token", "s", [each.mean_first_s for each in results]),
                ("first token, 90 % within", "s", [each.p90_first_s for each in results]),
                ("prompt tokens a second", "tokens/s", [each.tokens_a_second for each in results]),
            ):
                self.report.add(f"{label}; {name}: {what}", median(values), unit)
        ours, theirs = found[KVTIER], found[WITHOUT]
        first = median_ratio(_firsts(ours), _firsts(theirs))
        self.report.add(f"{label}: mean first token, kvtier to {WITHOUT}", first, "x")
        rate = median_ratio(*([each.tokens_a_second for each in both] for both in (ours, theirs)))
        self.report.add(f"{label}: tokens a second, kvtier to {WITHOUT}", rate, "x")


def _firsts(results: Sequence[Result]) -> list[float]:
    return [each.mean_first_s for each in results]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the run
    with folders() as (folder, region):
        bench = Bench(folder, region)
        for workload in WORKLOADS:
            bench.compare(workload)
        bench.report.finish()


if __name__ == "__main__":
    main()
