"""Fingerprints of weights and adapters, without vLLM."""

from __future__ import annotations

import json
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.scheduler.tensors import write_tensors

from kvtier.errors import ConfigError
from kvtier.vllm.hooks.engine import changes_weights
from kvtier.vllm.identity.namespace_facts import (
    _adapters,
    _additional,
    _attention,
    _implementation,
    _media,
    _speculative,
    check_hash,
    configuration_of,
    environment_of,
)
from kvtier.weight_fingerprints import fingerprint_folder, fingerprint_weights, whole_name


def test_the_same_bytes_have_the_same_fingerprint(tmp_path: Path) -> None:
    one = write_tensors(tmp_path / "a", bytes(64))
    other = write_tensors(tmp_path / "b", bytes(64))
    assert fingerprint_folder(one) == fingerprint_folder(other)


@pytest.mark.parametrize("changed", [0, 40, 63])
def test_other_bytes_have_another(tmp_path: Path, changed: int) -> None:
    values = bytearray(64)
    values[changed] = 1
    one = write_tensors(tmp_path / "a", bytes(64))
    other = write_tensors(tmp_path / "b", bytes(values))
    assert fingerprint_folder(one) != fingerprint_folder(other)


def test_each_small_tensor_of_a_large_file_counts(tmp_path: Path) -> None:
    """Wherever in it: a piece of every so many bytes would miss it."""
    place, size = 40 << 10, 4 << 20
    spans = {"large": [0, place], "small": [place, place + 512], "rest": [place + 512, size]}
    tensors = {name: {"data_offsets": span} for name, span in spans.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors)
    found = set()
    for first in range(0, 4096, 512):
        values = bytearray(size)
        values[place : place + 512] = b"\x01" * 512
        head = header.ljust(2040 + first).encode()  # so that it begins elsewhere each time
        for content in (bytes(size), bytes(values)):
            file = tmp_path / "model.safetensors"
            file.write_bytes(len(head).to_bytes(8, "little") + head + content)
            found.add(fingerprint_folder(tmp_path))
    assert len(found) == 16


def test_names_and_sizes_of_files_count(tmp_path: Path) -> None:
    """Also where all pieces that are read are alike."""
    found = set()
    for name, size in (("a.bin", 4 << 20), ("b.bin", 4 << 20), ("a.bin", (4 << 20) + 1024)):
        (tmp_path / name).write_bytes(bytes(size))
        found.add(fingerprint_folder(tmp_path))
        (tmp_path / name).unlink()
    assert len(found) == 3


DEEP = (100_000).to_bytes(8, "little") + b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 9, (1 << 40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]", DEEP],
    ids=["empty", "no length", "cut short", "no object", "deep"],
)
def test_a_header_that_is_none_is_read_as_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint_folder(tmp_path)


def engine(model: Path | str) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, seed=0),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )


@pytest.mark.parametrize("size", [4096, 4 << 20])
def test_weights_in_a_single_file(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(size))
    before = fingerprint_weights(engine(file))
    assert fingerprint_weights(engine(file)) == before
    file.write_bytes(bytes(size - 1) + b"\x01")
    assert fingerprint_weights(engine(file)) != before


def test_a_folder_that_is_called_like_weights_is_none(tmp_path: Path) -> None:
    described = engine(write_tensors(tmp_path / "model", bytes(64)))
    before = fingerprint_weights(described)
    (tmp_path / "model" / "checkpoint.bin").mkdir()
    assert fingerprint_weights(described) == before


