"""Small media full of blocks, as bytes: now, at an earlier time, and of another namespace; and what
opens the rest of one, and proves every block that is offered."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.object import object_subjects
from support.tiers import subjects

from kvtier import Stack
from kvtier.backends.cpu import CpuSettings
from kvtier.config import MoverMode, MoverSettings, StackConfig
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.testing.subject import Rig, Subject, make_keys, payload
from kvtier.types import BlockKey, Namespace

Files = dict[str, bytes]
BLOCKS = 12
PARTS = 4
NAMESPACE = Namespace(facts={"model": "specimen"}, group_bytes=(8192, 4608), parts=PARTS)
FOREIGN = Namespace(facts={"model": "stranger"}, group_bytes=(8192, 4608), parts=PARTS)
_ENGINE = "specimen"
_PARTS = {
    "blocks": "block",
    "manifest": "manifest",
    "uses": "uses",
    "servers": "server",
    "caretaker": "caretaker's report",
    "retained": "retained list",
    "learned": "what eviction learned",
    "owners": "owner's mark",
}
_HEADER_PROVED = 96
_SUMS_AT = 128


class Place(NamedTuple):
    """Where a block's record lies."""

    key: BlockKey
    path: str
    at: int
    size: int

    def proved(self, files: Files) -> bytes:
        """The bytes of it that a load depends on; fewer where the file is shorter."""
        record = files.get(self.path, b"")[self.at : self.at + self.size]
        sums = record[_SUMS_AT : _SUMS_AT + 8 * PARTS]
        payload = NAMESPACE.payload_of(self.key)
        return record[:_HEADER_PROVED] + sums + record[HEADER_BYTES : HEADER_BYTES + payload]


class Specimen:
    """One medium with all its files."""

    def __init__(self, kind: str, subject: Subject, folder: Path) -> None:
        self.kind = kind
        self.subject = subject
        self.folder = folder
        self.keys = [key for group in (0, 1) for key in make_keys(BLOCKS, group=group)]
        self.older, self.files = self._grow(NAMESPACE, folder)
        _, foreign = self._grow(FOREIGN, folder.with_name(folder.name + "-foreign"))
        self.foreign = _renamed(foreign, self.files)
        self.places = list(self._places(self.files))
        self.slot = record_bytes(NAMESPACE.payload_bytes)

    def _grow(self, namespace: Namespace, folder: Path) -> tuple[Files, Files]:
        """An earlier state, and the last one: some blocks were evicted and others dropped since."""
        folder.mkdir()
        rig = self.rig(folder, namespace)
        rig.put(self.keys[:8])
        rig.close()
        older = read_files(folder)
        rig.open()
        rig.tier.forget(self.keys[:3])
        rig.tier.flush()
        rig.settle()
        rig.put(self.keys[8:16])
        rig.put(self.keys[16:20])
        rig.tier.touch(rig.get(self.keys))
        at_death = read_files(folder)
        rig.close()  # which writes down what was used
        return older, at_death if self.kind == "nvme" else read_files(folder)

    def rig(self, folder: Path, namespace: Namespace = NAMESPACE) -> Rig:
        """The medium, opened as a tier."""
        return Rig(self.subject, folder, blocks=BLOCKS, namespace=namespace, engine=_ENGINE)

    def _places(self, files: Files) -> Iterator[Place]:
        """Where the records lie, by tables and by names."""
        for path, data in sorted(files.items()):
            if path.endswith(".table"):
                header = layout.SlabHeader.unpack(data)
                holder = path.replace(".table", ".slab")
                entries = layout.read_entries(data, header.slots)
                slots = layout.committed(entries)
                for slot, key in zip(slots.tolist(), layout.keys_of(entries[slots]), strict=True):
                    yield Place(key, holder, header.slot_at(slot), header.slot_bytes)
            elif "/blocks/" in path:
                key = BlockKey(bytes.fromhex(Path(path).name.partition("-")[0]))
                yield Place(key, path, 0, len(data))

    def restore(self, files: Files) -> None:
        """Have these files in the folder, and nothing else."""
        clear(self.folder)
        for path, data in files.items():
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o600)


SPECIMENS: dict[str, Subject] = {
    "cpu": subjects.CPU,
    "nvme": subjects.NVME,
    "object": object_subjects.FOLDER,
}


def read_files(folder: Path) -> Files:
    """All ordinary files below a folder."""
    found: Files = {}
    for at, _, names in os.walk(folder):
        for name in names:
            path = Path(at) / name
            if stat.S_ISREG(path.lstat().st_mode):
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def clear(folder: Path) -> None:
    """Remove all that is in a folder, and follow no link out of it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _renamed(foreign: Files, like: Files) -> Files:
    """Another namespace's files, under the names of this one's of the same kind."""
    found: Files = {}
    others: dict[str, list[bytes]] = {}
    for path, data in sorted(foreign.items()):
        others.setdefault(kind_of(path), []).append(data)
    for path in sorted(like):
        if same := others.get(kind_of(path)):
            found[path] = same[len(found) % len(same)]
    return found


def kind_of(path: str) -> str:
    """What kind of file this is, for the figures."""
    name = Path(path).name
    for part, kind in _PARTS.items():
        if f"/{part}/" in f"/{path}/":
            return kind
    return {"json": "description"}.get(kind := Path(name).suffix.removeprefix("."), kind or name)


HOST_BYTES = 2 * BLOCKS * (record_bytes(NAMESPACE.payload_bytes) + 64) + 12288


def by_tier(specimen: Specimen) -> set[BlockKey]:
    """What the tier alone serves; raises AssertionError for a wrong byte."""
    rig = specimen.rig(specimen.folder)
    try:
        return set(rig.get(specimen.keys))
    finally:
        rig.close()


def by_stack(specimen: Specimen, host: Path) -> set[BlockKey]:
    """What a whole stack serves from it, by way of host memory and its mover; raises AssertionError
    for a wrong byte."""
    memory = CpuSettings(path=str(host), capacity=Capacity(size=ByteSize(HOST_BYTES)))
    below = specimen.subject.settings(
        specimen.folder, BLOCKS, record_bytes(NAMESPACE.payload_bytes)
    )
    settings = MoverSettings(mode=MoverMode.THREADS)
    config = StackConfig(version=1, name="specimen", mover=settings, tiers=(memory, below))
    with Stack(config, NAMESPACE) as stack:
        found = stack.load(specimen.keys, 20.0)
        stack.chain.tiers[0].forget(specimen.keys)
    for key, data in found.items():
        if data != payload(key, NAMESPACE):
            raise AssertionError(f"wrong bytes were served for {key.hex()}")
    return set(found)
