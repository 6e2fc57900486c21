"""Media that consist of slabs, CPU regions and NVMe folders alike, as an inspector sees them."""

from __future__ import annotations

import errno
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvtier.core.retained import kept_file
from kvtier.core.slab.layout import BAD, SlabHeader, committed, entry_at, keys_of
from kvtier.core.slab.slab_files import Slab, SlabBlock, SlabProver, SlabSource
from kvtier.errors import FormatError, KVTierError, NewerFormat, describe_error
from kvtier.inspect.contents import Block, Contents, Hold, InspectorContext, Part
from kvtier.inspect.filling import Source, TierOpener
from kvtier.inspect.inspector import Inspector, Prover
from kvtier.settings import TierSettings
from kvtier.types import BlockKey, Namespace

S = TypeVar("S", bound=TierSettings)

_NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""What is there is no file of ours; all else says that a file cannot be read just now."""


class SlabInspector(Inspector[S]):
    """Looks at a medium that consists of slabs."""

    def __init__(self, opener: TierOpener, settings: S, context: InspectorContext) -> None:
        super().__init__(opener, settings, context)
        self.slabs: list[Slab] = []
        self.broken: list[Path] = []
        """Tables of this version that are not as they must be."""

    # -- what a kind says of its own

    @abstractmethod
    def read_slab(self, table: Path) -> SlabHeader:
        """The header of a slab that is as it must be; raises FormatError or OSError."""

    @abstractmethod
    def held(self, slab: Slab) -> AbstractContextManager[None]:
        """Keep everybody else from a slab that nobody uses; raises MediumInUse if somebody does."""

    @abstractmethod
    def remove_table(self, table: Path) -> None:
        """Remove a slab if it is still broken; raises MediumInUse if somebody may use it."""

    @abstractmethod
    def lists(self, namespace: str) -> list[Path]:
        """The files that say what is retained of a namespace."""

    # -- what is there

    def holds(self, namespace: str) -> dict[BlockKey, list[Hold]]:
        found: dict[BlockKey, list[Hold]] = {}
        now = time.time()
        for path in self.lists(namespace):
            try:
                sessions = kept_file.read(path, bytes.fromhex(namespace))
            except (FormatError, OSError) as error:
                said = f"{path} does not say what is retained: {describe_error(error)}"
                if said not in self.contents.troubles:
                    self.contents.troubles.append(said)
                continue
            for session, blocks in sessions.items():
                for key, until in blocks.items():
                    if until > now:
                        found.setdefault(key, []).append(Hold(session, until))
        return found

    def slot_maps(self) -> Sequence[Slab]:
        return self.slabs

    def count(self, found: Contents) -> None:
        """Sum the slabs by namespace; one whose table its disk does not give is a trouble, and no
        slab."""
        parts: dict[str, Part] = {}
        holds = {name: self.holds(name) for name in {slab.namespace for slab in self.slabs}}
        slabs, self.slabs = self.slabs, []
        for slab in slabs:
            try:
                entries = slab.entries()
            except OSError as error:
                found.troubles.append(describe_error(error))
                continue
            self.slabs.append(slab)
            part = parts.setdefault(
                slab.namespace, Part(tier=self.tier, kind=self.kind, namespace=slab.namespace)
            )
            valid = committed(entries)
            part.blocks += len(valid)
            part.bytes += len(valid) * slab.header.slot_bytes
            if held := holds[slab.namespace]:
                part.retained += sum(key in held for key in keys_of(entries[valid]))
            part.quarantined += int((entries["state"] == BAD).sum())
            part.in_use = part.in_use or slab.in_use
            if len(valid):
                times = entries["stored_at"][valid]
                part.add_times(float(times.min()), float(times.max()))
                part.add_uses(
                    int(entries["uses"][valid].sum(dtype=np.uint64)),
                    float(entries["used_at"][valid].max()),
                )
        found.parts = sorted(parts.values(), key=lambda part: -part.bytes)

    def blocks(self, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[SlabBlock]:
        for slab in self.slabs:
            if slab.namespace.startswith(namespace):
                yield from self._blocks_of(slab)

    def _blocks_of(self, slab: Slab) -> Iterator[SlabBlock]:
        entries, namespace = slab.entries(), slab.namespace
        states = entries["state"]
        rows = [*committed(entries).tolist(), *(states == BAD).nonzero()[0].tolist()]
        chosen = entries[rows]
        columns = [chosen[name].tolist() for name in ("stored_at", "uses", "used_at")]
        for slot, key, at, uses, used_at in zip(rows, keys_of(chosen), *columns, strict=True):
            yield SlabBlock(
                tier=self.tier,
                kind=self.kind,
                namespace=namespace,
                key=key,
                bytes=slab.header.slot_bytes,
                stored_at=float(at),
                hits=uses,
                used=float(used_at) or None,
                quarantined=bool(states[slot] == BAD),
                slab=slab,
                slot=slot,
            )

    def prover(self, namespaces: Mapping[str, Namespace]) -> Prover:
        return SlabProver()

    def sources(self, namespace: str) -> list[Source]:
        return [
            SlabSource(self.tier, self.kind, slab)
            for slab in self.slabs
            if slab.namespace == namespace
        ]

    def note(self, table: Path, error: FormatError | OSError) -> None:
        """A slab that cannot be looked at, and why."""
        self.contents.troubles.append(trouble(table, error))
        if isinstance(error, FormatError) and not isinstance(error, NewerFormat):
            self.broken.append(table)

    # -- repair

    def home_of(self, block: Block) -> str:
        assert isinstance(block, SlabBlock)
        return str(block.slab.table)

    def quarantine(self, blocks: Sequence[Block]) -> int:
        slots = [block for block in blocks if isinstance(block, SlabBlock)]
        slab = slots[0].slab
        with self.held(slab):
            return _mark_bad(slab, slots)

    def is_broken(self, table: Path) -> bool:
        """Whether a table is not as it must be: asked once more before it is removed for that."""
        try:
            self.read_slab(table)
        except (NewerFormat, OSError):
            return False
        except FormatError:
            return True
        return False

    def remove_broken(self, namespace: str) -> list[str]:
        left = []
        for table in self.broken:
            if not table.parent.name.startswith(namespace):
                continue
            self.forget_troubles(f"{table}: ")
            try:
                self.remove_table(table)
            except FileNotFoundError:  # somebody else has just removed it
                continue
            except (KVTierError, OSError) as error:
                left.append(describe_error(error))
        return left


def _mark_bad(slab: Slab, blocks: Sequence[SlabBlock]) -> int:
    marked = 0
    fd = os.open(slab.table, os.O_RDWR | os.O_CLOEXEC)
    try:
        for block in blocks:
            if slab.holds(block.slot, block.key):
                marked += os.pwrite(fd, bytes([BAD]), entry_at(block.slot))
    finally:
        os.close(fd)
    return marked


def trouble(path: Path, error: FormatError | OSError) -> str:
    """Why something on a medium of slabs could not be looked at, and what to do."""
    if isinstance(error, NewerFormat):
        return f"{path}: {error}; it is left alone: update kvtier to read it"
    if isinstance(error, FormatError):
        return f"{path}: {error}; kvtier verify --repair removes it"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: {error.strerror}; run this as its owner"
    if isinstance(error, FileNotFoundError):
        return f"{path} has no namespace.json; it is left alone: remove it if it is nobody's"
    if error.errno in _NO_FILE:
        return f"{path}: {error.strerror}; it is left alone: remove it if it is nobody's"
    return describe_error(error)
