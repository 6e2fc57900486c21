"""How a copy fills a tier: what it opens there, what it must not harm, what it leaves written."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvtier.core.inspection.contents import InspectorContext
from kvtier.core.interfaces.handler import Handler
from kvtier.core.interfaces.tier import Tier, TierContext
from kvtier.core.records.record import record_bytes
from kvtier.core.settings import Admission, Duration, Persistence, TierSettings, WritePolicy
from kvtier.types import BlockKey, Namespace

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
