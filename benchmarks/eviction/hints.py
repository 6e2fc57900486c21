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
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.eviction.reference_policies import new_policy
from benchmarks.eviction.replay import block_keys, replay, replay_belady
from benchmarks.report import Report
from kvtier.cli.trace_simulation import Request
from kvtier.eviction import DEFAULT
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


def hinted_percent(asked: list[Asked], capacity: int, share: float) -> float:
    """How many of the blocks are found, with the default policy and hints."""
    requests = requests_of(asked)
    names = block_keys(requests)
    key_at: dict[int, BlockKey] = {}
    retained = RetainedBlocks(lambda: 0.0)  # no hint has an end
    retained.allow(int(capacity * share))
    policy = RetainingPolicy(
        new_policy(DEFAULT), lambda slot: key_at[slot] in retained, retained.__len__
    )

    def heed(number: int, slot_of: Mapping[int, int]) -> None:
        """What the request says of its session, after it was served."""
        said, blocks = asked[number].said, requests[number].blocks
        slots = {BlockKey(names[block]): slot_of[block] for block in blocks if block in slot_of}
        key_at.update((slot, key) for key, slot in slots.items())
        if "release" in said:
            retained.release(said["session"])
            policy.release([slot for key, slot in slots.items() if not retained.wanted(key)])
        else:
            keys = [BlockKey(names[block]) for block in blocks]
            retained.retain(keys, said["session"], math.inf, lambda key: _block(key) in slot_of)
        ended = map(_block, retained.take_ended())
        policy.give_back([slot_of[block] for block in ended if block in slot_of])

    return replay(requests, policy, capacity, keys=names, served=heed).percent


def _block(key: bytes) -> int:
    return int.from_bytes(key, "big")


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
