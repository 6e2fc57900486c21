"""What makes KV cache another one: weights, adapters, salts, chunks, and a reset."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.adapter import make_adapter
from engines.engine import EngineError
from engines.world import World, prompt

from kvtier.vllm.hooks.versions import installed
from kvtier.vllm.identity.namespace_facts import _platform, facts_of
from kvtier.weight_fingerprints import fingerprint_weights

PROMPT = prompt(7, 1100)
HIT = 1024


def test_weights_chunks_and_resets(world: World, model: Callable[..., Path]) -> None:
    """Five lives on the same folders; what each may find of the earlier ones."""
    served = world.folder / "model"
    shutil.copytree(model("llama"), served)
    stack = world.stack()
    chosen = {"attention_backend": "CPU_ATTN"}

    with world.engine(served, stack=stack, **chosen) as engine:
        (first,) = engine.generate(prompts=[PROMPT])
        (salted,) = engine.generate(prompts=[PROMPT], more=[{"cache_salt": "other"}])
        assert salted == {**first, "cached": 0}
        engine.forget_engine_cache()
        (again,) = engine.generate(prompts=[PROMPT], more=[{"cache_salt": "third"}])
        assert again["cached"] == 0
        engine.settle()
        check_facts(world, engine.facts()["namespace"])

    for path in model("llama", seed=1).glob("*.safetensors"):
        shutil.copy(path, served / path.name)
    with world.engine(served, stack=stack, **chosen) as engine:
        (other,) = engine.generate(prompts=[PROMPT])
        assert other["cached"] == 0
        assert other["tokens"] != first["tokens"]
        assert engine.forget_everything()
        (again,) = engine.generate(prompts=[PROMPT])
        assert again == other, "a reset leaves no tier that serves"
        engine.forget_engine_cache()
        (warm,) = engine.generate(prompts=[PROMPT])
        assert warm == {**other, "cached": HIT}, "what was stored after the reset serves this run"
        engine.settle()

    with world.engine(served, stack=stack, **chosen) as engine:
        (fresh,) = engine.generate(prompts=[PROMPT])
        assert fresh == other, "what was stored after a reset is for no other run"
        engine.settle()

    with world.engine(served, stack=stack | {"chunk_tokens": 128}, **chosen) as engine:
        (smaller,) = engine.generate(prompts=[PROMPT])
        assert smaller == other
        engine.settle()

    with world.engine(served, stack=stack, **chosen) as engine:
        (known,) = engine.generate(prompts=[PROMPT])
        assert known == {**other, "cached": HIT}, "and what was right all the time is still there"


def check_facts(world: World, facts: dict[str, str]) -> None:
    """They are written beside the blocks."""
    (described,) = world.blocks.rglob("namespace.json")
    assert json.loads(described.read_text())["facts"] == facts
    assert "all=CPU_ATTN" in facts["attention"]
    assert facts["kv_layout"] == "LBHNC"
    assert (facts["dtype"], facts["block_tokens"]) == ("torch.float32", "128")


def test_adapters(world: World, model: Callable[..., Path]) -> None:
    """vLLM's hashes know an adapter by name and path: other bytes must be another adapter."""
    adapter = world.folder / "adapter"
    make_adapter(adapter, 1)
    named = {"adapter": ["tuned", 1, str(adapter)]}
    options = {"enable_lora": True, "max_lora_rank": 8, "stack": world.stack()}

    with world.engine(model("llama"), **options) as engine:
        (plain,) = engine.generate(prompts=[PROMPT])
        tuned = engine.generate_with(prompt=PROMPT, **named)
        assert tuned["cached"] == 0
        assert tuned["tokens"] != plain["tokens"]
        engine.forget_engine_cache()
        assert engine.generate_with(prompt=PROMPT, **named) == {**tuned, "cached": HIT}
        engine.settle()

    with world.engine(model("llama"), lora_target_modules=["o_proj"], **options) as engine:
        found = engine.generate_with(prompt=PROMPT, **named)
        assert found == plain, "nothing of it is applied, nor what was kept when it was"
        engine.settle()

    make_adapter(adapter, 2)
    with world.engine(model("llama"), **options) as engine:
        other = engine.generate_with(prompt=PROMPT, **named)
        assert other["cached"] == 0
        assert other["tokens"] != tuned["tokens"]
        assert engine.generate(prompts=[PROMPT]) == [plain], "on a CPU nothing is kept without one"


