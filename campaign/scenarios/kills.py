"""Kills: of writers at a call, at a step of the bytecode or by the clock; of movers and engines; of
commands."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import yaml
from support.object import object_subjects
from support.tiers import subjects

from campaign.children import Child, Say
from campaign.crash import Broken, CrashCampaign
from campaign.round import Round, Scenario
from campaign.stacks import described, idle, payloads, run_command, wrong_in
from kvtier import Stack
from kvtier.move.process import ProcessMover
from kvtier.testing.subject import NAMESPACE, Subject, make_keys
from kvtier.types import BlockKey, Presence

_KILLS = 48
_MEDIA: tuple[tuple[str, Subject, int], ...] = (
    ("cpu", subjects.CPU, 1),
    ("nvme", subjects.NVME, 1),
    ("object folder", object_subjects.FOLDER, 1),
    ("object folder, 4 engines", object_subjects.FOLDER, 4),
    ("nvme, 2 engines", subjects.SLABS, 2),
    ("nvme, 8 engines", subjects.SLABS, 8),
)


class Kills(Scenario):
    name = "kills"
    about = (
        "Engine stand-ins with their keepers are killed in the middle of storing, loading, "
        "evicting and dropping. The next process serves what was committed, with its right bytes, "
        "and nothing that was dropped; the capacity holds; what the dead had reserved is free."
    )
    share = 2.0

    def play(self, round: Round) -> None:
        medium, subject, engines = _MEDIA[round.number % len(_MEDIA)]
        home = round.folder / "medium"
        home.mkdir()
        campaign = CrashCampaign(subject, home, round.dice.randrange(1 << 20), engines)
        try:
            campaign.run(_KILLS, lambda: round.counts.update(["looks at what they left"]))
        except Broken as broken:
            round.found(f"{medium}: {broken}")
        for kind, deaths in campaign.deaths.items():
            round.counts["kills"] += deaths
            round.counts[f"kills, when: {kind}"] += deaths
            round.counts[f"kills, {medium}"] += deaths
        round.counts["commits"] += campaign.ledger.committed
        round.counts["evictions"] += campaign.ledger.evicted
        round.counts["blocks found and proved"] += campaign.proved


_LIVES = 12
_STEPS = 60
"""With a store; afterwards an engine loads, until it is killed."""
_STEP_KEYS = 3
_KILLS_MAX = 2
_LONGEST_S = 0.3


class Movers(Scenario):
    name = "movers"
    about = (
        "An engine stand-in stores and loads through a mover process, which is killed at random "
        "instants, and at last the engine is. The engine goes on after each death of its mover; "
        "the next engine serves every block whose store was reported, and once it has idled, "
        "it does so with its host memory emptied."
    )

    def play(self, round: Round) -> None:
        config = described(round.folder, blocks=_LIVES * _STEPS * 3)
        stored: list[BlockKey] = []
        for life in range(_LIVES):
            stored += self._live(round, config, life, list(stored))
        with Stack.open(config, NAMESPACE) as stack:
            found = stack.load(stored)
            self._judge(round, "after the kill", stored, found)
            idle(stack)
            stack.settle()
            stack.chain.tiers[0].forget(stored)
            self._judge(round, "with host memory emptied", stored, stack.load(stored))

    def _live(
        self, round: Round, config: dict[str, Any], life: int, known: list[BlockKey]
    ) -> list[BlockKey]:
        seed = round.dice.randrange(1 << 30)
        serving = config | {"mover": {"mode": "process"}}
        child = Child(lambda say: _store_and_load(say, serving, seed, life, known))
        for killed in range(round.dice.randint(0, _KILLS_MAX)):
            while len(child.told("mover")) <= killed and child.listen(0.02):
                pass
            child.listen(round.dice.uniform(0, _LONGEST_S))
            if not child.ended:
                with suppress(ProcessLookupError):
                    os.kill(int(child.told("mover")[-1]), signal.SIGKILL)
                    round.counts["kills of movers"] += 1
        child.listen(round.dice.uniform(0, _LONGEST_S))
        child.kill()
        round.counts["kills of engines" if child.wait() < 0 else "ended before the kill"] += 1
        for said in child.told("raised") + child.told("wrong"):
            round.found(f"life {life}: {said}")
        keys = [
            BlockKey(bytes.fromhex(each)) for line in child.told("stored") for each in line.split()
        ]
        round.counts["blocks stored"] += len(keys)
        round.counts["blocks loaded"] += sum(map(int, child.told("loaded")))
        return keys

    def _judge(
        self, round: Round, when: str, wanted: list[BlockKey], found: dict[BlockKey, bytes]
    ) -> None:
        round.counts["blocks proved after a kill"] += len(found)
        round.check(not wrong_in(found), f"{when}: wrong bytes for {wrong_in(found)}")
        lost = len(set(wanted) - set(found))
        round.check(not lost, f"{when}: {lost} of {len(wanted)} blocks are lost")


def _store_and_load(
    say: Say, config: dict[str, Any], seed: int, life: int, known: list[BlockKey]
) -> None:
    """Store and load until killed; what was reported as stored was committed before."""
    dice = Random(seed)
    stack = Stack.open(config, NAMESPACE)
    mover = None
    mine = list(known)
    for step in count():
        if (now := _pid(stack)) not in (mover, None):
            mover = now
            say(f"mover {mover}")
        if step < _STEPS:
            keys = make_keys(dice.randint(1, 3), start=(life * _STEPS + step) * _STEP_KEYS)
            taken = stack.store(payloads(keys))
            say(f"stored {' '.join(key.hex() for key in taken)}")
            mine += taken
        some = dice.sample(mine, min(len(mine), 8))
        if dice.random() < 0.3:  # else all of them would be found in memory
            below = stack.chain.tiers[1].lookup(some)
            pairs = zip(some, below, strict=True)
            stack.chain.tiers[0].forget([key for key, at in pairs if at is Presence.HIT])
        found = stack.load(some)
        if wrong := wrong_in(found):
            say(f"wrong bytes for {wrong}")
        say(f"loaded {len(found)}")


def _pid(stack: Stack) -> int | None:
    assert isinstance(stack.mover, ProcessMover)
    return stack.mover.pid


_COMMANDS_BLOCKS = 96
_COMMANDS_KILLED = 120
_COMMAND_S = 0.08
COMMANDS = {
    "verify": "verify --repair",
    "gc": "gc",
    "snapshot": "snapshot --to {backup}",
    "prewarm": "prewarm",
    "restore": "prewarm --from {backup}",
    "clear": "clear --tier nvme --yes",
    "ls": "ls",
    "du": "du",
}
_FINISH = ("clear", "gc", "prewarm", "verify", "snapshot", "restore")


class Commands(Scenario):
    name = "commands"
    about = (
        "Commands that copy, mend and remove are killed by SIGKILL at random instants on a folder "
        "and a store. What they were not told to remove stays there with its right bytes, and each "
        "command works when run again."
    )

    def play(self, round: Round) -> None:
        stack = round.folder / "stack.yaml"
        config = described(round.folder, blocks=4 * _COMMANDS_BLOCKS)
        stack.write_text(yaml.safe_dump(config))
        keys = make_keys(_COMMANDS_BLOCKS)
        with Stack.open(config, NAMESPACE) as opened:
            opened.store(payloads(keys))
            assert opened.settle()
        words = {"backup": f"file://{round.folder}/backup"}
        _finish(round, stack, "snapshot", words)
        for _ in range(_COMMANDS_KILLED):
            name = round.dice.choice(list(COMMANDS))
            child = _run(stack, name, words)
            child.listen(round.dice.uniform(0, _COMMAND_S))
            child.kill()
            round.counts["kills" if child.wait() < 0 else "ended before the kill"] += 1
            round.counts[f"begun: {name}"] += 1
        _judge(round, keys)
        for name in _FINISH:
            _finish(round, stack, name, words)
        _judge(round, keys)


def _run(stack: Path, name: str, words: dict[str, str]) -> Child:
    return run_command(stack, COMMANDS[name].format(**words))


def _finish(round: Round, stack: Path, name: str, words: dict[str, str]) -> None:
    """To its end, as if nothing had happened before."""
    child = _run(stack, name, words)
    child.wait()
    round.counts["run to their end"] += 1
    text = f"{name} ended with {child.told('ended')}: {child.told('raised')}"
    round.check(child.told("ended") == ["0"], text)


def _judge(round: Round, keys: list[BlockKey]) -> None:
    """The store has all blocks; the folder has right ones."""
    for tiers, whole in ((("nvme",), False), (("object",), True)):
        for host in round.folder.glob("host*/*"):
            shutil.rmtree(host)
        config = described(round.folder, blocks=4 * _COMMANDS_BLOCKS)
        config["tiers"] = [each for each in config["tiers"] if each["kind"] in ("cpu", *tiers)]
        with Stack.open(config, NAMESPACE) as stack:
            found = stack.load(keys)
        round.counts["blocks proved"] += len(found)
        round.check(not wrong_in(found), f"wrong bytes in {tiers}: {wrong_in(found)}")
        if whole:
            round.check(len(found) == len(keys), f"{len(keys) - len(found)} blocks left {tiers}")
