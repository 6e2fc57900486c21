"""Prompts, as the tokens that vLLM's server would make of them, and the block keys that vLLM would
give to these, computed without vLLM.

vLLM hashes a prompt block by block, each with the hash before it. A chunk's key is the hash of its
last block, and the index of its cache group. A request's adapter enters every block's hash, its
cache salt that of the first one. Images enter by hashes of what the model's processor makes of
them: such keys only an engine can compute.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvtier.errors import UNREADABLE, ConfigError, KVTierError
from kvtier.system.disk import read_bounded
from kvtier.types import GROUP_BYTES, BlockKey, Namespace, block_key
from kvtier.weight_fingerprints import adapter_files, fingerprint_adapter

_SEED = "vllm-none-hash"
"""What vLLM derives the hash before the first block from, unless PYTHONHASHSEED is set."""
_UNSET = "default"
"""What stands in a namespace for a seed that was not set."""
_SHA256, _XXHASH = "sha256_cbor", "xxhash_cbor"
_UNIT = " prefix_match_unit="
"""What comes before the number of tokens that are hashed at once, where these are no block."""
_NULL = b"\xf6"

Digest = Callable[[bytes], bytes]
_TOKEN_MAX = 1 << 31
_BYTES_MAX = 1 << 30
_FORM = '{"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"tokens": [1]}'


class Prompt(msgspec.Struct):
    """What of a request is in its keys."""

    tokens: list[int]
    cache_salt: str = ""
    adapter: tuple[str, str] | None = None
    """A LoRA adapter's name and path, as the server was given them."""
    fingerprint: bytes = b""
    """Of the adapter's files (see `lora_adapters.Adapters`)."""
    number: int = 0
    """In its file, 0 first."""


def chunk_keys(prompt: Prompt, namespace: Namespace) -> list[list[BlockKey]]:
    """For each whole chunk of a prompt, its keys in all cache groups.

    Raises KVTierError for a namespace whose keys only its own engine can compute.
    """
    digest, seed = _hash(namespace.facts)
    unit, per_chunk = _geometry(namespace.facts)
    hashes = list(_hashes(prompt, unit, digest, seed))
    last = hashes[per_chunk - 1 :: per_chunk]
    groups = range(len(namespace.group_bytes))
    return [
        salted((block_key(each, group) for group in groups), prompt.fingerprint) for each in last
    ]


def chunk_tokens(namespace: Namespace) -> int:
    """How many tokens a chunk of this namespace covers; raises KVTierError as `chunk_keys`."""
    _hash(namespace.facts)
    unit, per_chunk = _geometry(namespace.facts)
    return unit * per_chunk


def salted(keys: Iterable[bytes], salt: bytes) -> list[BlockKey]:
    """The keys that stand for these where something is added that vLLM's hashes do not cover."""
    if not salt:
        return [BlockKey(key) for key in keys]
    digest = xxhash.xxh3_128_digest
    return [BlockKey(digest(salt + key) + key[-GROUP_BYTES:]) for key in keys]