def test_adapters_that_change_before_they_are_used(
    world: World, model: Callable[..., Path]
) -> None:
    """The engine reads one long before the first request, as servers do with `--lora-modules`, and
    another when it computes the first request, for which it may have waited."""
    early, late = (["early", 1, str(world.folder / "a")], ["late", 2, str(world.folder / "b")])
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "stack": world.stack()}
    for each in (early, late):
        make_adapter(Path(each[2]), 1)
    with world.engine(model("llama"), **options) as engine:
        assert engine.take_adapter(adapter=early)
        make_adapter(Path(early[2]), 2)
        first = engine.generate_with(prompt=PROMPT, adapter=early)
        engine.begin(prompt=PROMPT, tokens=16, steps=0, adapter=late)
        make_adapter(Path(late[2]), 2)
        second = engine.end()
        assert first["tokens"] != second["tokens"], "one was read before, and one after the change"
        engine.settle()
        assert engine.facts()["mistakes"] == 0

    make_adapter(Path(late[2]), 1)
    with world.engine(model("llama"), **options) as engine:
        for named, right in ((early, second), (late, first)):
            found = engine.generate_with(prompt=PROMPT, adapter=named)
            assert found == {"tokens": right["tokens"], "cached": 0}


def test_adapters_that_take_the_place_of_others(world: World, model: Callable[..., Path]) -> None:
    """A request goes on with the other one when its prompt is half computed."""
    first, second = (["tuned", 1, str(world.folder / each)] for each in "ab")
    for seed, (_, _, folder) in enumerate((first, second)):
        make_adapter(Path(folder), seed)
    options = {"enable_lora": True, "max_lora_rank": 8, "stack": world.stack()}
    options |= {"max_num_batched_tokens": 512, "async_scheduling": False}
    with world.engine(model("llama"), **options) as engine:
        assert engine.take_adapter(adapter=first)
        engine.begin(prompt=PROMPT, tokens=16, steps=1, adapter=first)
        assert engine.take_adapter(adapter=second, in_place=True)
        mixed = engine.end()
        right = engine.generate_with(prompt=PROMPT, adapter=second)
        engine.settle()
        assert engine.facts()["mistakes"] == 0

    with world.engine(model("llama"), **options) as engine:
        found = engine.generate_with(prompt=PROMPT, adapter=first)
        assert found["cached"] == 0
        assert found["tokens"] != mixed["tokens"]
        third = [*second[:1], 2, *second[2:]]
        assert engine.generate_with(prompt=PROMPT, adapter=third) == {**right, "cached": HIT}


def test_what_adapters_spoil_is_not_kept(world: World, model: Callable[..., Path]) -> None:
    """On a CPU vLLM computes requests without an adapter with that of others beside them."""
    adapter = world.folder / "adapter"
    make_adapter(adapter, 1)
    named = {"adapter": ["tuned", 1, str(adapter)]}
    options = {"enable_lora": True, "max_lora_rank": 8, "stack": world.stack()}
    tuned, plain = prompt(71, 1100), prompt(72, 1100)
    with world.engine(model("llama"), **options) as engine:
        engine.generate(prompts=[tuned, plain], more=[named, {}])
        engine.settle()
        engine.forget_engine_cache()
        assert engine.generate_with(prompt=plain)["cached"] == 0
        assert engine.generate_with(prompt=tuned, **named)["cached"] == HIT
        assert engine.facts()["mistakes"] == 0
        assert "of requests without a LoRA adapter nothing is kept" in engine.log.read_text()


def test_states_that_the_environment_turns_round(world: World, model: Callable[..., Path]) -> None:
    """Each engine finds its own, and no configuration of vLLM's tells them apart."""
    options = {"dtype": "bfloat16", "stack": world.stack()}
    turned = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
    for environment in ({}, turned):
        with world.engine(model("qwen3_next"), environment=environment, **options) as engine:
            (first,) = engine.generate(prompts=[PROMPT])
            assert first["cached"] == 0
            engine.settle()
            engine.forget_engine_cache()
            (again,) = engine.generate(prompts=[PROMPT])
            assert (again["tokens"], again["cached"] > 0) == (first["tokens"], True)


