"""Keys and tokens of prompts are those of a real engine: prewarm and explain tell the truth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines.world import World, prompt

TEXT = "What a cache is good for, and for whom. " * 40
TOKENS = prompt(3, 1100)


def kvtier(*args: object) -> Any:
    program = Path(sys.executable).with_name("kvtier")
    done = subprocess.run(
        [program, *map(str, args), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_an_engine_stored_is_found(
    world: World, model: Callable[..., Path], family: str
) -> None:
    folder = model(family)
    stack = world.stack()
    prompts = world.folder / "prompts.jsonl"
    messages = [{"role": "user", "content": TEXT}]
    lines = [{"tokens": TOKENS}, {"prompt": TEXT}, {"messages": messages}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    from kvtier.vllm.prompts import read_prompts

    tokens = read_prompts(prompts, str(folder))
    with world.engine(folder, stack=stack, prefix_caching_hash_algo="sha256_cbor") as engine:
        engine.generate(prompts=tokens)
        engine.settle()
    source = world.folder / "stack.yaml"
    source.write_text(yaml.safe_dump(stack))
    answers = kvtier("explain", prompts, "-c", source, "--model", folder)["answers"]
    for answer in answers:
        assert answer["hits"] == answer["chunks"] > 0

    fresh = stack | {"name": "fresh", "tiers": [dict(tier) for tier in stack["tiers"]]}
    fresh["tiers"][1]["path"] = str(world.folder / "fresh")
    target = world.folder / "fresh.yaml"
    target.write_text(yaml.safe_dump(fresh))
    args = ["--from", source, "--prompts", prompts, "--model", folder]
    (report,) = kvtier("prewarm", "-c", target, *args)["namespaces"]
    if family == "llama":  # of windowed layers, only the last chunks are stored
        assert report["missing"] == 0
    assert report["copied"] == report["asked"] > 0
    with world.engine(folder, stack=fresh, prefix_caching_hash_algo="sha256_cbor") as engine:
        (first,) = engine.generate(prompts=[tokens[0]])
    assert first["cached"] == 1024, "the very first request of a fresh engine hits"
