"""Why requests of a real engine missed, as a command asks it from another process."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.adapter import make_adapter
from engines.world import World, flip_memory, prompt

PAGE = Path(__file__).parents[3] / "docs/guides/misses.md"
CHUNK = 256
ASKED = prompt(4400, 1100)
MISSED = len(ASKED) // CHUNK * CHUNK


def explained(folder: Path, stack: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page's two commands say of the last request; the second asks for it by its id."""
    (folder / "stack.yaml").write_text(json.dumps(stack))
    last, by_id = re.findall(r"^\$ kvtier (explain .*)$", PAGE.read_text(), re.M)

    def said(command: str) -> str:
        words = [sys.executable, "-m", "kvtier", *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    request, *_ = re.findall(r"^request (\S+): ", said(last), re.M)
    misses: list[dict[str, Any]] = json.loads(said(by_id.replace("cmpl-8f0c3e", request)))["misses"]
    assert {each["request"] for each in misses} == {request}
    return misses


def test_an_engine_says_why_each_of_its_requests_missed(
    world: World, model: Callable[..., Path], tmp_path: Path
) -> None:
    stack = world.stack(capacity="16MiB") | {"name": f"misses-{os.getpid()}"}
    stack["tiers"] = stack["tiers"][:1]
    for number in (1, 2):
        make_adapter(tmp_path / f"adapter-{number}", number)
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    with world.engine(model("llama"), stack=stack, **arguments) as engine:

        def ask(asked: list[int], adapter: int = 1, **more: Any) -> None:
            if adapter:
                more["adapter"] = [f"a{adapter}", adapter, str(tmp_path / f"adapter-{adapter}")]
            engine.generate(prompts=[asked], tokens=1, more=[more])
            assert engine.settle()

        def why(**more: Any) -> str:
            """The reason for which the prompt missed; from its first token on, if it did."""
            engine.forget_engine_cache()
            ask(ASKED, **more)
            miss = explained(tmp_path, stack)[-1]
            found = (miss["engine_tokens"], miss["tier_tokens"], miss["missed_tokens"])
            if "load ended" not in miss["detail"]:
                assert found == ((0, 0, MISSED) if miss["reason"] else (0, MISSED, 0))
            return f"{miss['reason']} {miss['detail']}"

        assert why() == "not_computed "
        assert why() == " "
        assert why(cache_salt="tenant") == "other_salt "
        assert why(adapter=2) == "other_adapter a1"
        assert why(adapter=0) == "untrusted ", "where adapters are mixed, no key tells enough"
        for seed in range(4):
            ask(prompt(4500 + seed, 1100))
        assert why().startswith("evicted evicted from cpu at 2")
        assert why() == " "
        flip_memory(engine)
        assert why() == "corrupt its load ended with corrupt"
        assert why() == " ", "it was computed anew"
        engine.forget_everything()
        assert why() == "reset "
        assert engine.facts()["mistakes"] == 0
