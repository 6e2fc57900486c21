"""Folders with the configuration of a model; its weights are made up (`--load-format dummy`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engines.families  # noqa: F401 - adds its families to those of tiny_model

from kvtier.vllm.serving import tiny_model

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def make(folder: Path, family: str, settings: Mapping[str, Any] | None = None) -> Path:
    """Write the configuration of a small model of a family, with these settings instead of its."""
    config = tiny_model.FAMILIES[family].config(4, 256).to_dict() | dict(settings or {})
    config["architectures"] = [_ARCHITECTURES[family]]
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    return folder