@pytest.mark.parametrize("where", ["nowhere", "/proc/self/mem"])
def test_weights_that_cannot_be_read_are_known_to_one_run_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The engine itself may need no more than the others."""
    described = engine(write_tensors(tmp_path / "model", bytes(64)))
    (tmp_path / "model" / "training_args.bin").symlink_to(where)
    assert len({fingerprint_weights(described) for _ in range(2)}) == 2
    assert "for this run only" in caplog.text
    assert "Errno" in caplog.text


def test_weights_that_are_made_up_are_known_by_their_seed() -> None:
    described = engine("somebody/model")
    described.load_config.load_format = "dummy"
    before = fingerprint_weights(described)
    assert fingerprint_weights(described) == before
    described.model_config.seed = 1
    assert fingerprint_weights(described) != before


@pytest.mark.parametrize("way", ["tensorizer", "modelexpress", "ipc_cache", "somebody's own"])
def test_weights_that_are_read_from_elsewhere(tmp_path: Path, way: str) -> None:
    """Whatever lies in the folder or file of the model's name."""
    folder = write_tensors(tmp_path / "model", bytes(64))
    for described in (engine(folder), engine(folder / "model.safetensors")):
        before = fingerprint_weights(described)
        assert fingerprint_weights(described) == before
        described.load_config.load_format = way
        found = {fingerprint_weights(described) for _ in range(2)}
        assert len(found - {before}) == 2


def test_weights_of_which_a_part_is_another_models(tmp_path: Path) -> None:
    described = engine(write_tensors(tmp_path / "model", bytes(64)))
    before = fingerprint_weights(described)
    text = write_tensors(tmp_path / "text", bytes(64))
    described.model_config.hf_config = SimpleNamespace(text_model_id=str(text), audio_model_id=None)
    with_it = fingerprint_weights(described)
    write_tensors(tmp_path / "text", b"\x01" * 64)
    assert len({before, with_it, fingerprint_weights(described)}) == 3


def test_the_files_of_a_folder_that_are_read_count(tmp_path: Path) -> None:
    """Two models in one folder, of which a pattern names one."""
    described = engine(write_tensors(tmp_path / "model", bytes(64)))
    load, found = described.load_config, set()
    load.load_format = "sharded_state"
    for extra in ({}, {"pattern": "one-{rank}.safetensors"}, {"pattern": "two-{rank}.safetensors"}):
        load.model_loader_extra_config = extra
        found.add(fingerprint_weights(described))
    assert len(found) == 3


def test_so_does_which_kind_of_files_is_read(tmp_path: Path) -> None:
    """A folder may hold other weights for each."""
    described = engine(write_tensors(tmp_path / "model", bytes(64)))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"other weights")
    index = tmp_path / "model" / "model.safetensors.index.json"
    found = []
    for way, named in (("auto", "a"), ("pt", "a"), ("auto", "b")):
        described.load_config.load_format = way
        index.write_text(json.dumps({"weight_map": {"one": f"model-{named}.safetensors"}}))
        found.append(fingerprint_weights(described))
    assert len(set(found)) == 3