def _geometry(facts: Mapping[str, str]) -> tuple[int, int]:
    """How many tokens are hashed at once, and how many times that a chunk is."""
    if "group_tokens" in facts:
        raise KVTierError(
            f"its cache groups have blocks of {facts['group_tokens']} tokens: only its engine "
            "computes such keys"
        )
    try:
        # What vLLM hashes at once is in as many blocks as there are ranks that share a context.
        _, ranks, *_ = facts.get("context_parallel", "1,1").split(",")
        block = int(facts["block_tokens"]) * int(ranks)
        unit = int(facts.get("hash", "").partition(_UNIT)[2] or block)
        per_chunk = int(facts["chunk_blocks"]) * (block // unit)
    except (KeyError, ValueError, ZeroDivisionError):
        unit = per_chunk = 0
    if unit < 1 or per_chunk < 1:
        raise KVTierError(
            "its facts say nothing of the size of a block: it is no engine's, so ask about another "
            "with --namespace"
        )
    return unit, per_chunk


def _hash(facts: Mapping[str, str]) -> tuple[Digest, str]:
    """How this namespace's engine hashes, and what it begins with."""
    algorithm = facts.get("hash", "").partition(_UNIT)[0]
    seed = facts.get("hash_seed", _UNSET)
    if algorithm == _SHA256:
        return _sha256, _SEED if seed == _UNSET else seed
    if algorithm == _XXHASH and seed != _UNSET:
        return xxhash.xxh3_128_digest, seed
    why = f"{algorithm or 'no engine'}, which cannot be computed here"
    if algorithm == _XXHASH:
        why = f"{algorithm} without PYTHONHASHSEED, which differ in every process"
    elif algorithm:
        why = f"{algorithm}, which hashes pickles, and these may differ for equal prompts"
    raise KVTierError(
        f"its keys were made by {why}: serve with --prefix-caching-hash-algo {_SHA256}, as "
        "kvtier serve does"
    )


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _hashes(prompt: Prompt, unit: int, digest: Digest, seed: str) -> Iterator[bytes]:
    """The chained hash of every whole block, or part of one that is hashed."""
    tokens = prompt.tokens
    parent = digest(_text(seed))
    adapter = [("lora", *prompt.adapter)] if prompt.adapter else []
    salt = [("cache_salt", prompt.cache_salt)] if prompt.cache_salt else []
    first, later = _extras([*adapter, *salt]), _extras(adapter)
    for start in range(0, len(tokens) - unit + 1, unit):
        ids = b"".join([_head(0, token) for token in tokens[start : start + unit]])
        # An array of three: the hash before, the tokens as an array, and what else there is.
        body = b"\x83" + _head(2, len(parent)) + parent + _head(4, unit) + ids
        parent = digest(body + (later if start else first))
        yield parent


def _extras(extras: Sequence[Sequence[str]]) -> bytes:
    if not extras:
        return _NULL
    arrays = [_head(4, len(each)) + b"".join(map(_text, each)) for each in extras]
    return _head(4, len(arrays)) + b"".join(arrays)


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(3, len(data)) + data


def _head(major: int, number: int) -> bytes:
    """The head of a canonical CBOR item: its kind, and its value or length in the fewest bytes."""
    kind = major << 5
    if number < 24:
        return bytes([kind | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([kind | code]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit 64 bits")


# -- prompts from files ----------------------------------------------------------------------------


class _Lora(msgspec.Struct):
    name: str
    path: str


class _PromptLine(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    cache_salt: str | None = None
    lora: _Lora | None = None
    tools: Any = None
    multi_modal_data: Any = None


class Prompts(msgspec.Struct):
    """The prompts of a file whose keys can be computed, and why others cannot, a sentence each."""

    known: list[Prompt] = []
    skipped: list[str] = []

    def say_skipped(self, say: Callable[[str], None]) -> None:
        """Tell a person what was left out, and how much of all that is."""
        for each in self.skipped:
            say(each)
        if self.skipped:
            say(f"{len(self.skipped)} of {len(self.known) + len(self.skipped)} prompts are skipped")


class Unknowable(KVTierError):
    """Keys of this prompt only an engine can compute."""


def read_prompts(file: Path, model: str | None) -> Prompts:
    """The prompts of a file: a JSON object a line (.jsonl), or one text.

    Raises ConfigError for what cannot be read, KVTierError where no tokenizer can be had.
    """
    try:
        data = read_bounded(file, _BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            str(file), f"cannot be read: {error.strerror}", "name a file of prompts"
        ) from error
    tokenizer = cache(partial(_load_tokenizer, model))  # when a prompt is text
    if file.suffix != ".jsonl":
        return Prompts([Prompt(_tokens_of(_PromptLine(prompt=_decode(file, data)), tokenizer))])
    decoder, prompts = msgspec.json.Decoder(_PromptLine), Prompts()
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        place = f"{file}:{number}"
        try:
            line = decoder.decode(text)
        except UNREADABLE as error:
            raise ConfigError(place, f"no prompt: {error}", f"like {_FORM}") from error
        if line.prompt is None and line.messages is None and line.tokens is None:
            raise ConfigError(place, "no prompt, no messages and no tokens", f"like {_FORM}")
        try:
            prompt = _prompt_of(line, tokenizer)
        except Unknowable as error:
            prompts.skipped.append(f"{place} is skipped: {error}")
            continue
        prompt.number = len(prompts.known) + len(prompts.skipped)
        if prompt.tokens and not 0 <= min(prompt.tokens) <= max(prompt.tokens) < _TOKEN_MAX:
            raise ConfigError(place, "a token is out of range", "use 0 to 2**31 - 1")
        prompts.known.append(prompt)
    if not (prompts.known or prompts.skipped):
        raise ConfigError(str(file), "holds no prompt", f"write one a line, like {_FORM}")
    return prompts


def _decode(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), "is no UTF-8 text", "name a file of prompts") from error


def _prompt_of(line: _PromptLine, tokenizer: Callable[[], Any]) -> Prompt:
    if line.multi_modal_data is not None:
        raise Unknowable("it has images or other media, whose keys only the engine can compute")
    if line.tools is not None:
        raise Unknowable("it has tools, which only the server renders: give its tokens instead")
    prompt = Prompt(_tokens_of(line, tokenizer), line.cache_salt or "")
    if line.lora is not None:
        prompt.adapter = (line.lora.name, line.lora.path)
        prompt.fingerprint = _fingerprint(line.lora.path)
    return prompt


@cache
def _fingerprint(path: str) -> bytes:
    folder = Path(path)
    if not adapter_files(folder):
        raise Unknowable(
            f"the files of its adapter are not in {folder}: give the path that the server was "
            "given, where it can be read"
        )
    return fingerprint_adapter(folder)


def _load_tokenizer(model: str | None) -> Any:
    """The model's tokenizer; raises KVTierError where there is none."""
    if model is None:
        raise KVTierError("a text needs a tokenizer: name the model's folder with --model")
    try:
        with _without_torch():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except ImportError as error:
        raise KVTierError(
            "a text needs a tokenizer: run this where vLLM is installed, or give tokens"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise KVTierError(
            f"{model} has no tokenizer here: name a folder that has one with --model ({reason})"
        ) from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let transformers take torch for absent, unless it is imported already: no tokenizer needs it,
    and importing it takes two thirds of the time."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # for which Python says "not found"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of that
    try:
        yield
    finally:
        del sys.modules["torch"]


def _tokens_of(line: _PromptLine, tokenizer: Callable[[], Any]) -> list[int]:
    if line.tokens is not None:
        return line.tokens
    if line.messages is not None:
        messages = [message | {"content": _content(message)} for message in line.messages]
        text = _render(tokenizer(), messages)
        return _plain(tokenizer().encode(text, add_special_tokens=False))
    return _plain(tokenizer().encode(line.prompt or ""))


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Messages through the model's chat template, which is a program of the model's own."""
    template_error: type[Exception] = import_module("jinja2").TemplateError
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (ValueError, TypeError, LookupError, AttributeError, template_error) as error:
        reason = str(error).partition("\n")[0]
        raise Unknowable(f"the model's chat template does not take it: {reason}") from error
    return text


def _content(message: dict[str, Any]) -> Any:
    """A message's text; raises Unknowable if it is more than that."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if any(kind != "text" for kind in kinds):
        raise Unknowable("it has images or other media, whose keys only the engine can compute")
    if len(content) != 1:
        raise Unknowable("a message is in several parts, which servers join in different ways")
    return content[0].get("text")


def _plain(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens]
