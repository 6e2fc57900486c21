"""kvtier's tiers below vLLM's own CPU tier, by vLLM's own tiering, on a real engine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST, Engine, EngineError
from engines.world import World, flip, prompt

NATIVE = HOST.with_name("native.py")
PROMPTS = [prompt(seed, 900) for seed in range(3)]
TOKENS = 12


class Native:
    """Engines that offload by vLLM's tiering into one stack."""

    def __init__(self, world: World, model: Path) -> None:
        self.world, self.model = world, model
        self.stack = world.stack(capacity="16MiB")

    def engine(self, model: Path | None = None, **arguments: Any) -> Engine:
        tier = {
            "type": "KVTierSecondary",
            "module_path": "kvtier.vllm.secondary",
            "stack": self.stack,
        }
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "native",
            "cpu_bytes_to_use": 16 << 20,
            "block_size": 128,
            "secondary_tiers": [tier],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        return self.world.engine(model or self.model, host=NATIVE, transfer=transfer, **arguments)


@pytest.fixture
def native(world: World, model: Callable[..., Path]) -> Native:
    return Native(world, model("llama"))


@pytest.fixture
def right(plain_llama: Engine) -> list[list[int]]:
    """What an engine without any offloading answers."""
    return tokens(plain_llama.generate(prompts=PROMPTS, tokens=TOKENS))


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [each["tokens"] for each in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [each["cached"] for each in answers]


def filled(native: Native, right: list[list[int]]) -> Engine:
    """An engine that has stored the prompts."""
    engine = native.engine()
    answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    assert (tokens(answers), cached(answers)) == (right, [0, 0, 0])
    assert engine.settle()
    return engine


def test_prompts_are_found_after_kill_9(native: Native, right: list[list[int]]) -> None:
    engine = filled(native, right)
    assert engine.held()["nvme"] == len(PROMPTS) * (900 // 128)
    engine.kill()
    engine = native.engine()
    for forget in (lambda: None, engine.forget_memory):
        forget()
        answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
        assert (tokens(answers), cached(answers)) == (right, [896, 896, 896])
    assert engine.corrupt() == 0
    engine.shut_down()
    assert "Traceback" not in engine.log.read_text()


def test_a_bucket_serves_a_second_machine(native: Native, right: list[list[int]]) -> None:
    store = {"kind": "object", "capacity": "1GiB", "url": f"file://{native.world.folder}/store"}
    native.stack["tiers"].append(store)
    filled(native, right).kill()
    shutil.rmtree(native.world.blocks)
    for root in native.world.region.iterdir():
        shutil.rmtree(root)
    answers = native.engine().generate(prompts=PROMPTS, tokens=TOKENS)
    assert (tokens(answers), cached(answers)) == (right, [896, 896, 896])


def test_damaged_blocks_are_misses(native: Native, right: list[list[int]]) -> None:
    filled(native, right).kill()
    for root in native.world.region.iterdir():
        shutil.rmtree(root)
    slabs = sorted(native.world.blocks.rglob("*.slab"))
    assert slabs
    for slab in slabs:
        flip(slab, 1 << 20)
    engine = native.engine()
    answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    assert tokens(answers) == right
    assert sum(cached(answers)) < 3 * 896
    assert engine.corrupt() > 0
    assert engine.settle()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right


def test_what_fails_is_a_miss(native: Native, right: list[list[int]]) -> None:
    """The disk's folder is gone, the mover is killed, the tiers are smaller than the prompts."""
    engine = filled(native, right)
    os.kill(engine.mover(), signal.SIGKILL)
    assert engine.forget_memory()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    shutil.rmtree(native.world.blocks)
    for seed in range(3, 12):
        engine.generate(prompts=[prompt(seed, 900)], tokens=1)
    assert engine.forget_memory()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    engine.shut_down()


def test_other_weights_find_nothing(
    native: Native, right: list[list[int]], model: Callable[..., Path]
) -> None:
    engine = filled(native, right)
    engine.take_weights(folder=str(model("llama", seed=1)))
    longer = [each + prompt(100, 300) for each in PROMPTS]  # vLLM still has their first part
    assert sum(cached(engine.generate(prompts=longer, tokens=TOKENS))) > 0
    assert engine.forget_memory()
    answers = engine.generate(prompts=longer, tokens=TOKENS)
    assert cached(answers) == [0, 0, 0], "nor what was computed from that"
    assert engine.forget_memory()
    again = engine.generate(prompts=longer, tokens=TOKENS)
    assert (tokens(again), cached(again)) == (tokens(answers), [1152, 1152, 1152])


@pytest.mark.parametrize(
    ("family", "arguments", "reason"),
    [
        ("gemma3", {}, "windows or states"),
        ("llama", {"enable_lora": True}, "--enable-lora"),
        ("llama", {"environment": {"VLLM_PLUGINS": ""}}, "plugin"),
    ],
)
def test_what_cannot_be_right_is_refused(
    native: Native,
    model: Callable[..., Path],
    family: str,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(EngineError, match=reason):
        native.engine(model(family), **arguments)
