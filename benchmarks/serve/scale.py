"""How large the model, the caches and the requests of `benchmarks.serve` are."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from benchmarks.engine.served import DTYPE, ITEM_BYTES


class Chats(msgspec.Struct, frozen=True):
    """Chats of the multi-turn script, so many of them at a time."""

    chats: int
    users: int
    turns: int
    first: int
    """Tokens before the first message."""
    more: int
    """Tokens of each message."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """One set of sizes; all but the model's in tokens."""

    layers: int
    hidden: int
    token_bytes: int
    """Of KV cache."""
    dtype: str
    own: int
    """What the engine's own cache holds."""
    memory: int
    """What CPU memory holds, but for `thirty_users`, who get a quarter of what they need."""
    longest: int
    step: int
    prefix: int
    suffix: int
    trace_block: int
    """So many tokens for each block of the trace."""
    chats: Chats
    thirty_users: Chats
    decoded: int
    at_once: bool
    """Whether all servers live at the same time."""


_LAYERS = int(os.environ.get("LAYERS", "4"))
_HIDDEN = int(os.environ.get("HIDDEN", "512"))

CPU = Scale(
    layers=_LAYERS,
    hidden=_HIDDEN,
    token_bytes=_LAYERS * _HIDDEN * ITEM_BYTES,  # half as many heads of keys and of values
    dtype=DTYPE,
    own=16 << 10,
    memory=192 << 10,
    longest=4096,
    step=2048,
    prefix=1024,
    suffix=64,
    trace_block=64,
    chats=Chats(24, 12, 8, 1280, 256),
    thirty_users=Chats(30, 30, 20, 1024, 96),
    decoded=16,
    at_once=True,
)
GPU = Scale(
    layers=32,
    hidden=4096,
    token_bytes=128 << 10,
    dtype="bfloat16",
    own=112 << 10,
    memory=352 << 10,
    longest=40960,
    step=8192,
    prefix=8192,
    suffix=256,
    trace_block=512,
    chats=Chats(160, 64, 8, 10 << 10, 2048),
    thirty_users=Chats(30, 30, 20, 4096, 512),
    decoded=64,
    at_once=False,
)
SCALE = GPU if os.environ.get("SCALE") == "gpu" else CPU


def weightless_model(folder: Path) -> Path:
    """A model of the scale's shape, for an engine that makes its weights up."""
    from benchmarks.gpu_engine.contestants import make_model
    from kvtier.vllm import tiny_model

    shape = {
        "hidden_size": SCALE.hidden,
        "intermediate_size": 14336,
        "num_hidden_layers": SCALE.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": SCALE.longest,
        "vocab_size": tiny_model.VOCABULARY_SIZE,
    }
    make_model(folder, "llama", shape)
    tiny_model.save_tokenizer(folder)
    return folder
