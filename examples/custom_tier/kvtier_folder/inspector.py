"""The inspector: what people see of the folder from outside, and do to it.

`listing` alone would do for `kvtier ls`, `du`, `verify` and `prewarm`. The rest is what
this medium can do beyond that.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from kvtier.errors import KVTierError, MediumInUse
from kvtier.inspect import (
    Block,
    Cleared,
    Filling,
    Finding,
    Garbage,
    Inspector,
    InspectorContext,
    Level,
    Part,
    Stored,
)
from kvtier.inspect.contents import locked_files, of_file
from kvtier.inspect.filling import TierOpener
from kvtier.system.disk import mounted
from kvtier.types import Namespace
from kvtier_folder.medium import BLOCK, PART, FolderSpec, key_of
from kvtier_folder.settings import FolderSettings


class FolderInspector(Inspector[FolderSettings]):
    """Reads files; before it removes one it locks the folder, as an engine does."""

    def __init__(
        self, opener: TierOpener, settings: FolderSettings, context: InspectorContext
    ) -> None:
        super().__init__(opener, settings, context)
        self._folder = Path(settings.path)

    def listing(self) -> Iterator[Stored]:
        namespace = self._described()
        if namespace is None:
            return
        for path in sorted(self._folder.glob(f"*{BLOCK}")):
            key = key_of(path)
            try:
                status = path.stat()
            except FileNotFoundError:  # it was evicted since it was listed
                continue
            if key is not None:
                yield Stored(
                    namespace=namespace,
                    key=key,
                    bytes=status.st_size,
                    stored_at=status.st_mtime,
                    where=str(path),
                    at=FolderSpec([path.name]),
                )

    def _described(self) -> Namespace | None:
        try:
            return Namespace.from_json((self._folder / "namespace.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError, ValueError):
            return None

    def in_use(self, namespace: str) -> bool:
        return locked_files().has(self._folder / "lock")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep engines out meanwhile; raises MediumInUse if one is there."""
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise MediumInUse(f"{self._folder} is in use: stop its engine first") from None
        finally:
            os.close(fd)

    def quarantine(self, blocks: Sequence[Block]) -> int:
        with self._held():
            for block in blocks:
                Path(block.where).unlink(missing_ok=True)
        return len(blocks)

    def clear(self, part: Part) -> Iterator[Cleared]:
        yield self.try_to_clear(part, self._remove_blocks)

    def _remove_blocks(self) -> bool:
        with self._held():
            for path in self._folder.glob(f"*{BLOCK}"):
                path.unlink(missing_ok=True)
        return True

    def _remove_part(self, path: Path) -> bool:
        with self._held():
            path.unlink(missing_ok=True)
        return True

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        if locked_files().has(self._folder / "lock"):
            return
        for path in sorted(self._folder.glob(f"*{PART}")):
            what = "block that was never finished"
            yield from of_file(what, path, partial(self._remove_part, path))
        for part in self.contents.parts:
            if idle_s is not None and time.time() - (part.newest or 0.0) > idle_s:
                what = "namespace that nobody stored in for so long"
                yield Garbage(what, str(self._folder), part.bytes, self._remove_blocks)

    def checks(self) -> Iterator[Finding]:
        kind, _ = mounted(self._folder if self._folder.is_dir() else self._folder.parent)
        yield Finding(self.area(), Level.OK, f"{self._folder} is {kind}")

    def filling(self) -> Filling[FolderSettings]:
        return FolderFilling(self.opener, self.settings, self.context, self.capacity())


class FolderFilling(Filling[FolderSettings]):
    """A copy is an engine like any other here: it needs the folder for itself."""

    one_namespace = "such a folder"

    def check(self, namespace: Namespace) -> None:
        folder = Path(self.settings.path)
        held = FolderInspector(self.opener, self.settings, self.context).look()
        for part in held.parts:
            if part.namespace != namespace.id:
                raise KVTierError(
                    f"{folder} holds {part.blocks} blocks of the namespace {part.namespace[:12]}, "
                    f"and would hold this one instead: remove them (kvtier clear "
                    f"{part.namespace[:12]}), or fill another tier"
                )
