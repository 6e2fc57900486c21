"""A record of all changes to files, and what a crash at one of its moments may leave.

The model asks more than common file systems do. Of what was written to a file since it was synced,
any part may be there, by pages or by sectors, in any order; a length may be there without its data.
Of the names in a folder those that were there when the folder was synced are; of later ones a
beginning, for each folder by itself. To sync a file saves none of its names.
"""

from __future__ import annotations

import enum
import random
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_HEAD = struct.Struct("<IIIIQQ")
SECTOR = 512
PAGE = 4096


class Kind(enum.IntEnum):
    """As recorder.c numbers them."""

    CREATE = 1
    WRITE = 2
    SIZE = 3
    SYNC = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9


_NAMES = frozenset({Kind.CREATE, Kind.RENAME, Kind.LINK, Kind.UNLINK, Kind.MKDIR, Kind.RMDIR})


class Op(NamedTuple):
    """One change."""

    kind: Kind
    inode: int
    at: int
    name: str
    data: bytes

    @property
    def folder(self) -> str:
        """Whose names it changes: one folder's, for files are renamed in place."""
        return str(PurePosixPath(self.name).parent)


class Loss(enum.Enum):
    """How a crash chooses among what was not synced."""

    ALL = "all of it"
    NOTHING = "none of it"
    TAIL = "the last of it"
    PAGES = "some pages"
    SECTORS = "some sectors"


class Left(NamedTuple):
    """Files and folders after a crash, by their paths below the root."""

    files: dict[str, bytes]
    folders: list[str]

    def write(self, root: Path) -> None:
        """Make them anew."""
        for folder in self.folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)


class Recording:
    """All changes below a root, in order."""

    def __init__(self, log: Path, root: Path, notes: str) -> None:
        self.root = str(root.resolve())
        self.ops = list(_read(log))
        made = {op.name: op.inode for op in self.ops if op.kind is Kind.CREATE}
        self._notes = made[f"{self.root}/{notes}"]
        self._files = {op.inode for op in self.ops if op.kind is Kind.CREATE}
        self.syncs = sum(op.kind is Kind.SYNC for op in self.ops)

    def said(self, cut: int) -> list[str]:
        """What the process had reported by then, line by line."""
        ops = (op for op in self.ops[:cut] if op.kind is Kind.WRITE and op.inode == self._notes)
        text = b"".join(op.data for op in ops)
        return [line.decode() for line in text.split(b"\n")[:-1]]

    def crash(self, cut: int, loss: Loss, dice: random.Random) -> Left:
        """What may be left if the machine stops before the change of this number."""
        data = {inode: _content(list(ops), loss, dice) for inode, ops in self._by_file(cut).items()}
        names, folders = self._names(cut, loss, dice)
        files = {
            name: bytes(data.get(inode, b""))
            for name, inode in names.items()
            if inode != self._notes
        }
        return Left(files, folders)

    def _by_file(self, cut: int) -> dict[int, list[Op]]:
        found: dict[int, list[Op]] = defaultdict(list)
        for op in self.ops[:cut]:
            if op.kind in (Kind.WRITE, Kind.SIZE, Kind.SYNC):
                found[op.inode].append(op)
        return found

    def _names(self, cut: int, loss: Loss, dice: random.Random) -> tuple[dict[str, int], list[str]]:
        """The names that are left: of each folder's changes at least those that were synced."""
        ops = self.ops[:cut]
        made = {op.inode: op.name for op in ops if op.kind is Kind.MKDIR}
        synced: dict[str, int] = {}
        changes: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(ops):
            if op.kind is Kind.SYNC and op.inode not in self._files:
                # The root itself was there before; of a folder that has gone, nothing matters.
                synced[made.get(op.inode, self.root)] = number
            elif op.kind in _NAMES:
                changes[op.folder].append(number)
        until: dict[str, int] = {}
        for folder, numbers in changes.items():
            least = synced.get(folder, -1)
            later = [number for number in numbers if number > least]
            count = {Loss.ALL: 0, Loss.NOTHING: len(later)}.get(loss, dice.randint(0, len(later)))
            until[folder] = later[count - 1] if count else least
        return self._replay(ops, until)

    def _replay(self, ops: list[Op], until: dict[str, int]) -> tuple[dict[str, int], list[str]]:
        names: dict[str, int] = {}
        folders = {self.root}
        for number, op in enumerate(ops):
            if op.kind not in _NAMES or number > until[op.folder] or op.folder not in folders:
                continue
            if op.kind is Kind.MKDIR:
                folders.add(op.name)
            elif op.kind is Kind.RMDIR:
                folders.discard(op.name)
            elif op.kind is Kind.CREATE:
                names[op.name] = op.inode
            elif op.kind is Kind.UNLINK:
                names.pop(op.name, None)
            else:
                to = op.data.decode()
                if str(PurePosixPath(to).parent) in folders and op.name in names:
                    names[to] = names[op.name]
                    if op.kind is Kind.RENAME:
                        del names[op.name]
        below = len(self.root) + 1
        return (
            {name[below:]: inode for name, inode in names.items()},
            sorted(folder[below:] for folder in folders if folder != self.root),
        )


def _read(log: Path) -> Iterator[Op]:
    text = log.read_bytes()
    at = 0
    while at + _HEAD.size <= len(text):
        kind, name_bytes, data_bytes, _, inode, where = _HEAD.unpack_from(text, at)
        at += _HEAD.size
        name = text[at : at + name_bytes].decode()
        at += name_bytes
        yield Op(Kind(kind), inode, where, name, text[at : at + data_bytes])
        at += data_bytes


def _content(ops: list[Op], loss: Loss, dice: random.Random) -> bytearray:
    """What a file holds after a crash."""
    data = bytearray()
    last = max((index for index, op in enumerate(ops) if op.kind is Kind.SYNC), default=-1)
    for op in ops[:last]:
        _apply(data, op.kind, op.at, op.data)
    later = [op for op in ops[last + 1 :] if op.kind is not Kind.SYNC]
    if loss is Loss.ALL:
        return data
    if loss is Loss.TAIL:
        later = later[: dice.randint(0, len(later))]
    whole = loss in (Loss.NOTHING, Loss.TAIL)
    unit = SECTOR if loss is Loss.SECTORS else PAGE
    for op in later:
        if whole:
            _apply(data, op.kind, op.at, op.data)
        elif op.kind is Kind.SIZE:
            if dice.random() < 0.5:
                _apply(data, op.kind, op.at, b"")
        else:
            _apply_some(data, op, unit, dice)
    return data


def _apply_some(data: bytearray, op: Op, unit: int, dice: random.Random) -> None:
    """Parts of one write; its length may be there without them."""
    end = op.at + len(op.data)
    if end > len(data) and dice.random() < 0.5:
        data.extend(bytes(end - len(data)))
    at = op.at
    while at < end:
        stop = min(end, (at // unit + 1) * unit)
        if dice.random() < 0.5:
            _apply(data, Kind.WRITE, at, op.data[at - op.at : stop - op.at])
        at = stop


def _apply(data: bytearray, kind: Kind, at: int, new: bytes) -> None:
    if kind is Kind.SIZE:
        del data[at:]
        data.extend(bytes(at - len(data)))
    elif kind is Kind.WRITE:
        if at > len(data):
            data.extend(bytes(at - len(data)))
        data[at : at + len(new)] = new
