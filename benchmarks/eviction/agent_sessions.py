"""Made-up sessions of agents: several at a time, under three system prompts with tools, with pauses
of 2 to 120 seconds (log-normal) between an answer and what the tool says to it."""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

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
