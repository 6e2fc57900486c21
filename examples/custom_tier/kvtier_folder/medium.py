"""What both halves must agree on: where a block's bytes are, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from kvtier.record.record import record_bytes
from kvtier.types import BlockKey, LoadStoreSpec, Namespace

BLOCK, PART = ".kv", ".part"
"""A committed block, and one whose bytes are still on their way."""


class FolderSpec(LoadStoreSpec, tag="folder"):
    """File names in the tier's folder."""

    medium: ClassVar[str] = "folder"
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.names[start:stop])

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls([name for piece in pieces for name in piece.names])


def size_of(key: BlockKey, namespace: Namespace) -> int:
    """What a block takes: the header and its padded payload."""
    return record_bytes(namespace.payload_of(key))


def key_of(path: Path) -> BlockKey | None:
    """The key that a committed block's file is named after; None for a file that is none."""
    try:
        return BlockKey(bytes.fromhex(path.stem)) if path.suffix == BLOCK else None
    except ValueError:
        return None
