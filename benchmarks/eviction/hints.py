"""What hints are worth to agents: the blocks found with and without them, beside other policies.

    python -m benchmarks.eviction.hints     # AGENTS=24 REQUESTS=600 SIZES="0.05 0.1 0.2" SHARE=0.25

Made-up sessions of agents, several at a time, under three system prompts with tools, with pauses of
2 to 120 seconds (log-normal) between an answer and what the tool says to it. They meet one tier,
which evicts by a policy with what is retained around it, as tiers do. The hints are a session's
name with each request, and with its last one that it is over. It takes seconds, and says nothing of
time.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.eviction.reference_policies import new_policy
from benchmarks.eviction.replay import replay, replay_belady
from benchmarks.report import Report
from kvtier.cli.trace_simulation import Request
from kvtier.eviction import DEFAULT, UNKNOWN
from kvtier.eviction.retention import RetainedBlocks, RetainingPolicy
from kvtier.types import BlockKey

AGENTS = int(os.environ.get("AGENTS", "24"))
REQUESTS = int(os.environ.get("REQUESTS", "600"))
SIZES = tuple(map(float, os.environ.get("SIZES", "0.05 0.1 0.2").split()))
"""CPU memory, as parts of all different tokens that a round's sessions have."""
SHARE = float(os.environ.get("SHARE", "0.25"))
"""How much of it may be retained."""
BLOCK = 64
COMMON_TOKENS, TURN_TOKENS, TURNS_MAX = 512, (64, 320), 12
STAYS = 0.85
"""A session goes on with this chance after each answer."""
PAUSE_S = (2.0, 120.0)
SERVING_S = 2.0
"""Between a request and the beginning of the pause."""


class Asked(NamedTuple):
    """When a request comes, its prompt, and what is said of its session."""

    at: float
    prompt: list[int]
    said: dict[str, Any]


def sessions(seed: int) -> list[Asked]:
    """What all agents ask, in its order; the first pauses are cut, so that all are under way."""
    dice = random.Random(seed)
    systems = [dice.choices(range(256), k=COMMON_TOKENS) for _ in range(3)]
    asked: list[Asked] = []
    for agent in range(AGENTS):
        now, number = dice.uniform(0, PAUSE_S[1] / 4), 0
        while now < 3600:
            prompt, turns = list(dice.choice(systems)), 1
            while turns < TURNS_MAX and dice.random() < STAYS:
                turns += 1
            for turn in range(turns):
                prompt = prompt + dice.choices(range(256), k=dice.randint(*TURN_TOKENS))
                said: dict[str, Any] = {"session": f"{seed}-{agent}-{number}"}
                if turn == turns - 1:
                    said["release"] = True
                asked.append(Asked(now, prompt, said))
                pause = dice.lognormvariate(2.5, 1.0)
                now += SERVING_S + min(max(pause, PAUSE_S[0]), PAUSE_S[1])
            number += 1
    asked.sort(key=lambda each: each.at)
    return asked[:REQUESTS]


def different_blocks(asked: list[Asked]) -> int:
    """How many blocks would hold all of these prompts."""
    return len(
        {hash(tuple(a.prompt[:n])) for a in asked for n in range(BLOCK, len(a.prompt) + 1, BLOCK)}
    )


OTHERS = ("lru", "arc", "s3fifo")


def requests_of(asked: Iterable[Asked]) -> list[Request]:
    """The blocks of each prompt; equal beginnings are equal blocks."""
    known: dict[tuple[int, ...], int] = {}
    return [
        Request(
            each.at,
            tuple(
                known.setdefault(tuple(each.prompt[:end]), len(known))
                for end in range(BLOCK, len(each.prompt) + 1, BLOCK)
            ),
        )
        for each in asked
    ]


class HintedTier:
    """A tier of so many blocks, of which a share may be retained."""

    def __init__(self, capacity: int, policy: str, share: float) -> None:
        self._now = 0.0
        self._slots: dict[BlockKey, int] = {}
        self._keys = [BlockKey(b"")] * capacity
        self._free = list(range(capacity))
        self._retained = RetainedBlocks(lambda: self._now)
        self._retained.allow(int(capacity * share))
        self._policy = RetainingPolicy(
            new_policy(policy),
            lambda slot: self._keys[slot] in self._retained,
            self._retained.__len__,
        )
        self._policy.resize(capacity)

    def ask(self, request: Request, session: str, *, over: bool) -> int:
        """A request, and what it says of its session: how many of its blocks are found."""
        self._now = request.time
        keys = [BlockKey(block.to_bytes(8, "big")) for block in request.blocks]
        found = next((at for at, key in enumerate(keys) if key not in self._slots), len(keys))
        slots = [self._slots[key] for key in keys[:found]]
        if slots:
            self._policy.use(slots, keys[:found], self._now, UNKNOWN, len(keys) - found)
        self._store(keys)
        rest = [key for key in keys[found:] if key in self._slots]
        if rest:
            after = slots[-1] if slots else UNKNOWN
            self._policy.use([self._slots[key] for key in rest], rest, self._now, after)
        if over:
            self._retained.release(session)
            self._policy.release(self._here(k for k in keys if not self._retained.wanted(k)))
        else:
            self._retained.retain(keys, session, math.inf, self._slots.__contains__)
        self._policy.give_back(self._here(self._retained.take_ended()))
        return found

    def _here(self, keys: Iterable[BlockKey]) -> list[int]:
        return [self._slots[key] for key in keys if key in self._slots]

    def _store(self, keys: list[BlockKey]) -> None:
        """What is not here yet, as far as there is room beside the rest of the prompt."""
        mine = set(self._here(keys))
        new = [key for key in keys if key not in self._slots][: len(self._keys) - len(mine)]
        for slot in self._policy.evict(len(new) - len(self._free), mine):
            del self._slots[self._keys[slot]]
            self._free.append(slot)
        for key in new:
            slot = self._free.pop()
            self._slots[key], self._keys[slot] = slot, key


def hinted_percent(asked: list[Asked], capacity: int, share: float) -> float:
    """How many of the blocks are found, with the default policy and hints."""
    tier, found, requests = HintedTier(capacity, DEFAULT, share), 0, requests_of(asked)
    for each, request in zip(asked, requests, strict=True):
        found += tier.ask(request, each.said["session"], over="release" in each.said)
    return 100.0 * found / sum(len(request.blocks) for request in requests)


def simulate_all(report: Report) -> None:
    """Every size, with every contestant."""
    asked = sessions(0)
    requests = requests_of(asked)
    for size in SIZES:
        capacity = int(size * different_blocks(asked))
        what = f"simulated, memory for {size:.0%} of all"
        report.add(f"{what}: hints", hinted_percent(asked, capacity, SHARE), "%")
        for name in (DEFAULT, *OTHERS):
            result = replay(requests, new_policy(name), capacity)
            report.add(f"{what}: {name}", result.percent, "%")
        report.add(f"{what}: the bound", replay_belady(requests, capacity).percent, "%")


def main() -> None:
    report = Report("Blocks that agents find")
    simulate_all(report)
    report.finish()


if __name__ == "__main__":
    main()
