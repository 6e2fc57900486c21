"""The block keys that vLLM gives to a prompt, computed without vLLM.

vLLM hashes a prompt block by block, each with the hash before it; a chunk's key is the hash of its
last block, and the index of its cache group. A request's adapter enters every block's hash, its
cache salt that of the first one. Images enter by hashes of what the model's processor makes of
them: such keys only an engine can compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import xxhash

from kvtier.errors import KVTierError
from kvtier.types import GROUP_BYTES, BlockKey, Namespace, block_key

_SEED = "vllm-none-hash"
"""What vLLM derives the hash before the first block from, unless PYTHONHASHSEED is set."""
_UNSET = "default"
"""What stands in a namespace for a seed that was not set."""
_SHA256, _XXHASH = "sha256_cbor", "xxhash_cbor"
_UNIT = " prefix_match_unit="
"""What comes before the number of tokens that are hashed at once, where these are no block."""
_NULL = b"\xf6"

Digest = Callable[[bytes], bytes]


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
