"""Long service, by a stand-in and by a real engine: what a process holds does not grow."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import campaign
from campaign.children import Child, Say
from campaign.growth import held, judge, slope
from campaign.round import Round, Scenario
from campaign.stacks import described, idle, payloads, wrong_in
from kvtier import Stack
from kvtier.move.process import ProcessMover
from kvtier.testing.subject import NAMESPACE, failures, make_keys
from kvtier.types import BlockKey, Outcome, Presence

_REQUESTS = 24000
"""A server with a request in 18 seconds has as many in a day."""
_LOOK_EVERY = 400
_PROMPTS = 96
_PROMPT_BLOCKS = 8
_BLOCKS = (96, 320, 640)
"""How many the tiers hold; of 768 that are asked for."""
_FLAT = {
    "pins": 0.0,
    "slots in flight": 0.0,
    "descriptors": 1.0,
    "threads": 1.0,
    "memory": 1 << 20,
    "mover's memory": 1 << 20,
    "shared memory": 0.0,
}
"""What a thousand requests may add, beyond what their error explains."""


class Day(Scenario):
    name = "day"
    about = (
        f"An engine stand-in serves a day's requests ({_REQUESTS:,}), one after the other and as "
        "fast as it can, through a mover in a process: stores that fail, loads that are given up, "
        "preemptions, resets, and sleeps in which nobody steps. At rest no slot is pinned or in "
        "flight; descriptors, threads, memory and shared memory do not grow: a regression line "
        "over the second half of the day, with its standard error."
    )
    share = 2.0
    limit_s = 300.0

    def play(self, round: Round) -> None:
        seed = round.dice.randrange(1 << 30)
        child = Child(lambda say: _serve(say, round.folder, seed))
        while child.listen(1.0):
            round.counts["requests"] = sum(map(int, child.told("served")))
        code = child.wait()
        for said in child.told("raised") + child.told("wrong"):
            round.found(f"the engine: {said}")
        round.check(code == 0, f"the engine ended with {code}")
        looks: list[dict[str, Any]] = [json.loads(each) for each in child.told("look")]
        round.counts["requests"] = sum(map(int, child.told("served")))
        round.counts["blocks loaded and proved"] = sum(map(int, child.told("loaded")))
        round.counts["looks at rest"] = len(looks)
        for each in looks:
            for what in ("pins", "slots in flight"):
                round.check(not each[what], f"{each[what]} {what} at rest: {each}")
        judge(round, looks, _FLAT, of="requests")


def _serve(say: Say, folder: Path, seed: int) -> None:
    dice = Random(seed)
    config = described(folder, blocks=_BLOCKS[0])
    for tier, blocks in zip(config["tiers"][1:], _BLOCKS[1:], strict=True):
        tier["capacity"] = config["tiers"][0]["capacity"] * blocks // _BLOCKS[0]
    config["mover"] = {"mode": "process"}
    keys = make_keys(_PROMPTS * _PROMPT_BLOCKS)
    with Stack.open(config, NAMESPACE) as stack:
        loaded = 0
        for number in range(1, _REQUESTS + 1):
            start = min(int(dice.paretovariate(0.7)), _PROMPTS) - 1
            prompt = keys[start * _PROMPT_BLOCKS :][: dice.randint(1, _PROMPT_BLOCKS)]
            loaded += _ask(say, stack, dice, prompt)
            if number % _LOOK_EVERY == 0:
                idle(stack)
                say(f"look {json.dumps(_look(stack, folder) | {'requests': number})}")
                say(f"served {_LOOK_EVERY}")
        say(f"loaded {loaded}")


def _ask(say: Say, stack: Stack, dice: Random, prompt: list[BlockKey]) -> int:
    """A request: it ends, is aborted, is preempted and begins anew, or is followed by a reset."""
    what = dice.random()
    if what < 0.1:
        _abort_load(stack, prompt)
        return 0
    if what < 0.15:
        reservation = stack.chain.prepare_store(prompt)
        stack.chain.complete_store(reservation.keys, failures(reservation.keys, Outcome.CANCELLED))
    found = stack.load(prompt, 20.0)
    if wrong := wrong_in(found):
        say(f"wrong bytes for {wrong}")
    lacking = [key for key in prompt if key not in found]
    stack.store(payloads(lacking))
    if what < 0.25:  # preempted: what it has stored is asked for at once, and stored again
        found |= stack.load(prompt, 20.0)
        stack.store(payloads(prompt))
    elif what < 0.252:
        stack.chain.clear()
    elif what < 0.26:
        time.sleep(0.05)  # nobody steps
    return len(found)


def _abort_load(stack: Stack, prompt: list[BlockKey]) -> None:
    """Begin to load, and leave before it has landed."""
    chain = stack.chain
    at = chain.lookup(prompt)
    hits = [key for key, where in zip(prompt, at, strict=True) if where is Presence.HIT]
    ticket = chain.begin_load(hits, "aborted", time.monotonic() + 20.0, proves=True)
    chain.poll()
    chain.end_load(ticket, {})
    chain.poll()


def _look(stack: Stack, folder: Path) -> dict[str, float]:
    """What is held at rest, in all processes."""
    gc.collect()
    tiers = stack.chain.chain_stats().tiers
    mover = stack.mover.pid if isinstance(stack.mover, ProcessMover) else None
    return {
        "pins": sum(tier.pinned for tier in tiers),
        "slots in flight": sum(tier.in_flight for tier in tiers),
        **held(os.getpid(), mover, folder / "host"),
    }


_PYTHON = Path(campaign.__file__).parents[1] / ".venv-vllm" / "bin" / "python"
_WARM_UP = 800
"""Until then an engine, with kvtier or without, comes by the memory that it will use again."""
_SERVING_REQUESTS = 2 * _WARM_UP
_DAY_S = 600.0
_SERVING_FLAT = {
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
        looks = self._looks(
            round, round.dice.randrange(1 << 20), "--requests", str(_SERVING_REQUESTS)
        )
        self._judge(round, looks)

    def _judge(self, round: Round, looks: list[dict[str, Any]]) -> None:
        round.counts["requests, aborts and resets"] += looks[-1]["requests"] if looks else 0
        round.check(len(looks) >= 8, f"only {len(looks)} looks: the engine died")
        for each in looks:
            for what in ("pins", "slots in flight", "known requests", "mistakes"):
                round.check(not each[what], f"{each[what]} {what} at rest: {each}")
            round.check(each["at rest"], f"not at rest: {each}")
        judge(round, looks, _SERVING_FLAT, of="requests", since=_WARM_UP)

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
        _note(round, "last quarter", looks[3 * len(looks) // 4 :], _SERVING_FLAT)
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
