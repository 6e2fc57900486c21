"""What to expect of a stack for a model: tokens, break-even lengths, times to first token.

How many bytes of KV cache a model has for each token comes from its config.json. What is not
understood there is said, never guessed over: `unknown` lists it, and an architecture whose cache
cannot be told at all is a ConfigError.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.cli.bench import Measured
from kvtier.cli.inspect import inspector_of
from kvtier.config import StackConfig
from kvtier.errors import ConfigError
from kvtier.record.record import record_bytes
from kvtier.system.disk import read_bounded

_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
_CONFIG_BYTES_MAX = 16 << 20
_LAYERS_MAX = 10_000
_TOKENS_MAX = 1 << 22
_FULL = {"full_attention", "attention", "global", "full"}
_WINDOW = {"sliding_attention", "chunked_attention", "local_attention", "sliding", "local"}
_STATE = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "rwkv"}
_NONE = {"mlp", "moe", "none"}
_ALTERNATING = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Model types whose every n-th layer sees everything, where the file does not list its layers."""
_HYBRID_LETTERS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}


class KVShape(msgspec.Struct, kw_only=True):
    """The KV cache of one model, of all ranks together."""

    model: str
    attention: str
    """ "gqa" (also multi-head and multi-query), or "mla"."""
    layers: dict[str, int]
    """Layers by what they keep: full, window, state, nothing."""
    window: int | None
    token_bytes_per_layer: int
    dtype: str
    ranks: int
    unknown: list[str] = []
    """What this figure leaves out, in words."""

    @property
    def token_bytes(self) -> int:
        """Bytes that are stored for each token; if there are only windowed layers, at most."""
        return self.token_bytes_per_layer * (self.layers["full"] or self.layers["window"])

    @property
    def prompt_bytes(self) -> int:
        """Bytes that are stored once a prompt besides: the windows at its end."""
        windowed = self.layers["window"] if self.layers["full"] else 0
        return self.token_bytes_per_layer * windowed * (self.window or 0)

    def load_bytes(self, tokens: int) -> int:
        """Bytes that must be loaded for a prompt: of windowed layers, only the window's."""
        seen = min(tokens, self.window) if self.window else tokens
        full, windowed = self.layers["full"], self.layers["window"]
        return self.token_bytes_per_layer * (full * tokens + windowed * seen)


def read_shape(folder: Path, kv_dtype: str = "auto", ranks: int = 1) -> KVShape:
    """Read a model folder (or the config.json itself); raises ConfigError."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        text = read_bounded(path, _CONFIG_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", "name a model's folder"
        ) from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: of very deep nesting
        raise ConfigError(str(path), f"is no JSON: {error}", "name a model's folder") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), "is no JSON object", "name a model's folder")
    if values.get("quantization_config") is None:  # ModelOpt before 0.31 has it beside
        with contextlib.suppress(OSError, ValueError, RecursionError):
            beside = read_bounded(path.with_name("hf_quant_config.json"), _CONFIG_BYTES_MAX)
            values["quantization_config"] = json.loads(beside)
    return shape_of(values, str(path), kv_dtype, ranks)


def shape_of(values: dict[str, Any], place: str, kv_dtype: str, ranks: int) -> KVShape:
    """The shape that a config.json's values describe."""
    inner = values.get("text_config") or values.get("language_config") or values.get("llm_config")
    config = {**values, **inner} if isinstance(inner, dict) else values
    if config.get("is_encoder_decoder"):
        raise ConfigError(place, "an encoder-decoder model", "kvtier knows decoder-only models")
    kinds, unknown = _layer_kinds(config, place)
    dtype = _dtype(config, place, kv_dtype, unknown)
    attention, per_layer = _per_layer(config, place, dtype, ranks, unknown)
    window = _number(config, place, "sliding_window", "attention_chunk_size", default=0)
    if not per_layer * (kinds["full"] + kinds["window"]):
        raise ConfigError(
            place, "no layer keeps something for each token", "kvtier plan has nothing to count"
        )
    if kinds["window"] and not window:
        unknown.append("the length of the attention window: windowed layers count as full")
        kinds["full"] += kinds.pop("window")
    _note_rest(config, kinds, unknown)
    return KVShape(
        model=str(values.get("_name_or_path") or config.get("model_type") or "model"),
        attention=attention,
        layers={name: kinds[name] for name in ("full", "window", "state", "nothing")},
        window=window if kinds["window"] else None,
        token_bytes_per_layer=per_layer,
        dtype=dtype,
        ranks=ranks,
        unknown=unknown,
    )


