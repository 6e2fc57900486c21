"""What people pin in a folder: one file a namespace, which its engines read within a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.backends.nvme.folder.files import pins_path
from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.core.retained import kept_file
from kvtier.core.retained.retained_blocks import BLOCKS_MAX, PINNED
from kvtier.errors import FormatError, MediumError, naming
from kvtier.system.disk import Disk
from kvtier.types import BlockKey


def pin(root: Path, home: Path, keys: Sequence[BlockKey], until: float, most: int) -> int:
    """Have these pinned until then, as long as not more than `most` are; how many of them are."""
    if not home.is_dir():
        raise MediumError(f"{root} has nothing of this namespace: an engine has to be there first")
    with folder_locked(root):
        pinned = _read(home)
        room = min(most, BLOCKS_MAX)
        for key in keys:
            if key in pinned or len(pinned) < room:
                pinned[key] = max(until, pinned.get(key, until))
        _write(home, pinned)
    return sum(key in pinned for key in keys)


def unpin(root: Path, home: Path, keys: Sequence[BlockKey] | None) -> int:
    """Have these pinned no more, or all; how many were."""
    if not home.is_dir():
        return 0
    with folder_locked(root):
        pinned = _read(home)
        gone = [key for key in (list(pinned) if keys is None else keys) if key in pinned]
        for key in gone:
            del pinned[key]
        _write(home, pinned)
    return len(gone)


def _read(home: Path) -> dict[BlockKey, float]:
    try:
        return kept_file.read_pins(pins_path(home), bytes.fromhex(home.name))
    except FormatError as error:
        path = pins_path(home)
        raise MediumError(f"{path} does not say what is pinned ({error}): remove it") from None


def _write(home: Path, pinned: Mapping[BlockKey, float]) -> None:
    path = pins_path(home)
    with naming(path):
        kept_file.write(Disk(), path, {PINNED: pinned}, bytes.fromhex(home.name))
