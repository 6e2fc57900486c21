"""Never slower than recomputing: a tier that has become slow is not asked for long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines.world import World, prompt

PROMPTS = [prompt(300 + seed, 1100) for seed in range(5)]
HIT = 1024
SLOWER = 6
"""How much longer a read takes then than a prompt to compute."""


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_slow_tier_is_left_alone(world: World, model: Callable[..., Path], family: str) -> None:
    """Be it for a model with one cache group, or with windows beside full attention."""
    stack = world.stack(load_deadline="10min") | {
        "load_policy": "cost_model",
        "mover": {"mode": "threads"},
    }
    with world.engine(model(family), stack=stack, max_num_batched_tokens=1024) as engine:
        engine.slow_prefill(pause=0.4)  # so small a model may be quicker than a busy disk
        cold = engine.generate(prompts=PROMPTS)
        reference = [each["tokens"] for each in cold]
        engine.settle()

        def ask_disk() -> list[int]:
            cached = []
            for number, each in enumerate(PROMPTS):
                engine.forget_engine_cache()
                engine.clear(tier=0)
                (found,) = engine.generate(prompts=[each])
                assert found["tokens"] == reference[number]
                cached.append(found["cached"])
            return cached

        assert ask_disk() == [HIT] * len(PROMPTS)
        pause = max(3.0, SLOWER * engine.costs()["prefill_seconds"])
        engine.slow_reads(pause=pause)
        engine.load_no_probes()
        # One slow load may be chance, two are not: unless a busy disk was slow just before them.
        assert ask_disk()[3:] == [0, 0]
        costs = engine.costs()
        assert costs["nvme"]["refused"] >= 2 * HIT // 256
        assert costs["device"]["samples"] > 0
        assert costs["prefill_seconds"] < pause

        engine.forget_engine_cache()
        engine.record_crowds()
        found = engine.generate(prompts=PROMPTS)
        assert [each["tokens"] for each in found] == reference
        crowds = engine.crowds()
        assert len(crowds) == len(PROMPTS), "a request is asked about once"
        # A prompt is more than a step. Some may have been added while the first was computed.
        assert crowds[0] == crowds[-1] == 0
        assert max(crowds) >= len(PROMPTS) - 3


def test_a_load_that_several_wait_for_hides_nobody(
    world: World, model: Callable[..., Path]
) -> None:
    """vLLM asks again, step by step, about a prompt whose head is being loaded for another one."""
    stack = world.stack(load_deadline="10min") | {
        "load_policy": "cost_model",
        "mover": {"mode": "threads"},
    }
    head = prompt(1, HIT)
    sharing = [[*head, *prompt(400 + seed, 76)] for seed in range(2)]
    with world.engine(model("llama"), stack=stack, max_num_batched_tokens=1024) as engine:
        engine.slow_prefill(pause=0.3)
        reference = [each["tokens"] for each in engine.generate(prompts=[*sharing, *PROMPTS])]
        engine.settle()
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.generate(prompts=sharing[:1])  # from disk: it is known to be quick
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.clear(tier=1)
        engine.generate(prompts=sharing[:1])
        engine.settle()
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.slow_reads(pause=max(1.0, 2 * engine.costs()["prefill_seconds"]))
        engine.record_crowds()
        found = engine.generate(prompts=[*sharing, *PROMPTS])
        assert [each["tokens"] for each in found] == reference
        assert len(engine.crowds()) > len(found), "the second was asked about again"
        assert max(engine.crowds()) >= len(PROMPTS) - 3


@pytest.mark.parametrize(
    ("family", "dtype", "blocks", "known"),
    [("qwen3_next", "bfloat16", None, True), ("llama", "float32", 12, False)],
)
def test_who_waits_counts_unless_blocks_are_short(
    world: World,
    model: Callable[..., Path],
    family: str,
    dtype: str,
    blocks: int | None,
    known: bool,
) -> None:
    """vLLM asks twice about most prompts of a hybrid model, because it computes whole blocks and
    what is left of a step is less; and about one for which it has no blocks, too."""
    few = {} if blocks is None else {"block_size": 128, "num_gpu_blocks_override": blocks}
    arguments = {"max_num_batched_tokens": 2048, "dtype": dtype, "max_model_len": 1280} | few
    stack = world.stack() | {"load_policy": "cost_model"}
    many = [prompt(500 + seed, 1100) for seed in range(12)]
    with world.engine(model(family), stack=stack, **arguments) as engine:
        engine.record_crowds()
        engine.generate(prompts=many, tokens=1)
        crowds = engine.crowds()
    assert len(crowds) > len(many), "some were asked about twice"
    assert (sum(waiting > 0 for waiting in crowds) > len(many) // 2) is known


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("llama", 2), ("gemma3", 1)])
def test_a_load_that_hangs_is_not_waited_for(
    world: World, model: Callable[..., Path], family: str, ranks: int
) -> None:
    """The disk stops amid a load, and goes on only when the prompt has been computed."""
    stack = world.stack(load_deadline="10min") | {
        "load_policy": "cost_model",
        "mover": {"mode": "threads"},
    }
    options = {"max_num_batched_tokens": 1024, "tensor_parallel_size": ranks}
    with world.engine(model(family), stack=stack, **options) as engine:
        reference = [each["tokens"] for each in engine.generate(prompts=PROMPTS)]
        engine.settle()

        def ask(number: int) -> int:
            engine.forget_engine_cache()
            (found,) = engine.generate(prompts=[PROMPTS[number]])
            assert found["tokens"] == reference[number]
            cached: int = found["cached"]
            return cached

        for number, late in ((1, 1), (2, 2)):
            engine.clear(tier=0)
            engine.forget_speeds()  # on a busy machine one load that hangs is reason enough
            engine.hold_reads()
            assert ask(number) == 0
            assert engine.facts()["late_loads"] == late
            engine.let_reads_go()
            engine.settle()
            assert ask(number) == HIT, "what came late was not lost"
        assert engine.facts()["failed_loads"] == 0


def test_an_engine_begins_with_what_the_last_one_learned(
    world: World, model: Callable[..., Path]
) -> None:
    """So its first hits are decided by the speeds of this machine."""
    rates = {"path": str(world.folder / "rates")}
    stack = world.stack(load_deadline="10min") | {"load_policy": "cost_model", "rates": rates}
    with world.engine(model("llama"), stack=stack) as engine:
        engine.generate(prompts=PROMPTS)
        engine.settle()
        engine.forget_engine_cache()
        engine.generate(prompts=PROMPTS)
        engine.settle()
        learned = engine.costs()
        engine.shut_down()
    (kept,) = (world.folder / "rates").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    with world.engine(model("llama"), stack=stack) as engine:
        begins = engine.costs()
        assert begins["device"]["samples"] == 1
        assert begins["device"]["latency"] == pytest.approx(learned["device"]["latency"], rel=0.5)
        seconds = learned["prefill_seconds"]
        assert begins["prefill_seconds"] == pytest.approx(seconds, rel=0.5)
