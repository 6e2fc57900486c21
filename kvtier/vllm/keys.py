"""The block keys that vLLM gives to a prompt, computed without vLLM.

vLLM hashes a prompt block by block, each with the hash before it; a chunk's key is the hash of its
last block, and the index of its cache group. What else enters vLLM's hash (adapters, images, cache
salts) is not known here: such requests have other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from kvtier.errors import KVTierError
from kvtier.types import BlockKey, Namespace, block_key

_SEED = "vllm-none-hash"
"""What vLLM derives the hash before the first block from, unless PYTHONHASHSEED is set."""
_ALGORITHM = "sha256_cbor"


def chunk_keys(tokens: Sequence[int], namespace: Namespace) -> list[list[BlockKey]]:
    """For each whole chunk of a prompt, its keys in all cache groups.

    Raises KVTierError for a namespace whose keys only its own engine can compute.
    """
    facts = namespace.facts
    block, per_chunk = _geometry(facts)
    hashes = list(_hashes(tokens, block, facts.get("hash_seed", "default")))
    last = hashes[per_chunk - 1 :: per_chunk]
    groups = range(len(namespace.group_bytes))
    return [[block_key(each, group) for group in groups] for each in last]


def chunk_tokens(namespace: Namespace) -> int:
    """How many tokens a chunk of this namespace covers; raises KVTierError as `chunk_keys`."""
    block, per_chunk = _geometry(namespace.facts)
    return block * per_chunk


def _geometry(facts: Mapping[str, str]) -> tuple[int, int]:
    algorithm = facts.get("hash", "")
    if algorithm != _ALGORITHM:
        raise KVTierError(
            f"its keys were made by {algorithm or 'no engine'}, which cannot be computed here: "
            f"serve with --prefix-caching-hash-algo {_ALGORITHM}, as kvtier serve does"
        )
    try:
        block, per_chunk = int(facts["block_tokens"]), int(facts["chunk_blocks"])
    except (KeyError, ValueError):
        block = per_chunk = 0
    if block < 1 or per_chunk < 1:
        raise KVTierError("its facts say nothing of the size of a block: it is no engine's")
    return block, per_chunk


def _hashes(tokens: Sequence[int], block: int, seed: str) -> Iterator[bytes]:
    """The chained hash of every whole block."""
    parent = hashlib.sha256(_text(_SEED if seed == "default" else seed)).digest()
    for start in range(0, len(tokens) - block + 1, block):
        ids = b"".join([_head(0, token) for token in tokens[start : start + block]])
        # An array of three: the hash before, the tokens as an array, and nothing else (null).
        body = b"\x83" + _head(2, len(parent)) + parent + _head(4, block) + ids + b"\xf6"
        parent = hashlib.sha256(body).digest()
        yield parent


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
