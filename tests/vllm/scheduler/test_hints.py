"""What requests, and hints with them, say of their blocks: kept through a flood and a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.engine import Engine
from engines.world import World, prompt

KEPT, HINTED, LOST = (prompt(600 + seed, 1100) for seed in range(3))
FLOOD = [prompt(700 + seed, 1100) for seed in range(8)]
HIT = 1024
CHUNKS = HIT // 256
SHARE = 0.5


def ask(engine: Engine, tokens: list[int], **said: Any) -> dict[str, Any]:
    """One request with what it says, alone and to its end; of vLLM's own cache nothing is left."""
    assert engine.forget_engine_cache()
    engine.begin(prompt=tokens, tokens=8, steps=1, **said)
    answer: dict[str, Any] = engine.end()
    assert engine.settle()
    return answer


def flood(engine: Engine) -> None:
    """More than a tier holds, one after the other: what comes at once may find no room."""
    for each in FLOOD:
        engine.generate(prompts=[each], tokens=1)
        assert engine.settle()


def retained(engine: Engine) -> list[int]:
    return [tier["retained"] for tier in engine.facts()["chain"]["tiers"]]


def test_what_is_retained_outlives_floods_and_a_restart(
    world: World, model: Callable[..., Path]
) -> None:
    stack = world.stack(capacity="24MiB") | {"retain": {"share": SHARE}}
    stack["tiers"] = [tier | {"eviction": "lru"} for tier in stack["tiers"]]
    stack["tiers"][1]["capacity"] = "32MiB"
    with world.engine(model("llama"), stack=stack) as engine:
        first = ask(engine, KEPT, limits={"session": "agent", "retain_s": 600})
        retain = {"scope": "router", "directives": [{"priority": 50, "duration": 600}]}
        second = ask(engine, HINTED, hints=[("kv.retain", retain), ("kv.fetch", {})])
        ask(engine, LOST)
        assert retained(engine) == [2 * CHUNKS, 2 * CHUNKS]
        flood(engine)
        assert ask(engine, LOST)["cached"] == 0
        for tokens, before in ((KEPT, first), (HINTED, second)):
            again = ask(engine, tokens)
            assert again["tokens"] == before["tokens"]
            assert again["cached"] == HIT
        assert engine.ignored_hints() == {"unknown": 1, "malformed": 0}
        engine.kill()

    with world.engine(model("llama"), stack=stack) as engine:
        assert retained(engine) == [2 * CHUNKS, 2 * CHUNKS]
        # A session that is over goes first; the other one stays.
        again = ask(engine, KEPT, limits={"session": "agent", "release": True})
        assert (again["tokens"], again["cached"]) == (first["tokens"], HIT)
        assert retained(engine) == [CHUNKS, CHUNKS]
        flood(engine)
        assert ask(engine, KEPT)["cached"] == 0
        assert ask(engine, HINTED)["cached"] == HIT
        engine.forget_everything()
        assert retained(engine) == [0, 0], "never against a reset"
        facts = engine.facts()
        assert (facts["mistakes"], facts["requests"], facts["pending"]) == (0, 0, 0)