def test_how_images_are_prepared_is_part_of_a_model(tmp_path: Path) -> None:
    write_tensors(tmp_path, bytes(64))
    before = fingerprint_weights(engine(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert fingerprint_weights(engine(tmp_path)) != before


def test_a_folder_has_one_name_however_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = ("model", "./model", "model/", str(tmp_path / "model"), f"{tmp_path}//model/")
    assert {whole_name(each) for each in said} == {str(tmp_path / "model")}
    monkeypatch.chdir(tmp_path / "other")
    assert whole_name("./model") == str(tmp_path / "other" / "model"), "which is another folder"
    (tmp_path / "current").symlink_to(tmp_path / "model")
    assert whole_name(str(tmp_path / "current")) == str(tmp_path / "current")
    for name in ("org/model", "s3://bucket/model"):
        assert whole_name(name) == name


def test_nor_does_its_configuration_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(name: str, layers: int = 2) -> SimpleNamespace:
        text = json.dumps({"_name_or_path": name, "layers": layers}, indent=2, sort_keys=True)
        return SimpleNamespace(to_json_string=lambda use_diff: f"{text}\n")

    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    whole = configuration_of(config(str(tmp_path / "model")))
    assert whole == config(str(tmp_path / "model")).to_json_string(use_diff=False)
    assert configuration_of(config("./model")) == whole
    assert configuration_of(config("./model", layers=3)) != whole
    assert '"org/model"' in configuration_of(config("org/model"))


def configured(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(to_json_string=lambda use_diff: json.dumps(settings))


def test_a_model_that_guesses_ahead_counts(tmp_path: Path) -> None:
    target = engine(write_tensors(tmp_path / "target", bytes(64)))
    draft = engine(write_tensors(tmp_path / "draft", bytes(64)))
    target.speculative_config = None
    assert _speculative(target, None) == "none"
    target.speculative_config = SimpleNamespace(
        method="eagle",
        kv_cache_dtype="fp8",
        model=draft.model_config.model,
        draft_model_config=draft.model_config,
        draft_load_config=None,
    )
    draft.model_config.hf_config = configured(rope_theta=1e4)
    before, called = _speculative(target, None), _speculative(target, "named")
    assert (before, called) == (_speculative(target, None), _speculative(target, "named"))
    assert str(tmp_path / "draft") in before
    write_tensors(tmp_path / "draft", b"\x01" * 64)
    assert _speculative(target, None) != before
    assert _speculative(target, "named") == called
    draft.model_config.hf_config = configured(rope_theta=1e6)
    assert _speculative(target, "named") != called, "the same weights compute something else"
    target.speculative_config.draft_model_config = target.model_config  # by n-grams, say
    assert _speculative(target, None) == f"eagle {tmp_path}/draft None,fp8,None"


@pytest.mark.parametrize("model", ["s3://bucket/model", "nobody/has-this", "configs"])
def test_weights_that_are_not_to_be_seen_are_for_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.json").write_text("{}")
    assert fingerprint_weights(engine(model)) != fingerprint_weights(engine(model))
    assert "give them a name in the extra config" in caplog.text


def test_hashes_that_are_random_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="sha256_cbor"):
        check_hash("xxhash", persistent=True)
    assert check_hash("xxhash", persistent=False) is None
    assert check_hash("sha256_cbor", persistent=True) is None
    warning = check_hash("sha256", persistent=True)
    assert warning is not None
    assert "sha256_cbor" in warning
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert check_hash("xxhash", persistent=True) is None


def test_libraries_that_vllm_may_choose_for_attention_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)
    config = SimpleNamespace(
        backend=None,
        backend_per_kind={},
        indexer_kv_dtype="bf16",
        use_prefill_query_quantization=False,
    )
    assert _attention(config) == "index=bf16", "as it was stored before, where there are none"
    installed["flashinfer-python"] = "0.6.1"
    assert _attention(config) == "index=bf16 flashinfer-python=0.6.1"


CHANGE_BLOCKS = """
    VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH
    VLLM_DISABLED_KERNELS VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
    VLLM_FLOAT32_MATMUL_PRECISION VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE
    VLLM_MLA_DISABLE VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_USE_DEEP_GEMM
    VLLM_PP_LAYER_PARTITION VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_USE_DEEP_GEMM
    XHS_VIDEO_JPEG_QUALITY
"""


def test_variables_that_change_what_stands_in_blocks_count() -> None:
    assert environment_of({}) == "default"
    assert environment_of({"VLLM_API_KEY": "secret", "HOME": "/", "VLLM_PORT": "1"}) == "default"
    set_ = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_BATCH_INVARIANT": "1", "VLLM_PORT": "1"}
    said = "VLLM_BATCH_INVARIANT=1 VLLM_SSM_CONV_STATE_LAYOUT=DS"
    assert environment_of(set_) == said
    assert environment_of(dict(reversed(set_.items()))) == said
    for name in CHANGE_BLOCKS.split():
        assert environment_of({name: "1"}) == f"{name}=1"
    assert environment_of({"VLLM_USE_DEEP_GEMM_E8M0": "0"}) != "default", (
        "scales are rounded, or not"
    )


def test_how_images_become_embeddings_counts() -> None:
    names = """
        mm_processor_kwargs media_io_kwargs mm_device_do_normalize mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method
    """
    found = {_media(SimpleNamespace(**{name: "another"})) for name in names.split()}
    assert len(found | {_media(None), _media(SimpleNamespace(mm_processor_cache_gb=0))}) == 9


def test_how_much_of_adapters_is_applied_counts() -> None:
    usual = {"target_modules": None, "lora_dtype": "auto", "enable_tower_connector_lora": False}

    def said(**settings: object) -> str:
        return _adapters(SimpleNamespace(**(usual | settings)), "bfloat16")

    assert _adapters(None, "bfloat16") == said() == said(lora_dtype="bfloat16") == "whole"
    assert said(target_modules=["q", "k"]) == said(target_modules=["k", "q"])
    others = [
        said(target_modules=["q"]),
        said(target_modules=["k"]),
        said(lora_dtype="float16"),
        said(enable_tower_connector_lora=True),
        said(enable_mixed_moe_lora_format=True),
        said(enable_moe_shared_loras=True),
        said(),
    ]
    assert len(set(others)) == len(others)


def test_settings_that_models_and_platforms_read_themselves_count() -> None:
    assert _additional({}) == "none"
    one, other = {"gdn_prefill_backend": "triton", "key": "secret"}, {"gdn_prefill_backend": "auto"}
    assert _additional(one) == _additional(dict(reversed(one.items()))) != _additional(other)
    assert "secret" not in _additional(one)
    assert _additional(SimpleNamespace(compute_hash=lambda: "abc")) == "abc"


def test_code_that_lies_beside_the_weights_counts(tmp_path: Path) -> None:
    load = engine(write_tensors(tmp_path, bytes(64))).load_config
    (tmp_path / "modeling_own.py").write_text("SCALE = 1.0\n")

    def said(**settings: object) -> str:
        model = SimpleNamespace(model=str(tmp_path), **({"trust_remote_code": True} | settings))
        return _implementation(model, load)

    before, untrusted = said(), said(trust_remote_code=False)
    assert said(code_revision="abc") != before == said()
    (tmp_path / "modeling_own.py").write_text("SCALE = 2.0\n")
    assert said() != before
    assert said(trust_remote_code=False) == untrusted, "nobody runs it"


def test_plugins_that_may_bring_models_of_their_own_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> str:
        model = SimpleNamespace(model=str(tmp_path), trust_remote_code=False)
        return _implementation(model, None)

    def plugin(version: str, module: str = "theirs") -> metadata.EntryPoint:
        point = metadata.EntryPoint("models", f"{module}.plugin:load", "vllm.general_plugins")
        vars(point).update(dist=SimpleNamespace(version=version))
        return point

    found: list[metadata.EntryPoint] = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: found)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    before = said()
    found[:] = [plugin("1.0", "kvtier.vllm"), plugin("1.0", "vllm.plugins")]
    assert said() == before
    found[:] = [plugin("1.0")]
    with_it = said()
    found[:] = [plugin("1.1")]
    assert len({before, with_it, said()}) == 3
    monkeypatch.setenv("VLLM_PLUGINS", "kvtier")
    assert said() == before, "it is not loaded"


def test_calls_by_which_weights_change() -> None:
    def load_weights(worker: object) -> None:
        """Of a worker's model."""

    changing = [
        "update_weights",
        "reload_weights",
        "finish_weight_update",
        "start_draft_weight_update",
        "update_named_param",
        "update_parameter_in_bucket",
        "load_state_dict",
        "broadcast_bucket",
        "reload_model",
        "load_checkpoint",
        "checkpoint_engine_update",
        "logits_head_weights_update",
        "updateWeights",
    ]
    with_some = partial(load_weights, 7)
    for call in (*changing, "_load_weight_shard", load_weights, with_some):
        assert changes_weights(call), call
    harmless = ["compute_weight_checksums", "init_weight_transfer_engine", "get_weight_version"]
    for call in (
        *harmless,
        "save_sharded_state",
        "save_weights",
        "get_named_params",
        "save_checkpoint",
        "compile_or_warm_up_model",
        "supports_models",
        "log_weights",
        "_get_weight_version",
        "check_weights",
        "initialize_weight_transfer",
        "supports_draft_weight_updates",
        "checkpoint_prepare",
        "checkpoint_restore",
        "check",
        "determine_available_memory",
        lambda worker: None,
        7,
    ):
        assert not changes_weights(call), call