def _dtype(config: dict[str, Any], place: str, kv_dtype: str, unknown: list[str]) -> str:
    name = kv_dtype
    if kv_dtype == "auto" and (asked := _quantised(config)):
        if asked in _DTYPE_BYTES:
            return asked
        unknown.append(f"the checkpoint asks for a KV cache of {asked}: it is counted unquantised")
    if kv_dtype == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        # vLLM serves models of 32 bits with 16, unless it is told otherwise
        name = {"float32": "bfloat16"}.get(name.removeprefix("torch."), name)
    name = name.removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ConfigError(
            place, f"dtype {name!r} is not known", f"one of {', '.join(_DTYPE_BYTES)}"
        )
    return name


def _quantised(config: dict[str, Any]) -> str | None:
    """The data type of KV caches that a quantised checkpoint asks for, and vLLM follows."""
    outer = config.get("quantization_config") or config.get("compression_config")
    inner = outer.get("quantization") if isinstance(outer, dict) else None
    for part in [each for each in (inner, outer) if isinstance(each, dict)]:
        for asked in (part.get("kv_cache_scheme"), part.get("kv_cache_quant_algo")):
            if isinstance(asked, dict):
                asked = f"{asked.get('type')}{asked.get('num_bits')}"
            if asked:
                return {"float8": "fp8"}.get(str(asked).lower(), str(asked).lower())
    return None


