"""Engines that are refused at start, with one sentence that says why and what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
from engines.engine import HOST, Engine, EngineError, connector
from engines.world import World

from kvtier.errors import ConfigError

UNCACHED = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
OTHER_DTYPE = "take --dtype bfloat16|is incompatible with dtype"
"""By kvtier, and from 0.33 on by vLLM itself."""
SECOND_RUNNER = {"host": HOST.with_name("second_runner.py"), "fresh": True}


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("hrm_text", {}, "attend to later ones"),
        ("llama", {"pooling": "MEAN"}, "computes prompts as a whole only"),
        ("blip2", UNCACHED, "equal numbers do not mean equal images"),
        (
            "gpt_oss",
            SECOND_RUNNER | {"enable_return_routed_experts": True, "max_model_len": 1408},
            "nobody knows of a token that was loaded",
        ),
        ("llama", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}, OTHER_DTYPE),
        (
            "llama",
            {"environment": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}},
            "one that has just ended",
        ),
        (
            "llama",
            {"environment": {"VLLM_PLUGINS": "somebody's"}, "fresh": True},
            "add kvtier to this variable",
        ),
    ],
)
def test_an_engine_is_refused(
    world: World, model: Callable[..., Path], family: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        world.engine(model(family), stack=world.stack(), **options)


def test_an_engine_that_only_stores_is_refused(world: World, model: Callable[..., Path]) -> None:
    """Also if that is said of the connector around kvtier's: vLLM goes by its role."""
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [connector(world.stack())]},
    }
    with pytest.raises(EngineError, match='write "kv_both"'):
        world.engine(model("llama"), transfer=transfer)


def test_ranks_with_schedulers_of_their_own_are_refused(
    world: World, model: Callable[..., Path]
) -> None:
    """As torchrun starts them. A load would end in different steps of each, and the engine die."""
    for left in Path("/dev/shm").glob("-tp:0-*cpushm_*"):  # by a run that was killed: vLLM gives
        left.unlink()  # what such ranks share the same name each time, and they would wait for ever
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

    def start(rank: int) -> str:
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        options: dict[str, Any] = {
            "environment": named | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": 2,
        }
        with pytest.raises(EngineError) as refused:
            Engine(
                world.folder / f"rank-{rank}.log",
                model=str(model("llama")),
                stack=world.stack(),
                **options,
            )
        return str(refused.value)

    with ThreadPoolExecutor() as both:
        for said in both.map(start, range(2)):
            assert "each rank has a scheduler of its own" in said


class ExecutorWithExternalLauncher:
    """vLLM's, by its name."""


class _OnesOwn(ExecutorWithExternalLauncher):
    """Made from it."""


def _engine(**changed: Any) -> Any:
    """vLLM's configuration, as far as it is looked at, of an engine that can be served; with some
    of it changed, by names like `cache_config.cache_dtype`."""
    config = Made(
        parallel_config=Made(
            nnodes_within_dp=1,
            enable_fault_tolerance=False,
            world_size=2,
            distributed_executor_backend="mp",
            decode_context_parallel_size=1,
        ),
        cache_config=Made(cache_dtype="auto", enable_prefix_caching=True),
        model_config=Made(
            multimodal_config=None, is_chunked_prefill_supported=True, rswa_window=None
        ),
        attention_config=Made(hisparse_config=None),
        aux_output_config=Made(enabled=False),
        kv_transfer_config=Made(
            kv_role="kv_both", kv_connector_extra_config={}, has_connector=lambda _: False
        ),
    )
    for name, value in changed.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part), field, value)
    return config


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ({}, None),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, None),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_role"),
        ({"parallel_config__enable_fault_tolerance": True}, "--enable-fault-tolerance"),
        ({"parallel_config__distributed_executor_backend": object}, None),
        ({"parallel_config__distributed_executor_backend": _OnesOwn}, "executor_backend"),
        ({"parallel_config__nnodes_within_dp": 2}, "nnodes"),
        ({"parallel_config__decode_context_parallel_size": 2}, None),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype"),
        ({"attention_config__hisparse_config": object()}, "hisparse_config"),
        ({"model_config__rswa_window": 128}, None),
    ],
)
def test_modes_that_need_more_than_this_machine(
    changed: dict[str, Any], setting: str | None
) -> None:
    """They run on GPUs, or on several machines: what is refused is told by the configuration."""
    _check(_engine(**changed), setting)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_modes_that_are_refused_together() -> None:
    decoding = {"kv_connector_extra_config": {"offload_prompt_only": False}}
    windowed = _engine(model_config__rswa_window=128)
    windowed.kv_transfer_config = Made(**vars(windowed.kv_transfer_config) | decoding)
    _check(windowed, "offload_prompt_only")

    import vllm

    shared = _engine(
        parallel_config__decode_context_parallel_size=2,
        kv_transfer_config__has_connector=lambda name: name == "NixlConnector",
    )
    older = vllm.__version__.startswith("0.32")
    _check(shared, "--decode-context-parallel-size" if older else None)


def _check(config: Any, setting: str | None) -> None:
    from kvtier.vllm.unsupported_modes import refuse

    groups = Made(kv_cache_groups=[Made(kv_cache_spec=Made())])
    with pytest.raises(ConfigError, match=setting) if setting else nullcontext():
        refuse(config, groups, [config.kv_transfer_config], {})