def test_random_hashes_are_refused(world: World, model: Callable[..., Path]) -> None:
    with pytest.raises(EngineError, match="use --prefix-caching-hash-algo sha256_cbor"):
        world.engine(model("llama"), stack=world.stack(), prefix_caching_hash_algo="xxhash")


def test_a_cache_that_is_too_narrow_is_refused(world: World, model: Callable[..., Path]) -> None:
    """vLLM takes it, and writes its blocks across each other; as wide as the model it is served."""
    with pytest.raises(EngineError, match="--kv-cache-dtype"):
        world.engine(model("llama"), stack=world.stack(), kv_cache_dtype="bfloat16")
    other = (
        "bfloat16" if installed().version.startswith("0.33") else "float16"
    )  # which that refuses
    options = {"dtype": "bfloat16", "kv_cache_dtype": other, "stack": world.stack()}
    with world.engine(model("llama"), **options) as engine:
        (first,) = engine.generate(prompts=[PROMPT])
        engine.settle()
        engine.forget_engine_cache()
        assert engine.generate(prompts=[PROMPT]) == [{**first, "cached": HIT}]


def test_an_untested_version_is_served_with_a_warning(
    world: World, model: Callable[..., Path]
) -> None:
    """All that is touched is there: this one only says that it is another."""
    with world.engine(model("llama"), stack=world.stack(), pretend="0.30.9") as engine:
        assert engine.log.read_text().count("vLLM 0.30.9 was never tested") == 1


