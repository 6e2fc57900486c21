"""Numbers, plots, and the shape of a model's KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier import amounts
from kvtier.cli.expectations import read_shape, shape_of
from kvtier.errors import ConfigError


class TestAmounts:
    @pytest.mark.parametrize(
        ("number", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 30) - 4096, "1 GiB"),
            (5 << 40, "5 TiB"),
        ],
    )
    def test_sizes(self, number: int, text: str) -> None:
        assert amounts.size(number) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0, "0 s"),
            (1.5e-7, "150 ns"),
            (2e-3, "2 ms"),
            (0.9999, "1 s"),
            (90, "1.5 min"),
            (2 * 86400, "2 d"),
        ],
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert amounts.duration(seconds) == text

    def test_ages_are_short(self) -> None:
        texts = [amounts.age(seconds) for seconds in (-1, 59.9, 60, 5400, 100_000)]
        assert texts == ["0s", "59s", "1m", "1h", "1d"]

    def test_rates_counts_and_shares(self) -> None:
        assert amounts.rate(2.5e9) == "2.5 GB/s"
        assert amounts.rate(80e6) == "80 MB/s"
        assert amounts.rate(999.9e6) == "1 GB/s"
        assert amounts.rate(2000) == "2 KB/s"
        assert amounts.count(999) == "999"
        assert amounts.count(999_900) == "1M"
        assert amounts.count(1_500_000) == "1.5M"
        assert amounts.share(1, 3) == "33.3%"
        assert amounts.share(1, 0) == "-"

    @pytest.mark.parametrize("part", [0, 1, 37, 99, 100, 250])
    def test_a_bar_has_its_width(self, part: int) -> None:
        assert len(amounts.bar(part, 100, 13)) == 13


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}

LATENT = {"num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SCHEME = {"type": "float", "num_bits": 8}
QUANTISED = [
    {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    {"quant_method": "modelopt", "kv_cache_scheme": SCHEME},
    {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"strategy": "tensor"}},
]
"""How checkpoints ask for a quantised cache."""
PLAIN = [None, {"quant_method": "fp8", "kv_cache_scheme": None}, "fp8"]
"""How they are quantised, and their cache is not."""


def shape(config: dict[str, Any], kv_dtype: str = "auto", ranks: int = 1) -> Any:
    return shape_of(config, "config.json", kv_dtype, ranks)


class TestShapes:
    def test_grouped_queries(self) -> None:
        found = shape(LLAMA)
        assert (found.attention, found.token_bytes) == ("gqa", 131072)
        assert found.load_bytes(1000) == 131072000
        assert found.unknown == []

    @pytest.mark.parametrize(
        ("config", "kv_dtype", "ranks", "token_bytes"),
        [
            (LLAMA | {"torch_dtype": "float32"}, "auto", 1, 131072),  # served with 16 bits
            (LLAMA | {"torch_dtype": "torch.float32"}, "auto", 1, 131072),
            (LLAMA | {"torch_dtype": "float32"}, "float32", 1, 262144),
            (LLAMA, "fp8", 1, 65536),
            (LLAMA, "auto", 8, 131072),
            (LLAMA, "auto", 16, 262144),  # more ranks than heads keep copies
            (LATENT, "auto", 1, 60 * 576 * 2),
            (LATENT, "auto", 4, 4 * 60 * 576 * 2),
            ({"model_type": "vision", "text_config": LLAMA}, "auto", 1, 131072),
            *[(LLAMA | {"quantization_config": each}, "auto", 1, 65536) for each in QUANTISED],
            *[(LLAMA | {"quantization_config": each}, "bfloat16", 1, 131072) for each in QUANTISED],
            *[(LLAMA | {"compression_config": each}, "auto", 1, 65536) for each in QUANTISED],
            *[(LLAMA | {"quantization_config": each}, "auto", 1, 131072) for each in PLAIN],
        ],
    )
    def test_bytes_for_a_token(
        self, config: dict[str, Any], kv_dtype: str, ranks: int, token_bytes: int
    ) -> None:
        found = shape(config, kv_dtype, ranks)
        assert (found.token_bytes, found.unknown) == (token_bytes, [])

    def test_a_cache_in_a_format_that_is_not_known_is_said(self) -> None:
        asked = {"kv_cache_quant_algo": "NVFP4"}
        found = shape(LLAMA | {"quantization_config": {"quantization": asked}})
        assert found.token_bytes == 131072
        assert "nvfp4" in found.unknown[0]

    def test_a_sparse_indexer_is_not_counted_and_that_is_said(self) -> None:
        config = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        assert "indexer" in shape(config | {"index_head_dim": 128}).unknown[0]

    def test_windows_are_stored_once_a_prompt(self) -> None:
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        config = LLAMA | {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 1024}
        found = shape(config)
        assert found.layers == {"full": 1, "window": 5, "state": 0, "nothing": 0}
        assert (found.token_bytes, found.prompt_bytes) == (4096, 5 * 1024 * 4096)
        assert found.load_bytes(10000) == 4096 * (10000 + 5 * 1024)

    @pytest.mark.parametrize(
        ("more", "layers"),
        [
            ({"sliding_window": 4096}, (0, 32)),
            ({"sliding_window": 4096, "use_sliding_window": False}, (32, 0)),
            ({"sliding_window": 512, "sliding_window_pattern": 4}, (8, 24)),
            ({"sliding_window": 512, "model_type": "gemma2"}, (16, 16)),
        ],
    )
    def test_windows_that_are_not_listed(
        self, more: dict[str, Any], layers: tuple[int, int]
    ) -> None:
        found = shape(LLAMA | more)
        assert (found.layers["full"], found.layers["window"]) == layers
        assert found.token_bytes == (layers[0] or layers[1]) * 4096

    @pytest.mark.parametrize(
        "more",
        [
            {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
            {"full_attention_interval": 4},
            {"attn_layer_period": 4, "attn_layer_offset": 1},
            {"hybrid_override_pattern": "MMM*" * 8},
            {"layers_block_type": ["mamba", "mamba", "mamba", "attention"] * 8},
        ],
    )
    def test_states_are_not_counted_and_that_is_said(self, more: dict[str, Any]) -> None:
        found = shape(LLAMA | more)
        assert (found.layers["full"], found.layers["state"]) == (8, 24)
        assert found.token_bytes == 8 * 4096
        assert "24 layers keep a state" in found.unknown[0]

    def test_layers_of_an_unknown_kind_are_named(self) -> None:
        found = shape(LLAMA | {"layer_types": ["quantum"] * 32})
        assert found.layers["full"] == 32
        assert "quantum" in found.unknown[0]

    @pytest.mark.parametrize(
        ("config", "says"),
        [
            ({}, "num_hidden_layers"),
            (LLAMA | {"num_hidden_layers": "many"}, "whole number"),
            (LLAMA | {"num_attention_heads": -4, "num_key_value_heads": 0}, "whole number"),
            (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
            (LLAMA | {"torch_dtype": "float3"}, "float3"),
            (LLAMA | {"num_hidden_layers": (1 << 31) - 1}, "2147483647 layers"),
            (LLAMA | {"layer_types": ["mamba"] * 32}, "no layer keeps something for each token"),
            (LLAMA | {"hidden_size": 8}, "no layer keeps something for each token"),
        ],
    )
    def test_what_is_not_understood_is_refused(self, config: dict[str, Any], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            shape(config)

    def test_a_checkpoint_that_asks_for_it_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        """As those of ModelOpt before 0.31 do."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        beside = tmp_path / "hf_quant_config.json"
        beside.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
        assert read_shape(tmp_path).token_bytes == 65536
        plain = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(plain))
        assert read_shape(tmp_path).token_bytes == 131072, "vLLM does not look there then"
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        beside.write_text("{")
        assert read_shape(tmp_path).token_bytes == 131072

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        assert read_shape(tmp_path).token_bytes == 131072
        assert read_shape(tmp_path / "config.json").token_bytes == 131072
        for text in ("[]", "{", "\0"):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(ConfigError, match="name a model's folder"):
                read_shape(tmp_path)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_shape(tmp_path / "none")
