"""A real engine that serves for a while: `python -m campaign.serving_life FOLDER SEED REQUESTS`.

It runs where vLLM is installed, and prints one line of JSON for each look at the engine at rest.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines.adapter import make_adapter
from engines.engine import HOST, Engine
from engines.world import World, prompt

MODEL = Path(sys.prefix) / "models" / "llama-0"
_LOOK_EVERY = 8
_PROMPTS = 24
_LONGEST = 900


def main() -> None:
    """Ask, abort, preempt, reset and change adapters; look at what the processes hold."""
    folder, seed, requests = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dice = random.Random(seed)
    build = [sys.executable, str(HOST.parents[1] / "families.py"), str(MODEL)]
    subprocess.run(
        [*build, "--family", "llama", "--seed", "0", "--layers", "4"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    adapters = [folder / f"adapter-{number}" for number in range(2)]
    for number, each in enumerate(adapters):
        make_adapter(each, number)
    world = World(folder)
    try:
        stack = world.stack(capacity="8MiB") | {"mover": {"mode": "process"}}
        engine = world.engine(MODEL, stack=stack, enable_lora=True, max_lora_rank=8)
        engine.mover()
        pool = [prompt(number, dice.randint(100, _LONGEST)) for number in range(_PROMPTS)]
        for number in range(requests):
            _ask(engine, dice, dice.choice(pool), adapters)
            if number % _LOOK_EVERY == _LOOK_EVERY - 1:
                print(json.dumps(_look(engine, world, number + 1)), flush=True)
    finally:
        world.close()


def _ask(engine: Engine, dice: random.Random, tokens: list[int], adapters: list[Path]) -> None:
    what = dice.random()
    if what < 0.5:
        engine.generate(prompts=[tokens], tokens=4)
    elif what < 0.65:
        number = dice.randrange(len(adapters))
        adapter = (f"adapter-{number}", number + 1, str(adapters[number]))
        engine.generate_with(prompt=tokens, tokens=4, adapter=adapter)
    elif what < 0.8:
        engine.begin(prompt=tokens, tokens=4, steps=dice.randint(0, 4))
        engine.abort()
    elif what < 0.85:
        engine.begin(prompt=tokens, tokens=4, steps=2)
        engine.preempt_all()
        engine.end()
    elif what < 0.98:
        engine.forget_engine_cache()
    else:
        engine.forget_everything()


def _look(engine: Engine, world: World, requests: int) -> dict[str, Any]:
    """What is held at rest."""
    settled = engine.settle()
    facts, mover = engine.facts(), engine.mover()
    tiers = facts["chain"]["tiers"]
    shared = sum(path.stat().st_blocks * 512 for path in world.region.iterdir())
    return {
        "requests": requests,
        "at rest": settled and not facts["busy"],
        "mistakes": facts["mistakes"],
        "known requests": facts["requests"],
        "pins": sum(tier["pinned"] for tier in tiers),
        "slots in flight": sum(tier["in_flight"] for tier in tiers),
        "descriptors": facts["descriptors"] + _count(mover, "fd"),
        "threads": _count(engine.process.pid, "task") + _count(mover, "task"),
        "memory": engine.resident(),
        "mover's memory": _own_memory(mover),
        "shared memory": shared,
    }


def _count(process: int, what: str) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/{what}").iterdir())


def _own_memory(process: int) -> int:
    _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
