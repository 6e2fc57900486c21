"""How a copy reads blocks from one tier and fills another."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.inspect.contents import InspectorContext, Stored
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier, TierContext
from kvtier.record.record import Buffer, record_bytes
from kvtier.settings import Admission, Duration, Persistence, TierSettings, WritePolicy
from kvtier.types import KEY_BYTES_MAX, BlockKey, LoadStoreSpec, Namespace, Outcome

S = TypeVar("S", bound=TierSettings)

SETTLE_S = 120.0
TAKE_ALL: dict[str, Any] = {
    "write": WritePolicy.THROUGH,
    "admission": Admission.ALWAYS,
    "load_deadline": Duration(SETTLE_S),
    "store_deadline": Duration(SETTLE_S),
    "queue_blocks": 1 << 20,
}
"""What makes a tier take everything that it is given, and gives it time."""


class TierOpener(Protocol):
    """The two other doors of a backend."""

    kind: str

    def open_tier(self, settings: Any, context: TierContext) -> Tier: ...

    def open_handler(self, settings: Any, context: TierContext) -> Handler: ...


class CopyAudit(ABC):
    """What a tier should have written down about its blocks once a copy has ended."""

    @abstractmethod
    def add(self, keys: Sequence[BlockKey]) -> None:
        """These are there."""

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey]) -> None:
        """These had to make room."""

    @abstractmethod
    def missing(self) -> int:
        """How many of them nothing tells of: nobody will find them but by a listing."""


class Filling(Generic[S]):
    """How one tier is filled, as a tier of its stack."""

    one_namespace: str = ""
    """What it is, in a word, if it holds the blocks of one namespace only: another one's would end
    the first."""

    def __init__(
        self, opener: TierOpener, settings: S, context: InspectorContext, capacity: int
    ) -> None:
        self.opener = opener
        self.settings = settings
        self.context = context
        self.tier = context.tier
        self.engine = context.engine
        self.reporter = context.reporter
        self.capacity = capacity
        """The bytes that the tier may take here."""

    def keeps(self) -> bool:
        """Whether blocks outlive the process that stored them."""
        return getattr(self.settings, "persistence", None) is not Persistence.DISCARD

    def alone(self) -> AbstractContextManager[None]:
        """Be the only command that fills this medium, if two at once would harm it."""
        return nullcontext()

    def opened_settings(self) -> S:
        """The settings that a copy opens the tier with."""
        return msgspec.structs.replace(self.settings, **TAKE_ALL)

    def check(self, namespace: Namespace) -> None:
        """Raise KVTierError if these blocks would push out what another command may still want."""

    def open(self, namespace: Namespace) -> tuple[Tier, Handler]:
        """Both halves of the tier. Raises KVTierError."""
        settings, context = self.opened_settings(), self.tier_context(namespace)
        return self.pair(self.opener.open_tier(settings, context), settings, context)

    def tier_context(self, namespace: Namespace) -> TierContext:
        """Beside an engine that runs, a copy needs a name of its own."""
        return TierContext(namespace, f"copy-{os.getpid()}" if self.tier else self.engine)

    def pair(self, tier: Tier, settings: S, context: TierContext) -> tuple[Tier, Handler]:
        """The tier, which knows what is retained there, with its handler; closed again if that
        cannot be opened."""
        try:
            if self.context.retain_share:
                self.heed_retained(tier, context.namespace)
            return tier, self.opener.open_handler(settings, context)
        except BaseException:
            tier.close()
            raise

    def heed_retained(self, tier: Tier, namespace: Namespace) -> None:
        """Have the tier evict what is retained there after all others, as in its engines."""
        blocks = self.capacity // max(self.block_bytes(namespace))
        tier.retain_at_most(int(blocks * self.context.retain_share))

    def block_bytes(self, namespace: Namespace) -> list[int]:
        """What a block of each cache group takes; the last counts for all groups beyond."""
        return [record_bytes(size) for size in namespace.group_bytes]

    def taken(self, blocks: int, room: int, block_bytes: Sequence[int]) -> int:
        """How much room so many blocks take from others, which need `room` bytes themselves."""
        return room

    def protect(
        self, namespace: Namespace, keys: Callable[[], Set[BlockKey]]
    ) -> AbstractContextManager[None]:
        """Meanwhile these blocks, which were copied, make no room for the namespace that is next:
        `keys` says which they are, where a medium must know."""
        return nullcontext()

    def carry_uses(
        self, tier: Tier, namespace: Namespace, used: Mapping[BlockKey, tuple[int, float]]
    ) -> None:
        """Write down how often blocks were used, and when last, before they came here."""
        tier.carry_uses(used)

    def audit(self, namespace: Namespace) -> CopyAudit | None:
        """What is to be asked, once all is closed, whether it tells of what was copied."""
        return None


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
"""One block that a copy may take, in some seventy bytes: `at` is its place as its source names it,
`origin` tells several sources apart."""
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
