"""A write budget that binds, on a real engine: what it does not reach for stays in CPU memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.engine import Engine
from engines.world import World, prompt

from kvtier.record.record import record_bytes
from kvtier.slab.layout import ENTRY_BYTES

PROMPTS = [prompt(900 + seed, 1100) for seed in range(12)]
HIT = 1024
CHUNKS = HIT // 256 * len(PROMPTS)
BLOCK = record_bytes(1 << 20) + 2 * ENTRY_BYTES
"""What is written for one chunk of this model: its record, and its entry twice."""
BEGINS_WITH = 12
"""Blocks that may be written at once: a quarter of an hour's worth."""
PER_SECOND = BEGINS_WITH * BLOCK / 900


def budget_of(engine: Engine) -> dict[str, Any]:
    """What the engine knows of the budget."""
    assert engine.settle()
    facts = engine.facts()
    assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
    found: dict[str, Any] = facts["chain"]["budgets"][1]
    return found


def told_by_du(stack: Path) -> int:
    command = [sys.executable, "-m", "kvtier", "du", "-c", str(stack), "--tier", "nvme", "--json"]
    (found,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    written: int = found["writes"]["written"]
    return written


def test_what_a_budget_does_not_reach_for_stays_in_host_memory(
    world: World, model: Callable[..., Path], plain_llama: Engine
) -> None:
    expected = [each["tokens"] for each in plain_llama.generate(prompts=PROMPTS)]
    writes = f"{int(PER_SECOND * 86400)}B/day"
    stack = world.stack(capacity="80MiB", writes=writes)
    file = world.folder / "stack.yaml"
    file.write_text(json.dumps(stack))
    began = time.time()
    with world.engine(model("llama"), stack=stack) as engine:
        for each in PROMPTS:
            engine.generate(prompts=[each])
            assert engine.settle()
        first = budget_of(engine)
        chain = engine.facts()["chain"]
        host, disk = chain["tiers"]
        assert host["blocks"] == CHUNKS
        assert chain["links"][0]["drops"]["budget"] > 0
        assert 0 < disk["blocks"] < CHUNKS
        assert first["written"] == disk["blocks"] * BLOCK
        assert first["written"] <= PER_SECOND * (900 + time.time() - began)
        engine.forget_engine_cache()
        found = engine.generate(prompts=PROMPTS)
        assert [each["tokens"] for each in found] == expected
        assert [each["cached"] for each in found] == [HIT] * len(PROMPTS)
        end = time.monotonic() + 60
        while True:
            before = budget_of(engine)
            engine.generate(prompts=[PROMPTS[0][:9]], tokens=1)  # with whose answer it is told
            told = engine.counted(counter="kvtier:write_budget_used_bytes")
            if told == before["written"] or time.monotonic() > end:
                break
        assert told == before["written"]
        engine.look_around()  # the keeper has written down what was spent
        assert told_by_du(file) == before["written"]
        engine.kill()

    with world.engine(model("llama"), stack=stack) as engine:
        after = budget_of(engine)
        assert after["written"] >= before["written"]
        allowed = PER_SECOND * (900 + time.time() - began)
        assert after["written"] + after["left"] <= allowed, "a start brings no new budget"
        found = engine.generate(prompts=PROMPTS)
        assert [each["tokens"] for each in found] == expected
        assert [each["cached"] for each in found] == [HIT] * len(PROMPTS)
        assert budget_of(engine)["written"] <= PER_SECOND * (900 + time.time() - began)
