"""kvtier's tiers below vLLM's own CPU tier, by vLLM's own tiering, on a real engine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST, Engine, EngineError
from engines.world import World, fill, flip, prompt, small_disk
from support.object import object_servers
from support.processes.dynamo_indexer import until

RCLONE = HOST.parents[3] / ".venv" / "bin" / "rclone"
NATIVE = HOST.with_name("native.py")
PROMPTS = [prompt(seed, 900) for seed in range(3)]
FULL = 900 // 128 * 128
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

    def objects(self) -> list[Path]:
        """Where a store's server has the blocks."""
        files = (self.world.folder / "data").rglob("*")
        return [each for each in files if each.is_file() and each.stat().st_size > 1 << 16]

    def lose_memory(self) -> None:
        """As after a restart of the machine."""
        for root in self.world.region.iterdir():
            shutil.rmtree(root)


@pytest.fixture
def native(world: World, model: Callable[..., Path]) -> Native:
    return Native(world, model("llama"))


@pytest.fixture
def right(plain_llama: Engine) -> list[list[int]]:
    """What an engine without any offloading answers."""
    return tokens(plain_llama.generate(prompts=PROMPTS, tokens=TOKENS))


@pytest.fixture
def server(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object_servers.ServerProcess]:
    """A real server of S3, whose bucket is the only tier below CPU memory."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_servers.SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with object_servers.rclone(native.world.folder, RCLONE) as server:
        tier = {"kind": "object", "capacity": "1GiB", "url": "s3://bucket/blocks"}
        tier |= {"endpoint": server.endpoint, "load_deadline": "60s"}
        native.stack["tiers"][1:] = [tier]
        yield server


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
    engine = native.engine()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    engine.kill()  # what it stores is under way
    engine = native.engine()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    assert engine.settle()
    assert engine.held()["nvme"] == len(PROMPTS) * FULL // 128
    engine.kill()
    engine = native.engine()
    for forget in (lambda: None, engine.forget_memory):
        forget()
        answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
        assert (tokens(answers), cached(answers)) == (right, [FULL] * 3)
    assert engine.corrupt() == 0
    engine.shut_down()
    assert "Traceback" not in engine.log.read_text()


def test_a_bucket_serves_a_second_machine(native: Native, right: list[list[int]]) -> None:
    store = {"kind": "object", "capacity": "1GiB", "url": f"file://{native.world.folder}/store"}
    native.stack["tiers"].append(store)
    filled(native, right).kill()
    shutil.rmtree(native.world.blocks)
    native.lose_memory()
    answers = native.engine().generate(prompts=PROMPTS, tokens=TOKENS)
    assert (tokens(answers), cached(answers)) == (right, [FULL] * 3)


def test_a_real_bucket_that_stalls_stops_and_lies(
    native: Native,
    right: list[list[int]],
    plain_llama: Engine,
    server: object_servers.ServerProcess,
) -> None:
    filled(native, right).kill()
    native.lose_memory()
    engine = native.engine()
    engine.rest(pause=1)

    def ask() -> list[int]:
        """How much of each prompt is found where only the bucket has it."""
        assert engine.forget_memory()
        engine.clear(tier=0)
        answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
        assert tokens(answers) == right
        return cached(answers)

    assert ask() == [FULL] * 3
    other = prompt(50, 900)
    expected = tokens(plain_llama.generate(prompts=[other], tokens=TOKENS))
    assert engine.forget_memory()
    engine.clear(tier=0)
    server.freeze()
    engine.begin(prompt=PROMPTS[0], tokens=TOKENS)
    engine.begin(prompt=other, tokens=TOKENS)
    assert engine.end() == {"tokens": expected[0], "cached": 0}, "it waits for no other's load"
    server.kill()
    assert engine.end() == {"tokens": right[0], "cached": 0}
    assert ask() == [0] * 3
    server.start()
    until(lambda: ask() == [FULL] * 3)
    for path in native.objects():
        flip(path, 6144)
    assert sum(ask()) < 3 * FULL
    assert engine.corrupt() > 0
    until(lambda: ask() == [FULL] * 3)  # they are written again
    for path in native.objects():
        path.unlink()
    assert sum(ask()) < 3 * FULL
    engine.shut_down()


def test_a_full_disk_is_written_when_there_is_room(native: Native, right: list[list[int]]) -> None:
    native.stack["tiers"][1]["capacity"] = "24MiB"
    with small_disk(native.world.blocks, "24m"):
        others = fill(native.world.blocks)
        engine = native.engine()

        def blocks_kept() -> int:
            engine.clear(tier=0)
            assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
            assert engine.forget_memory()
            return int(engine.held()["nvme"])

        assert blocks_kept() == 0
        others.unlink()
        until(lambda: blocks_kept() == len(PROMPTS) * FULL // 128)
        engine.clear(tier=0)
        answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
        assert (tokens(answers), cached(answers)) == (right, [FULL] * 3)
        engine.shut_down()


def test_damaged_blocks_are_misses(native: Native, right: list[list[int]]) -> None:
    filled(native, right).kill()
    native.lose_memory()
    slabs = sorted(native.world.blocks.rglob("*.slab"))
    assert slabs
    for slab in slabs:
        flip(slab, 1 << 20)
    engine = native.engine()
    answers = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    assert tokens(answers) == right
    assert sum(cached(answers)) < 3 * FULL
    assert engine.corrupt() > 0
    assert engine.settle()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right


def test_what_fails_is_a_miss(native: Native, right: list[list[int]]) -> None:
    """The mover hangs, is killed, the disk's folder is gone, the tiers are smaller than the
    prompts."""
    for tier in native.stack["tiers"]:
        tier["load_deadline"] = "3s"
    engine = filled(native, right)
    engine.clear(tier=0)
    assert engine.forget_memory()
    os.kill(engine.mover(), signal.SIGSTOP)
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    assert engine.settle()
    os.kill(engine.mover(), signal.SIGKILL)
    assert engine.forget_memory()
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    native.world.lose_disk()
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
