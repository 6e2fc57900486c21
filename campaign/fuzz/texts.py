"""Parsers of what people write: stacks, traces, prompts, a model's config.json."""

from __future__ import annotations

from pathlib import Path

import msgspec

from campaign.fuzz.harness import JSON_WORDS, Target
from kvtier.cli.expectations import read_shape
from kvtier.cli.trace_simulation import read_trace
from kvtier.config import load
from kvtier.errors import ConfigError, KVTierError
from kvtier.vllm.hints import Action, HintParser
from kvtier.vllm.identity.prompts import read_prompts

_STACK = b"""version: 1
name: fuzz
chunk_tokens: 256
mover: {mode: threads}
tiers:
  - kind: cpu
    path: FOLDER
    capacity: 4MiB
    load_deadline: 250ms
  - {kind: nvme, path: "FOLDER/nvme", capacity: 80%, write: on_evict}
  - kind: object
    url: "file://FOLDER/store"
    capacity: 16MiB
"""
_SHAPE = b"""{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
"num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128, "torch_dtype": "bfloat16",
"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"],
"quantization_config": {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}}"""
_HINTS = b"""{"session": "a", "retain_s": 60, "release": false, "prefetch": true, "actions": [
{"scope": "a", "directives": [{"start": 0, "end": 512, "priority": 50, "duration": 60.0}]},
{"ttl_seconds": 30, "session_id": "a", "include_current_request": true}]}"""
_YAML = (
    b"&a ",
    b"*a",
    b"<<: *a",
    b"!!python/object:os.system ",
    b"- ",
    b": ",
    b"|",
    b">",
    b"? ",
    b"%",
)


def targets(folder: Path) -> list[Target]:
    """All of them; files lie in this folder."""
    return [_stack(folder), _trace(folder), _prompts(folder), _shape(folder), _hints()]


def _stack(folder: Path) -> Target:
    path = folder / "stack.yaml"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        load(path)

    whole = _STACK.replace(b"FOLDER", str(folder).encode())
    corpus = [whole, b"version: 1\ntiers: []\n", whole.replace(b"fuzz", b"${KVTIER_NOT_SET:-x}")]
    words = (*_YAML, *JSON_WORDS, b"${HOME}", b"${NOT_SET}", b"kind: nvme", b"capacity: ", b"64GiB")
    return Target(
        name="stack file", corpus=corpus, parse=parse, typed=(ConfigError,), words=words, share=0.02
    )


def _hints() -> Target:
    """What comes with a request about the use of its blocks."""

    def parse(data: bytes) -> None:
        said = msgspec.json.decode(data)
        HintParser().parse(said, [])
        actions = said.get("actions") if isinstance(said, dict) else said
        for each in actions if isinstance(actions, list) else []:
            HintParser().parse(None, [Action("kv.retain", "1.0", each)])
            HintParser().parse(each, [Action("kv.release", "1.0", each)])

    no_json = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the server answers that
    return Target(name="hints", corpus=[_HINTS], parse=parse, typed=no_json, words=JSON_WORDS)


def _trace(folder: Path) -> Target:
    path = folder / "trace.jsonl"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        for request in read_trace(path):
            assert all(0 <= block < 1 << 63 for block in request.blocks)

    corpus = [b'{"timestamp": 27000, "hash_ids": [0, 1, 2]}\n{"timestamp": 1.5, "hash_ids": []}\n']
    return Target(
        name="trace", corpus=corpus, parse=parse, typed=(ConfigError,), words=JSON_WORDS, share=0.1
    )


def _prompts(folder: Path) -> Target:
    path = folder / "prompts.jsonl"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        for prompt in read_prompts(path, None).known:
            assert all(0 <= token < 1 << 31 for token in prompt.tokens)

    corpus = [
        b'{"tokens": [1, 2, 3], "cache_salt": "a"}\n{"prompt": "text"}\n',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
        b'{"tokens": [1], "tools": [], "multi_modal_data": null}\n',
    ]
    return Target(
        name="prompts",
        corpus=corpus,
        parse=parse,
        typed=(KVTierError,),
        words=JSON_WORDS,
        share=0.1,
    )


def _shape(folder: Path) -> Target:
    path = folder / "config.json"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        read_shape(path)

    return Target(
        name="config.json", corpus=[_SHAPE], parse=parse, typed=(ConfigError,), words=JSON_WORDS
    )
