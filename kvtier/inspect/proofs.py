"""Whether a record that was read is good: the proof of docs/reference/format.md, in words."""

from __future__ import annotations

import enum
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtier.errors import FormatError, KVTierError
from kvtier.inspect.contents import Block
from kvtier.interfaces.handler import Handler
from kvtier.record.record import (
    CODEC_RAW,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Header,
    record_bytes,
    verify,
)
from kvtier.types import Namespace, Outcome


class Proof(enum.Enum):
    """What reading a record has shown."""

    GOOD = "good"
    BAD = "bad"
    GONE = "gone"
    """Its slot was used again, or its object deleted, while it was read."""
    NEWER = "newer"
    """A newer kvtier has written it: it is left alone."""
    UNREAD = "unread"
    """The medium failed."""


class Verdict(NamedTuple):
    """What a block's record is worth, why it is bad if it is, and the raw record if it is good."""

    proof: Proof
    why: str = ""
    record: memoryview | None = None


NEWER = Verdict(Proof.NEWER, "written by a newer kvtier")


class Prover(ABC):
    """Reads the records of one tier and checks them; from several threads at once."""

    @abstractmethod
    def prove(self, block: Block) -> Verdict:
        """Read a block's record; what it is worth."""

    def bytes_of(self, block: Block) -> int:
        """The memory that a block's proof takes, its record included."""
        return 2 * block.bytes  # what is read in pieces is there twice when they are joined

    def close(self) -> None:  # noqa: B027 - not every medium has something to release
        """Release files and connections."""


class HandlerProver(Prover):
    """Reads blocks through the handler of their tier, from where a listing says that they are."""

    def __init__(
        self, open_handler: Callable[[Namespace], Handler], namespaces: Mapping[str, Namespace]
    ) -> None:
        self._open_handler = open_handler
        self._namespaces = namespaces
        self._handlers: dict[str, Handler] = {}
        self._opening = threading.Lock()

    def prove(self, block: Block) -> Verdict:
        namespace = self._namespaces.get(block.namespace)
        if namespace is None or block.at is None:
            return Verdict(Proof.UNREAD, "nothing says how large its payload should be")
        size = record_bytes(namespace.payload_of(block.key))
        record = memoryview(mmap.mmap(-1, record_bytes(namespace.payload_bytes)))
        try:
            with self._opening:
                if block.namespace not in self._handlers:
                    self._handlers[block.namespace] = self._open_handler(namespace)
            handler = self._handlers[block.namespace]
        except KVTierError as error:
            return Verdict(Proof.UNREAD, str(error))
        (outcome,) = handler.load(block.at, [block.key], [record])
        if outcome is Outcome.GONE:
            return Verdict(Proof.GONE, "it was removed meanwhile")
        if outcome is Outcome.CORRUPT:
            return Verdict(Proof.BAD, "what is there cannot be the block")
        if not outcome.ok:
            return Verdict(Proof.UNREAD, outcome.value)
        return judge(record[:size], block)

    def bytes_of(self, block: Block) -> int:
        namespace = self._namespaces.get(block.namespace)
        return record_bytes(namespace.payload_bytes) if namespace else block.bytes

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()


def judge(record: memoryview, block: Block) -> Verdict:
    """What a raw record is worth."""
    if verify(record, block.key, bytes.fromhex(block.namespace)).ok:
        return Verdict(Proof.GOOD, "", record)
    if is_newer(record):
        return NEWER
    return Verdict(Proof.BAD, why_bad(record, block))


def is_newer(record: memoryview) -> bool:
    """Whether a newer kvtier has written this record, which is then to be left alone."""
    if bytes(record[: len(MAGIC)]) != MAGIC:
        return False
    return int.from_bytes(record[len(MAGIC) : len(MAGIC) + 2], "little") > VERSION


def why_bad(record: memoryview, block: Block) -> str:
    """What is wrong with a record that fails, in words."""
    try:
        header = Header.read(record)
    except FormatError as error:
        return str(error)
    if header.key != block.key:
        return f"the record belongs to the key {header.key.hex()}"
    if header.namespace.hex() != block.namespace:
        return f"the record belongs to the namespace {header.namespace.hex()}"
    if header.payload_bytes > len(record) - HEADER_BYTES:
        return f"a payload of {header.payload_bytes} bytes does not fit its slot"
    if header.codec != CODEC_RAW:
        return f"codec {header.codec}, where only raw records may be"
    return "the payload fails its checksum"
