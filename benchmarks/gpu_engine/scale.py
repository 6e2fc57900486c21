"""The model, its prompts and the sizes of caches: for a GPU, or small enough for a CPU."""

from __future__ import annotations

from typing import Any

import msgspec

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
