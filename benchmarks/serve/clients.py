"""vLLM's own benchmark clients, each run as a process against a server's address.

`vllm bench serve` comes with vLLM. Its script for chats lies in vLLM's sources alone; MULTI_TURN
names the folder that holds it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

MULTI_TURN = os.environ.get("MULTI_TURN")
SCRIPT = "benchmark_serving_multi_turn.py"
_CLIENT_S = 1800
# What `vllm bench serve` runs. Its command asks for the version of a distribution of the name
# "vllm", which the build for CPUs does not have.
_BENCH = (
    "from vllm.benchmarks import serve\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "serve.add_cli_args(parser)\n"
    "serve.main(parser.parse_args())\n"
)
_WORD_LETTERS = "etaoinshrdlu"
_TEXT_WORDS = 400_000


class ClientError(Exception):
    """A client failed, or some of its requests did."""


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
    """Runs them with the files that they need in one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = str(model)
        self._runs = 0

    def bench(self, url: str, requests: int, dataset: str, seed: int, *options: str) -> Result:
        """`vllm bench serve` with one of its datasets."""
        found = self._next_file()
        command = [sys.executable, "-c", _BENCH, "--backend", "vllm", "--base-url", url]
        command += ["--model", self._model, "--dataset-name", dataset, "--seed", str(seed)]
        command += ["--num-prompts", str(requests), "--disable-tqdm", "--temperature", "0"]
        command += ["--percentile-metrics", "ttft", "--metric-percentiles", "90"]
        command += ["--save-result", "--result-filename", str(found), *options]
        self._run(command)
        said = json.loads(found.read_text())
        if said["completed"] != requests:
            raise ClientError(f"{requests - said['completed']} of {requests} requests failed")
        return Result(
            said["duration"],
            said["mean_ttft_ms"] / 1000,
            said["p90_ttft_ms"] / 1000,
            said["total_input_tokens"],
        )

    def chat(self, url: str, chats: int, users: int, seed: int, **lengths: int) -> Result:
        """vLLM's multi-turn script: so many chats, as many at a time as there are users."""
        if MULTI_TURN is None:
            raise ClientError(f"MULTI_TURN names no folder with {SCRIPT}")
        found = self._next_file()
        input_file = self._chats(chats, seed, **lengths)
        command = [sys.executable, str(Path(MULTI_TURN, SCRIPT).absolute())]
        command += ["--input-file", str(input_file), "--model", self._model, "--url", url]
        command += ["--num-clients", str(users), "--max-active-conversations", str(users)]
        command += ["--seed", str(seed), "--no-early-stop", "--stats-json-output", str(found)]
        self._run(command)
        return _of_turns(json.loads(found.read_text()))

    def _chats(self, chats: int, seed: int, turns: int, first: int, more: int, said: int) -> Path:
        """A first message of so many tokens, then more in each turn, and answers of `said`."""

        def always(value: int) -> dict[str, Any]:
            return {"distribution": "constant", "value": value}

        asked = {"num_turns": always(2 * turns), "common_prefix_num_tokens": always(0)}
        asked |= {"prefix_num_tokens": always(first), "num_tokens": always(more)}
        path = self._folder / f"chats-{seed}.json"
        description = {
            "filetype": "generate_conversations",
            "num_conversations": chats,
            "text_files": [str(self._text(seed))],
            "print_stats": False,
            "prompt_input": asked,
            "prompt_output": {"num_tokens": always(said)},
        }
        path.write_text(json.dumps(description))
        return path

    def _text(self, seed: int) -> Path:
        """Words to cut the chats from; no two seeds have a text in common."""
        path = self._folder / f"text-{seed}.txt"
        if not path.exists():
            made = random.Random(seed)
            words = ("".join(made.choices(_WORD_LETTERS, k=5)) for _ in range(_TEXT_WORDS))
            path.write_text(" ".join(words))
        return path

    def _next_file(self) -> Path:
        self._runs += 1
        return self._folder / f"client-{self._runs}.json"

    def _run(self, command: Sequence[str]) -> None:
        # The seed: vLLM makes a trace's tokens from Python's hashes of their blocks' names.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        log = self._folder / "client.log"
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_CLIENT_S,
                check=False,
            )
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ClientError(f"the client ended with {done.returncode}:\n{end}")


def _of_turns(turns: Sequence[dict[str, Any]]) -> Result:
    firsts = [turn["ttft_ms"] / 1000 for turn in turns]
    begin = min(turn["start_time_ms"] for turn in turns)
    end = max(turn["start_time_ms"] + turn["latency_ms"] for turn in turns)
    return Result(
        (end - begin) / 1000,
        mean(firsts),
        quantiles(firsts, n=10)[-1],
        sum(turn["input_num_tokens"] for turn in turns),
    )
