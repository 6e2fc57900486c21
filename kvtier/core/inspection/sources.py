"""The blocks that a copy may take from a tier: in columns, some seventy bytes a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.inspection.contents import Stored
from kvtier.core.interfaces.handler import Handler
from kvtier.core.records.record import Buffer
from kvtier.types import KEY_BYTES_MAX, BlockKey, LoadStoreSpec, Namespace, Outcome

ROW = np.dtype(
    [
        ("key", f"V{KEY_BYTES_MAX}"),
        ("key_bytes", "u1"),
        ("origin", "u4"),
        ("at", "u4"),
        ("bytes", "u8"),
        ("stored_at", "f8"),
        ("uses", "u4"),
        ("used_at", "u4"),
    ]
)
"""`at` is where a block is in the words of its source; `origin` is for who joins several."""
Rows = npt.NDArray[np.void]

_THREADS = 8
_BATCH_BYTES = 2 << 20


class Source(ABC):
    """Blocks of one namespace on one medium, read as anybody may read: an engine that runs there
    does not notice. `read` is called from `concurrency` threads, with `batch_blocks` at most."""

    concurrency: int = _THREADS

    def __init__(self, tier: int, kind: str) -> None:
        self.tier = tier
        self.kind = kind

    @abstractmethod
    def rows(self) -> Rows:
        """All that there are. Keys may be among them more than once."""

    def open(self, namespace: Namespace) -> None:  # noqa: B027 - files are opened block by block
        """Before the first read."""

    def batch_blocks(self, record_bytes: int) -> int:
        """How many blocks are best read at once."""
        return max(1, min(64, _BATCH_BYTES // record_bytes))

    @abstractmethod
    def read(
        self, at: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with a record, unproved."""

    def used_again(self, at: int, key: BlockKey) -> bool:
        """Whether a block that could not be proved has been replaced by another meanwhile."""
        return False

    def close(self) -> None:  # noqa: B027 - files are closed block by block
        """After the last read."""


class HandlerSource(Source):
    """Blocks that a tier's handler reads; a subclass says where each of them is."""

    waits: bool = True
    """Whether a read waits for somebody's answer: then the handler says how many are best under
    way, and how large. A local file has none to wait for."""

    def __init__(self, tier: int, kind: str, open_handler: Callable[[Namespace], Handler]) -> None:
        super().__init__(tier, kind)
        self._open_handler = open_handler
        self._handler: Handler | None = None

    def open(self, namespace: Namespace) -> None:
        self._handler = self._open_handler(namespace)
        if self.waits:
            self.concurrency = max(_THREADS, self._handler.concurrency)

    def batch_blocks(self, record_bytes: int) -> int:
        assert self._handler is not None
        most = super().batch_blocks(record_bytes)
        return min(most, self._handler.batch_blocks) if self.waits else most

    @abstractmethod
    def spec(self, at: Sequence[int]) -> LoadStoreSpec:
        """Where these blocks are, in the words of the handler."""

    def read(
        self, at: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        assert self._handler is not None
        return self._handler.load(self.spec(at), keys, into)

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()


class ListedSource(HandlerSource):
    """Blocks that were listed one by one. `at` is a block's number in that list."""

    def __init__(
        self,
        tier: int,
        kind: str,
        open_handler: Callable[[Namespace], Handler],
        listed: Sequence[Stored],
    ) -> None:
        super().__init__(tier, kind, open_handler)
        self._listed = listed

    def rows(self) -> Rows:
        rows = np.zeros(len(self._listed), ROW)
        for number, (row, stored) in enumerate(zip(rows, self._listed, strict=True)):
            row["key"] = stored.key.ljust(KEY_BYTES_MAX, b"\0")
            row["key_bytes"] = len(stored.key)
            row["at"] = number
            row["bytes"] = stored.bytes
            row["stored_at"] = stored.stored_at
            row["uses"] = stored.hits or 0
            row["used_at"] = int(stored.used or 0)
        return rows

    def spec(self, at: Sequence[int]) -> LoadStoreSpec:
        specs = [self._listed[number].at for number in at]
        return type(specs[0]).join(specs)
