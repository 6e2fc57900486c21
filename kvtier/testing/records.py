"""Blocks whose bytes follow from their key, so that anyone can tell right bytes from wrong."""

from __future__ import annotations

import hashlib
import mmap

from kvtier.core.records.record import HEADER_BYTES, Buffer, Header, record_bytes, seal, verify
from kvtier.types import BlockKey, Namespace, Outcome, block_key

NAMESPACE = Namespace(facts={"model": "testing"}, group_bytes=(8192,))
LARGE = Namespace(facts={"model": "large"}, group_bytes=(8 << 20,))
GROUPED = Namespace(facts={"model": "grouped"}, group_bytes=(8192, 4608, 12, 20480), parts=4)


def make_keys(count: int, *, start: int = 0, group: int = 0) -> list[BlockKey]:
    """Distinct keys, the same ones every time."""
    return [
        block_key(hashlib.sha256(index.to_bytes(8, "big")).digest(), group)
        for index in range(start, start + count)
    ]


def payload(key: BlockKey, namespace: Namespace = NAMESPACE) -> bytes:
    """The one right payload of a key."""
    return hashlib.shake_128(namespace.digest + key).digest(namespace.payload_of(key))


def blank(namespace: Namespace = NAMESPACE) -> Buffer:
    """An aligned buffer with room for any record of the namespace."""
    return memoryview(mmap.mmap(-1, record_bytes(namespace.payload_bytes)))


def fill(record: Buffer, key: BlockKey, namespace: Namespace = NAMESPACE) -> None:
    """Write a key's right record into a buffer."""
    body = payload(key, namespace)
    record[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    seal(record, Header(key, namespace.digest, len(body), namespace.parts))


def sealed(key: BlockKey, namespace: Namespace = NAMESPACE) -> Buffer:
    """A key's right record in a buffer of its own."""
    record = blank(namespace)
    fill(record, key, namespace)
    return record


def prove(record: Buffer, key: BlockKey, namespace: Namespace = NAMESPACE) -> Outcome:
    """What the mover would say of a loaded record; wrong bytes that it would serve raise.

    This is promise one: bytes that pass `verify` and are not the key's own are the one thing that
    no fault, crash or race may ever bring about.
    """
    outcome = verify(record, key, namespace.digest)
    if outcome.ok:
        right = payload(key, namespace)
        if record[HEADER_BYTES : HEADER_BYTES + len(right)] != right:
            raise AssertionError(f"wrong bytes were served for {key.hex()}")
    return outcome
