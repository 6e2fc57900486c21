"""Engine stand-ins with a mover of its own process: the mover is killed, and then the engine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

from campaign.children import Child, Say
from campaign.round import Round, Scenario
from campaign.stacks import described, idle, payloads, wrong_in
from kvtier import Stack
from kvtier.move.process import ProcessMover
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Presence

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
        child = Child(lambda say: _serve(say, serving, seed, life, known))
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


def _serve(say: Say, config: dict[str, Any], seed: int, life: int, known: list[BlockKey]) -> None:
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
