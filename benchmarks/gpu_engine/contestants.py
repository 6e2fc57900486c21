"""Who is measured, and with what: engines without a connector, with kvtier, and with vLLM's own
offloading; a model whose weights are made up (`--load-format dummy`); and sizes for a GPU, or small
enough for a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engines.families  # noqa: F401 - adds its families to those of tiny_model
import msgspec
from engines.engine import connector

from kvtier.vllm import tiny_model

GIB = 1 << 30


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """One set of sizes; bytes, tokens and seconds."""

    device: str
    family: str = "llama"
    model: dict[str, Any]
    """Settings of the model's configuration, beside those of the family."""
    vocabulary: int
    device_bytes: int
    """KV cache on the device."""
    cpu_bytes: int
    nvme_bytes: int
    short: int
    long: int
    """Prompts of so many tokens; tables call them 8k and 32k."""
    users: int
    turns: int
    first_turn: int
    each_turn: int
    decoding: int
    """So many requests decode at once."""
    decode_prompt: int
    decode_tokens: int
    step_tokens: int
    settle_s: float
    start_s: float
    """The longest start of an engine."""
    at_once: int
    """So many engines of the matrix."""
    engine: dict[str, Any]
    """Arguments of every engine."""
    environment: dict[str, str] = {}


GPU = Scale(
    device="cuda",
    model={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 40960,
    },
    vocabulary=32000,
    device_bytes=14 * GIB,
    cpu_bytes=44 * GIB,
    nvme_bytes=26 * GIB,
    short=8201,
    long=32777,
    users=40,
    turns=6,
    first_turn=2057,
    each_turn=1024,
    decoding=32,
    decode_prompt=1024,
    decode_tokens=128,
    step_tokens=8192,
    settle_s=12.0,
    start_s=90.0,
    at_once=3,
    engine={
        "max_model_len": 40960,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.25,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        },
    },
)
"""Llama-3-8B's shape in bfloat16: 128 KiB of KV a token."""

CPU = Scale(
    device="cpu",
    model={"vocab_size": 1000, "max_position_embeddings": 4096},
    vocabulary=1000,
    device_bytes=GIB // 64,
    cpu_bytes=GIB // 16,
    nvme_bytes=GIB // 4,
    short=601,
    long=1601,
    users=3,
    turns=2,
    first_turn=301,
    each_turn=128,
    decoding=4,
    decode_prompt=64,
    decode_tokens=8,
    step_tokens=1024,
    settle_s=1.0,
    start_s=400.0,
    at_once=1,
    engine={
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "dtype": "float32",
        "enforce_eager": True,
    },
    environment={
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
)
"""It tries the program, and says nothing of speed."""


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def make_model(folder: Path, family: str, settings: Mapping[str, Any] | None = None) -> Path:
    """Write the configuration of a small model of a family, with these settings instead of its."""
    config = tiny_model.FAMILIES[family].config(4, 256).to_dict() | dict(settings or {})
    config["architectures"] = [_ARCHITECTURES[family]]
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    return folder


WITHOUT, KVTIER, KVTIER_MEMORY = "without", "kvtier", "kvtier in memory"
OFFLOADING, TIERING = "vLLM offloading", "vLLM tiering"


class Places:
    """Where contestants keep what they have; given back when a run ends."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self.memory = memory
        self.disk = folder / "disk"
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_memory(self) -> None:
        """As after a loss of power: CPU memory goes."""
        for path in self.memory.iterdir():
            shutil.rmtree(path)

    def clear(self) -> None:
        self.forget_memory()
        shutil.rmtree(self.disk, ignore_errors=True)

    def close(self) -> None:
        self.clear()
        self.memory.rmdir()

    def left_in_memory(self) -> int:
        """Bytes."""
        return sum(path.stat().st_blocks * 512 for path in self.memory.rglob("*"))


def stack(
    places: Places,
    cpu_bytes: int,
    nvme_bytes: int,
    **more: Any,
) -> dict[str, Any]:
    """kvtier's: CPU memory, and a disk if it has bytes."""
    tiers: list[dict[str, Any]] = [
        {"kind": "cpu", "path": str(places.memory), "capacity": cpu_bytes, "load_deadline": "30s"}
    ]
    if nvme_bytes:
        places.disk.mkdir(parents=True, exist_ok=True)
        tiers.append(
            {
                "kind": "nvme",
                "path": str(places.disk / "kvtier"),
                "capacity": nvme_bytes,
                "free_floor": "1GiB",
                "load_deadline": "30s",
            }
        )
    rates = {"path": str(places.folder / "rates")}
    prefetch = {"warmup_share": 0.0}  # what comes from disk is to be seen
    fixed = {"version": 1, "name": "gpu-engine", "rates": rates, "prefetch": prefetch}
    return {**fixed, "tiers": tiers, **more}


def transfer_config(
    contestant: str, scale: Scale, places: Places, **more: Any
) -> dict[str, Any] | None:
    """What vLLM is told; `more` are settings of kvtier's stack."""
    if contestant == WITHOUT:
        return None
    if contestant in (KVTIER, KVTIER_MEMORY):
        disk = scale.nvme_bytes if contestant == KVTIER else 0
        return connector(stack(places, scale.cpu_bytes, disk, **more))
    extra: dict[str, Any] = {"cpu_bytes_to_use": scale.cpu_bytes}
    if contestant == TIERING:
        root = places.disk / "tiering"
        root.mkdir(parents=True, exist_ok=True)
        extra |= {
            "spec_name": "TieringOffloadingSpec",
            "block_size": 256,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
