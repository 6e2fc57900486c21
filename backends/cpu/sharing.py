"""What an engine's processes tell each other in the first page of their region, beside its header.

Nothing depends on it: who believes what a dead process has said copies more slowly, no more.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from kvtier.record.record import Buffer
from kvtier.slab.layout import TABLE_AT

_ENGINE_AT, _ENGINE_BYTES = 144, 16
_PINNED_AT = 256
_PINNED = struct.Struct("<I")
_RANKS_MAX = (TABLE_AT - _PINNED_AT) // _PINNED.size


def begin(table: Buffer) -> None:
    """For a new owner: its ranks have not said anything yet."""
    table[_ENGINE_AT : _ENGINE_AT + _ENGINE_BYTES] = bytes(_ENGINE_BYTES)
    table[_PINNED_AT:TABLE_AT] = bytes(TABLE_AT - _PINNED_AT)


def name_engine(table: Buffer, engine: str) -> None:
    """For its owner: whose region it is, in a word that the engine's workers know, too."""
    table[_ENGINE_AT : _ENGINE_AT + _ENGINE_BYTES] = _digest(engine)


def is_of(path: Path, engine: str) -> bool:
    """Whether this region says that it is this engine's."""
    return _engine_of(path) == _digest(engine)


def _engine_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(TABLE_AT)[_ENGINE_AT : _ENGINE_AT + _ENGINE_BYTES]
    except OSError:
        return b""


def _digest(engine: str) -> bytes:
    return hashlib.blake2b(engine.encode(), digest_size=_ENGINE_BYTES).digest()


def note_pinned(table: Buffer, rank: int, slots: int) -> None:
    """For a rank: so many slots, in the order of all (`pinning_order`), are pinned for its device;
    said at first with none."""
    if rank < _RANKS_MAX:
        _PINNED.pack_into(table, _PINNED_AT + rank * _PINNED.size, slots + 1)


def pinned(table: Buffer) -> int | None:
    """How many slots are pinned for all ranks; None if none pins."""
    least = None
    for rank in range(_RANKS_MAX):
        (said,) = _PINNED.unpack_from(table, _PINNED_AT + rank * _PINNED.size)
        if not said:
            break
        least = said - 1 if least is None else min(least, said - 1)
    return least