def test_a_stack_that_is_wrong_is_refused(world: World, model: Callable[..., Path]) -> None:
    stack = world.stack()
    stack["tiers"][0]["capacity"] = "a lot"
    with pytest.raises(EngineError, match=r"tiers\[0\].capacity"):
        world.engine(model("llama"), stack=stack)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 1024,
}
LIKE_LLAMA_4 = {"made_from": "llama4"}
COOLED = {"attn_temperature_tuning": True}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_processors_that_lay_blocks_out_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two with AVX-512 one has AMX, and vLLM packs the keys in its blocks otherwise there."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    found = set()
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        found.add((_get_attn_isa(torch.bfloat16, 128, 64), _platform()))
    (one, its_platform), (other, others_platform) = found
    assert one != other
    assert its_platform != others_platform


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
@pytest.mark.parametrize(
    ("family", "always", "changed", "same"),
    [
        ("llama", {}, {"hf_overrides": {"rms_norm_eps": 1e-3}}, False),
        ("llama", {}, {"kv_cache_dtype_skip_layers": ["0"]}, False),
        ("llama", {}, {"attention_config": {"use_prefill_query_quantization": True}}, False),
        ("llama", {}, {"kernel_config": {"moe_backend": "marlin"}}, False),
        ("llama", {}, {"kernel_config": {"enable_jit_warmup": False}}, True),
        ("llama", {}, {"attention_config": {"use_trtllm_attention": False}}, False),
        ("llama", {}, {"enable_lora": True}, True),
        ("llama", {}, {"enable_lora": True, "enable_moe_shared_loras": True}, False),
        ("llama", {}, {"max_model_len": 512}, True),
        ("llama", {"rope_parameters": LONG_ROPE}, {"max_model_len": 512}, False),
        ("llama", {"rope_parameters": LONG_ROPE}, {"max_model_len": -1}, True),
        ("llama", {}, {"override_generation_config": COOLED}, True),
        ("llama", LIKE_LLAMA_4, {"override_generation_config": COOLED}, False),
        ("llama", LIKE_LLAMA_4, {"override_generation_config": {"temperature": 0.5}}, True),
        ("blip2", {}, {"mm_processor_kwargs": {"do_normalize": False}}, False),
        ("blip2", {}, {"mm_processor_cache_gb": 0}, True),
    ],
)
def test_settings_that_change_what_is_computed(
    model: Callable[..., Path],
    family: str,
    always: dict[str, Any],
    changed: dict[str, Any],
    same: bool,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def facts(**settings: Any) -> dict[str, str]:
        settings = {"dtype": "float32", "hf_overrides": always} | settings
        config = EngineArgs(model=str(model(family)), **settings).create_engine_config()
        return facts_of(config, 1)

    assert (facts() == facts(**changed)) is same


def test_a_longest_prompt_that_was_made_to_fit(model: Callable[..., Path]) -> None:
    """The model is made before it is known how long a prompt there is memory for."""
    from vllm.engine.arg_utils import EngineArgs

    def facts(said: int, fits: int) -> dict[str, str]:
        folder, longer = str(model("llama")), {"rope_parameters": LONG_ROPE}
        settings = EngineArgs(folder, dtype="float32", hf_overrides=longer, max_model_len=said)
        config = settings.create_engine_config()
        config.model_config.max_model_len = fits
        return facts_of(config, 1)

    assert facts(-1, 512) != facts(512, 512)
    assert facts(-1, 512) == facts(-1, 528)


@pytest.fixture(scope="module")
def settled(model: Callable[..., Path]) -> Any:
    """What vLLM makes of its settings."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(model("llama")), dtype="float32").create_engine_config()


NAMED = SimpleNamespace(name="ANOTHER")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("model", "model dtype quantization quantization_config"),
        ("model", "model_impl model_class_overrides code_revision"),
        ("cache", "cache_dtype kv_cache_dtype_skip_layers kv_cache_layout block_size"),
        ("cache", "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode use_replayssm"),
        ("cache", "replayssm_buffer_len use_kda_recoverssm prefix_caching_hash_algo"),
        ("cache", "prefix_match_unit"),
        ("mamba", "backend enable_stochastic_rounding"),
        ("parallel", "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size"),
        ("parallel", "decode_context_parallel_size cp_kv_cache_interleave_size"),
        ("parallel", "dcp_kv_cache_interleave_size"),
        ("attention", "backend backend_per_kind indexer_kv_dtype use_trtllm_attention"),
        ("attention", "disable_flashinfer_q_quantization use_prefill_query_quantization"),
        ("attention", "indexer_sparse_logits use_non_causal"),
        ("kernel", "moe_backend linear_backend linear_backend_per_quant"),
        ("load", "load_format model_loader_extra_config"),
    ],
)
def test_each_setting_by_which_blocks_differ_is_a_fact(
    settled: Any, monkeypatch: pytest.MonkeyPatch, config: str, names: str
) -> None:
    others = {
        "backend": NAMED,
        "backend_per_kind": {"full": NAMED},
        "load_format": "safetensors",
        "model_loader_extra_config": {"pattern": "another"},
    }
    before = facts_of(settled, 1)
    assert facts_of(settled, 1) == before
    for name in names.split():
        with monkeypatch.context() as patch:
            patch.setitem(
                vars(getattr(settled, f"{config}_config")), name, others.get(name, "else")
            )
            assert facts_of(settled, 1) != before, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_so_is_what_is_no_single_setting(settled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [facts_of(settled, 1), facts_of(settled, 2), facts_of(settled, 1, "mine")]
    assert facts_of(settled, 1, None, [16, 16]) == found[0]
    found.append(facts_of(settled, 1, None, [16, 32]))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    found.append(facts_of(settled, 1))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found.append(facts_of(settled, 1))
    monkeypatch.setattr("vllm.__version__", "0.0")
    found.append(facts_of(settled, 1))
    monkeypatch.setattr("kvtier.vllm.identity.namespace_facts.RECORD_VERSION", 99)
    found.append(facts_of(settled, 1))
    monkeypatch.setitem(vars(settled), "additional_config", {"its own": 1})
    found.append(facts_of(settled, 1))
    guessing = SimpleNamespace(method="ngram", model="ngram", draft_model_config=None)
    monkeypatch.setitem(vars(settled), "speculative_config", guessing)
    found.append(facts_of(settled, 1))
    assert all(one not in found[:at] for at, one in enumerate(found))


def test_weights_in_a_folder_of_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's files, where --download-dir says; but not if it is another hub's model."""
    kept = tmp_path / "models--somebody--model"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="somebody/model", revision=None, seed=0),
        load_config=SimpleNamespace(load_format="auto", download_dir=str(tmp_path)),
    )
    found = []
    for content in (b"one", b"two"):
        (snapshot / "model.safetensors").write_bytes(content)
        found.append([fingerprint_weights(config), fingerprint_weights(config)])
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert fingerprint_weights(config) != fingerprint_weights(config)
