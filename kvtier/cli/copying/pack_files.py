"""Blocks of one namespace in a single file, written whole or not at all.

docs/reference/format.md states its form.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import numpy as np
import xxhash

from kvtier.cli.copying.reader import Reader
from kvtier.cli.copying.selection import USED_MAX
from kvtier.errors import FormatError, KVTierError, MediumInUse, NewerFormat
from kvtier.record.record import HEADER_BYTES, Buffer, Header, record_bytes
from kvtier.slab.layout import keys_of
from kvtier.types import KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, BlockKey, Namespace, Outcome

MAGIC = b"KVTPACK\n"
END = b"KVTPEND\n"
VERSION = 1

# magic, version, flags, bytes of the namespace's description
_HEAD = struct.Struct("<8sHHI")
_SUM = struct.Struct("<Q")
_TAIL = struct.Struct("<8sQ")

USES = b"KVTPUSE\n"
# magic, blocks; then of each: length of the key, when it was used last, how often, key
_USES_HEAD = struct.Struct("<8sQ")
_USES_DTYPE = np.dtype(
    [
        ("key_bytes", "u1"),
        ("zero", "V3"),
        ("used_at", "<u4"),
        ("uses", "<u4"),
        ("key", f"V{KEY_BYTES_MAX}"),
    ]
)


class PackWriter:
    """Writes to a name beside the wanted one, and takes that at the end."""

    def __init__(self, path: Path, namespace: Namespace, *, replace: bool = False) -> None:
        self._path = path
        self._replace = replace
        self._making = path.with_name(f"{path.name}.making")
        self._file: BinaryIO = os.fdopen(_begin(self._making), "wb")
        self.count = 0
        self.used: Mapping[BlockKey, tuple[int, float]] = {}
        """How often these blocks were used and when last: written at the end."""
        text = namespace.to_json()
        head = _HEAD.pack(MAGIC, VERSION, 0, len(text)) + text
        self._file.write(head + _SUM.pack(xxhash.xxh3_64_intdigest(head)))

    def write(self, record: memoryview, payload_bytes: int) -> None:
        """Add a proved, raw record."""
        size = record_bytes(payload_bytes)
        self._file.write(record[: HEADER_BYTES + payload_bytes])
        self._file.write(bytes(size - HEADER_BYTES - payload_bytes))
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        whole = False
        try:
            if kind is None:
                tail = _TAIL.pack(END, self.count)
                for part in (tail, _pack_uses(self.used)):
                    self._file.write(part + _SUM.pack(xxhash.xxh3_64_intdigest(part)))
                self._file.flush()
                os.fsync(self._file.fileno())  # or the name could outlive a crash, and not the rest
                if not self._replace and self._path.exists():  # only since it was begun
                    raise KVTierError(f"{self._path} exists; name another file, or say --force")
                self._making.replace(self._path)
                whole = True
        finally:
            if not whole:
                self._making.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what is still to be written is of no use
                self._file.close()


def _begin(making: Path) -> int:
    """A file that nobody else is writing, empty: who was killed may have left something in it."""
    while True:
        fd = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if making.exists() and os.path.samestat(os.fstat(fd), making.stat()):
                os.ftruncate(fd, 0)
                return fd
        except BlockingIOError:
            os.close(fd)
            raise MediumInUse(
                f"another command is writing {making}: wait for it, or name another file"
            ) from None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # who wrote it has just renamed or removed it: begin anew


def _pack_uses(used: Mapping[BlockKey, tuple[int, float]]) -> bytes:
    rows = np.zeros(len(used), _USES_DTYPE)
    for row, (key, (uses, at)) in zip(rows, used.items(), strict=True):
        row["key_bytes"], row["key"] = len(key), key.ljust(KEY_BYTES_MAX, b"\0")
        row["uses"], row["used_at"] = uses, int(at)
    return _USES_HEAD.pack(USES, len(used)) + rows.tobytes()


class PackReader(Reader):
    """Reads what `PackWriter` wrote. `bad` counts records that do not belong there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would mean to wait
            raise FormatError(f"{path} is no ordinary file: name one that kvtier export wrote")
        self._file: BinaryIO = path.open("rb")
        try:
            self.namespace = self._read_head(path)
        except BaseException:
            self._file.close()
            raise
        self._path = path
        self.bytes = path.stat().st_size
        self.bad = 0
        self.trouble = ""
        self.used: dict[BlockKey, tuple[int, float]] = {}
        """How often blocks were used, and when last; known when all have been `found`."""

    def _read_head(self, path: Path) -> Namespace:
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise FormatError(f"{path} is not a file of kvtier export: name one that is")
        _, version, _, size = _HEAD.unpack(head)
        if version != VERSION:
            raise NewerFormat(f"{path} has version {version}, not {VERSION}: update kvtier")
        if size > NAMESPACE_BYTES_MAX:
            raise FormatError(f"{path} is damaged in its first bytes: export it again")
        text = self._file.read(size)
        checksum = self._file.read(_SUM.size)
        if checksum != _SUM.pack(xxhash.xxh3_64_intdigest(head + text)):
            raise FormatError(f"{path} is damaged in its first bytes: export it again")
        try:
            return Namespace.from_json(text)
        except msgspec.ValidationError as error:
            raise FormatError(f"{path} has no namespace: {error}; export it again") from error

    def found(self) -> Iterator[tuple[BlockKey, int]]:
        """Keys and places of all records, up to the first that cannot be found: see `trouble`."""
        at = self._file.tell()
        while not (head := self._pread(HEADER_BYTES, at)).startswith(END):
            try:
                header = Header.read(memoryview(head))
            except FormatError as error:
                self.trouble = (
                    f"{self._path} is damaged or cut short behind its first records ({error}): "
                    "what came before is taken, export it again for the rest"
                )
                return
            size = min(header.payload_bytes, self.namespace.payload_bytes)
            if header.payload_bytes == self.namespace.payload_of(header.key):
                yield header.key, at
            else:
                self.bad += 1
            at += record_bytes(size)
        self.used = self._read_uses(at + _TAIL.size + _SUM.size)

    def _read_uses(self, at: int) -> dict[BlockKey, tuple[int, float]]:
        """Statistics: where they are missing, as in older files, or damaged, they say nothing."""
        size = self.bytes - at
        if not 0 <= size <= _USES_HEAD.size + USED_MAX * _USES_DTYPE.itemsize + _SUM.size:
            return {}
        text = self._pread(size, at)
        stated, text = text[-_SUM.size :], text[: -_SUM.size]
        if not text.startswith(USES) or stated != _SUM.pack(xxhash.xxh3_64_intdigest(text)):
            return {}
        count = int.from_bytes(text[len(USES) : _USES_HEAD.size], "little")
        if len(text) != _USES_HEAD.size + count * _USES_DTYPE.itemsize:
            return {}
        rows = np.frombuffer(text, _USES_DTYPE, offset=_USES_HEAD.size)
        values = zip(rows["uses"].tolist(), rows["used_at"].astype(float).tolist(), strict=True)
        return dict(zip(keys_of(rows), values, strict=True))

    def _pread(self, size: int, at: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for at, key, buffer in zip(numbers, keys, into, strict=True):
            size = record_bytes(self.namespace.payload_of(key))
            try:
                count = os.preadv(self._file.fileno(), [buffer[:size]], at)
            except OSError:
                count = -1
            outcomes.append(Outcome.OK if count == size else Outcome.IO_ERROR)
        return outcomes

    def close(self) -> None:
        """Close the file."""
        self._file.close()
