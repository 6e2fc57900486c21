"""A real engine that serves for a while: `python -m campaign.serving_life --help`.

It runs where vLLM is installed, and prints one line of JSON for each look at the engine at rest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engines.adapter import make_adapter
from engines.engine import HOST, Engine
from engines.world import World, prompt

from campaign.growth import held

MODEL = Path(sys.prefix) / "models" / "llama-0"
_LOOK_EVERY = 8
_PROMPTS = 24
_LONGEST = 900


def main() -> None:
    """Ask, abort, preempt, reset, sleep and change adapters; look at what the processes hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--plain", action="store_true", help="without kvtier")
    options = parser.parse_args()
    folder, dice = options.folder, random.Random(options.seed)
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
        lora = {"enable_lora": True, "max_lora_rank": 8}
        if options.plain:
            life: _Life = _Life(world.engine(MODEL, **lora), world)
        else:
            life = _KeptLife(world.engine(MODEL, stack=_stack(world), **lora), world)
        pool = [prompt(number, dice.randint(100, _LONGEST)) for number in range(_PROMPTS)]
        end, number = time.monotonic() + options.seconds, 0
        while number < options.requests and time.monotonic() < end:
            number += 1
            life.ask(dice, dice.choice(pool), adapters)
            if number % _LOOK_EVERY == 0:
                print(json.dumps({"requests": number} | life.look()), flush=True)
    finally:
        world.close()


def _stack(world: World) -> dict[str, Any]:
    """Three tiers; what a store does every few seconds or minutes it does 144 times as often: ten
    minutes are its day."""
    stack = world.stack(capacity="8MiB") | {"mover": {"mode": "process"}}
    stack["tiers"].append(
        {
            "kind": "object",
            "url": f"file://{world.folder}/store",
            "capacity": "64MiB",
            "refresh": "35ms",
            "audit": "4s",
            "age_max": "2min",
        }
    )
    return stack


class _Life:
    """An engine without kvtier, and what it is asked."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.engine = engine
        self.world = world

    def ask(self, dice: random.Random, tokens: list[int], adapters: list[Path]) -> None:
        """A request of some kind, or something between two."""
        engine, what = self.engine, dice.random()
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
        else:
            self.between(what)

    def between(self, what: float) -> None:
        """Forget vLLM's own cache."""
        self.engine.preempt_all()

    def look(self) -> dict[str, Any]:
        """What is held at rest."""
        mine = held(self.engine.process.pid, None, self.world.region)
        return mine | {"memory": self.engine.resident()}


class _KeptLife(_Life):
    """The same with kvtier."""

    def between(self, what: float) -> None:
        if what < 0.96:
            self.engine.forget_engine_cache()
        elif what < 0.98:
            self.engine.settle()
            self.engine.sleep(level=1)
            self.engine.wake_up()
        else:
            self.engine.forget_everything()

    def look(self) -> dict[str, Any]:
        engine = self.engine
        settled = engine.settle()
        facts, mover = engine.facts(), engine.mover()
        tiers = facts["chain"]["tiers"]
        return {
            **held(engine.process.pid, mover, self.world.region),
            "memory": engine.resident(),
            "at rest": settled and not facts["busy"],
            "mistakes": facts["mistakes"],
            "known requests": facts["requests"],
            "pins": sum(tier["pinned"] for tier in tiers),
            "slots in flight": sum(tier["in_flight"] for tier in tiers),
        }


if __name__ == "__main__":
    main()