def _per_layer(
    config: dict[str, Any], place: str, dtype: str, ranks: int, unknown: list[str]
) -> tuple[str, int]:
    """The kind of attention, and its bytes for a token and a layer on all ranks."""
    size = _DTYPE_BYTES[dtype]
    rank = _number(config, place, "kv_lora_rank", default=0)
    if rank:
        rope = _number(config, place, "qk_rope_head_dim", default=0)
        if not rope:
            unknown.append("qk_rope_head_dim: the rotary part of each token is not counted")
        if "index_head_dim" in config:
            unknown.append("the cache of the sparse attention's indexer is not counted")
        return "mla", (rank + rope) * size * ranks  # each rank keeps the whole vector
    heads = _number(config, place, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _number(config, place, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=0)
    if not kv_heads:
        kv_heads = 1 if config.get("multi_query") else heads
    width = _number(config, place, "head_dim", "attention_head_dim", default=0)
    if not width:
        width = _number(config, place, "hidden_size", "n_embd", "d_model") // heads
    value_width = _number(config, place, "v_head_dim", default=width)
    return "gqa", max(kv_heads, ranks) * (width + value_width) * size


def _layer_kinds(config: dict[str, Any], place: str) -> tuple[Counter[str], list[str]]:
    """How many layers keep what, and what could not be told."""
    unknown: list[str] = []
    kinds: Counter[str] = Counter()
    for name in _layer_names(config, place):
        if name in _FULL:
            kinds["full"] += 1
        elif name in _WINDOW:
            kinds["window"] += 1
        elif name in _STATE:
            kinds["state"] += 1
        elif name in _NONE:
            kinds["nothing"] += 1
        else:
            kinds["full"] += 1
            unknown.append(f"layers of kind {name!r} count as full attention")
    shared = _number(config, place, "num_kv_shared_layers", default=0)
    if shared:
        unknown.append(f"{shared} layers share the cache of others and are counted all the same")
    return kinds, list(dict.fromkeys(unknown))


def _layer_names(config: dict[str, Any], place: str) -> Sequence[str]:
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed) and listed:
        return listed
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_HYBRID_LETTERS.get(letter, letter) for letter in pattern]
    count = _number(config, place, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if count > _LAYERS_MAX:
        raise ConfigError(place, f"{count} layers", "kvtier plan does not understand this model")
    period = _number(config, place, "attn_layer_period", default=0)
    if period:
        offset = _number(config, place, "attn_layer_offset", default=0)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    interval = _number(config, place, "full_attention_interval", default=0)
    if interval:
        return [
            "attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)
        ]
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if not windowed:
        return ["attention"] * count
    every = _number(config, place, "sliding_window_pattern", default=0)
    every = every or _ALTERNATING.get(str(config.get("model_type")), 0)
    if not every:
        return ["sliding"] * count
    return ["attention" if (i + 1) % every == 0 else "sliding" for i in range(count)]


def _note_rest(config: dict[str, Any], kinds: Counter[str], unknown: list[str]) -> None:
    if kinds["state"]:
        unknown.append(
            f"{kinds['state']} layers keep a state of fixed size for each sequence instead of "
            "something for each token: what a stored state takes is not counted"
        )
    if "global_head_dim" in config:
        unknown.append("global_head_dim: all layers are counted with head_dim")
    if config.get("num_nextn_predict_layers"):
        unknown.append("layers for speculative decoding are not counted")


def _number(config: dict[str, Any], place: str, *names: str, default: int | None = None) -> int:
    """The first of these values that is there, a whole number."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise ConfigError(place, f"{name} is {value!r}", "a whole number belongs there")
        if value or default is not None:
            return value
    if default is None:
        raise ConfigError(
            place, f"says nothing of {names[0]}", "kvtier plan does not understand this model"
        )
    return default


# -- what its tiers make of it ---------------------------------------------------------------------


class Link(msgspec.Struct, frozen=True):
    """How fast blocks come from one tier, and where that is known from."""

    bytes_per_s: float
    latency_s: float
    source: str


class Outlook(msgspec.Struct, kw_only=True):
    """What to expect of one tier."""

    tier: int
    kind: str
    capacity: int
    chunks: int
    tokens: int
    link: Link | None
    load_tokens_per_s: float | None = None
    break_even_tokens: int | None = None
    """From this length on loading is quicker than recomputing; None if it never is."""
    first_token_s: float | None = None
    """For a prompt of whose whole chunks this tier has as many as it can hold."""


class Expectation(msgspec.Struct, kw_only=True):
    """The whole answer, apart from a trace."""

    shape: KVShape
    chunk_tokens: int
    chunk_bytes: int
    prompt_tokens: int
    prefill_tokens_per_s: float | None
    recompute_s: float | None
    tiers: list[Outlook]


def expect(
    config: StackConfig,
    shape: KVShape,
    links: dict[int, Link],
    device: Link | None,
    prefill: float | None,
    prompt: int,
) -> Expectation:
    """Put numbers together; `links` by tier."""
    tokens = chunk_of(config, shape)
    return Expectation(
        shape=shape,
        chunk_tokens=tokens,
        chunk_bytes=shape.token_bytes * tokens,
        prompt_tokens=prompt,
        prefill_tokens_per_s=prefill,
        recompute_s=None if prefill is None else prompt / prefill,
        tiers=[
            _tier(config, shape, tier, links.get(tier), device, prefill, prompt)
            for tier in range(len(config.tiers))
        ],
    )


def chunk_of(config: StackConfig, shape: KVShape) -> int:
    """The tokens of one stored block: no more than a window has."""
    return min(config.chunk_tokens, shape.window or config.chunk_tokens)


def _tier(
    config: StackConfig,
    shape: KVShape,
    tier: int,
    link: Link | None,
    device: Link | None,
    prefill: float | None,
    prompt: int,
) -> Outlook:
    settings = config.tiers[tier]
    step = chunk_of(config, shape)
    capacity = inspector_of(config, tier).capacity()
    chunks = capacity // record_bytes(shape.token_bytes * step)
    outlook = Outlook(
        tier=tier,
        kind=settings.kind,
        capacity=capacity,
        chunks=chunks,
        tokens=chunks * step,
        link=link,
    )
    if link is None:
        return outlook
    outlook.load_tokens_per_s = prompt / load_seconds(shape, prompt, link, device)
    if prefill is not None:
        outlook.break_even_tokens = _break_even(shape, link, device, prefill, step)
        whole = min(prompt // step, chunks) * step
        rest = max(1, prompt - whole)
        load = load_seconds(shape, whole, link, device) if whole else 0.0
        outlook.first_token_s = load + rest / prefill
    return outlook


def load_seconds(shape: KVShape, tokens: int, link: Link, device: Link | None) -> float:
    """How long so many tokens take to the engine: the slower of the two streams."""
    size = shape.load_bytes(tokens)
    seconds = link.latency_s + size / link.bytes_per_s
    if device is not None:
        seconds = max(seconds, device.latency_s + size / device.bytes_per_s)
    return seconds


def _break_even(
    shape: KVShape, link: Link, device: Link | None, prefill: float, step: int
) -> int | None:
    """The first whole number of chunks that loads in less time than it is computed in."""

    def wins(chunks: int) -> bool:
        tokens = chunks * step
        return load_seconds(shape, tokens, link, device) < tokens / prefill

    most = _TOKENS_MAX // step
    if not wins(most):
        return None
    low, high = 0, most  # the gap between both only grows with the length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high * step


def links_of(measured: list[Measured], chunk_bytes: int) -> dict[int, Link]:
    """What a measurement says of each tier; tiers that gave nothing are left out."""
    links = {}
    for tier, found in enumerate(measured):
        if found.load_bytes_per_s > 0:
            latency = max(0.0, found.block_s - chunk_bytes / found.load_bytes_per_s)
            links[tier] = Link(found.load_bytes_per_s, latency, "measured")
    return links
