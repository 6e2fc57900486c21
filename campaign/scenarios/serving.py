"""A real engine with aborts, preemptions, resets and adapters: what it holds does not grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import campaign
from campaign.growth import judge, slope
from campaign.round import Round, Scenario

_PYTHON = Path(campaign.__file__).parents[1] / ".venv-vllm" / "bin" / "python"
_WARM_UP = 800
"""Until then an engine, with kvtier or without, comes by the memory that it will use again."""
_REQUESTS = 2 * _WARM_UP
_DAY_S = 600.0
_FLAT = {
    "pins": 0.0,
    "slots in flight": 0.0,
    "known requests": 0.0,
    "descriptors": 10.0,
    "threads": 10.0,
    "memory": 8 << 20,
    "mover's memory": 8 << 20,
    "shared memory": 4 << 20,
}
"""What a thousand requests may add, beyond what their error explains."""


class Serving(Scenario):
    name = "serving"
    about = (
        "A real vLLM engine on the CPU platform, with its mover in a process: requests, aborts, "
        "preemptions, resets, sleeps and changing adapters. At rest no slot is pinned or in "
        "flight, and no request known; descriptors, threads, memory and shared memory do not grow: "
        "a regression line over the second half of each life, with its error."
    )
    share = 0.7
    limit_s = 900.0
    round_s = 600.0

    def play(self, round: Round) -> None:
        if not _PYTHON.exists():
            round.counts["no vLLM here: make venv-vllm"] += 1
            return
        looks = self._looks(round, round.dice.randrange(1 << 20), "--requests", str(_REQUESTS))
        self._judge(round, looks)

    def _judge(self, round: Round, looks: list[dict[str, Any]]) -> None:
        round.counts["requests, aborts and resets"] += looks[-1]["requests"] if looks else 0
        round.check(len(looks) >= 8, f"only {len(looks)} looks: the engine died")
        for each in looks:
            for what in ("pins", "slots in flight", "known requests", "mistakes"):
                round.check(not each[what], f"{each[what]} {what} at rest: {each}")
            round.check(each["at rest"], f"not at rest: {each}")
        judge(round, looks, _FLAT, of="requests", since=_WARM_UP)

    def _looks(self, round: Round, seed: int, *options: str) -> list[dict[str, Any]]:
        """One life of an engine; it starts several processes."""
        here = Path(campaign.__file__).parents[1]
        path = os.pathsep.join(str(here / each) for each in ("", "tests"))
        command = [str(_PYTHON), "-m", "campaign.serving_life", str(round.folder)]
        log, looks = round.folder / "said", []
        with log.open("wb") as said:
            life = subprocess.Popen(
                [*command, "--seed", str(seed), *options],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            assert life.stdout is not None
            for line in life.stdout:
                if line.startswith("{"):
                    looks.append(json.loads(line))
                    round.counts["looks at rest"] += 1
            code = life.wait()
        if code:
            round.found(f"ended with {code}: {log.read_text(errors='replace')[-3000:]}")
        if code == -signal.SIGKILL:
            round.counts["killed from outside"] += 1
        return looks


class ServingDay(Serving):
    name = "serving_day"
    about = (
        f"The same for {_DAY_S / 60:.0f} minutes, with a store whose keeper does in that time what "
        "it does in a day, and then half as long without kvtier: what grows there is vLLM's own."
    )
    share = 0.0

    def play(self, round: Round) -> None:
        if not _PYTHON.exists():
            round.counts["no vLLM here: make venv-vllm"] += 1
            return
        seed = round.dice.randrange(1 << 20)
        looks = self._looks(round, seed, "--seconds", str(_DAY_S))
        self._judge(round, looks)
        _note(round, "last quarter", looks[3 * len(looks) // 4 :], _FLAT)
        plain = self._looks(round, seed, "--seconds", str(_DAY_S / 2), "--plain")
        lives = {"with kvtier": looks[: len(plain)], "without": plain}
        for title, life in lives.items():  # over the same requests: memory grows most at first
            named = f"of the first {plain[-1]['requests'] if plain else 0}, {title}"
            rest = life[len(life) // 2 :]
            _note(round, f"second half {named}", rest, ("descriptors", "threads", "memory"))


def _note(round: Round, title: str, looks: list[dict[str, Any]], names: Iterable[str]) -> None:
    for what in names:
        more, error = slope([(each["requests"] / 1000, float(each[what])) for each in looks])
        round.notes.append(f"{title}: {what}: {more:+.3g} ± {error:.2g} in 1000 requests")
