"""The data side: reads and writes whole files, and says how it went."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.interfaces.handler import Handler
from kvtier.record.record import Buffer
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome
from kvtier_folder.medium import FolderSpec, size_of


class FolderHandler(Handler):
    """Keeps no state but where the folder is, so that any thread may use it."""

    def __init__(self, folder: Path, namespace: Namespace, disk: Disk) -> None:
        self._folder = folder
        self._namespace = namespace
        self._disk = disk

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._each(spec, keys, into, self._disk.readv, create=False)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._each(spec, keys, records, self._disk.writev, create=True)

    def _each(
        self,
        spec: LoadStoreSpec,
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        move: Callable[[int, Sequence[Buffer], int], int],
        *,
        create: bool,
    ) -> list[Outcome]:
        if not isinstance(spec, FolderSpec):
            raise TypeError(f"a folder tier cannot reach {type(spec).__name__}")
        outcomes = []
        for name, key, buffer in zip(spec.names, keys, buffers, strict=True):
            record = buffer[: size_of(key, self._namespace)]
            try:
                outcomes.append(self._move(self._folder / name, record, move, create=create))
            except FileNotFoundError:
                outcomes.append(Outcome.GONE)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                outcomes.append(Outcome.NO_SPACE if full else Outcome.IO_ERROR)
        return outcomes

    def _move(
        self,
        path: Path,
        record: Buffer,
        move: Callable[[int, Sequence[Buffer], int], int],
        *,
        create: bool,
    ) -> Outcome:
        fd = self._disk.open(path, create=create)
        try:
            done = 0
            while done < len(record):
                count = move(fd, [record[done:]], done)
                if count == 0:  # the file ends too early: whatever it is, it is not the block
                    return Outcome.CORRUPT
                done += count
        finally:
            self._disk.close(fd)
        return Outcome.OK
