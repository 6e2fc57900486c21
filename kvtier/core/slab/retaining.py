"""A tier over numbered slots that lets retained blocks go last, whatever its eviction policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from kvtier.core.retained.retained_blocks import RetainedBlocks
from kvtier.core.retained.retaining_policy import RetainingPolicy
from kvtier.core.slab.recovered import RecoveringTier
from kvtier.eviction import EvictionPolicy
from kvtier.types import BlockKey, TierStats


class RetainingTier(RecoveringTier):
    """A tier that knows which of its blocks are retained."""

    _reserved: dict[BlockKey, int]

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        super().__init__()
        self.retained = RetainedBlocks(clock)
        self._policy = RetainingPolicy(policy, self._is_retained, self.retained.__len__)

    def _is_retained(self, slot: int) -> bool:
        return self._key_of[slot] in self.retained

    def retain_at_most(self, blocks: int) -> None:
        self.retained.allow(blocks)

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        where, reserved = self._where, self._reserved
        refused = self.retained.retain(
            keys, session, until, lambda key: key in where or key in reserved
        )
        self._let_go_of_ended()
        return refused

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        self._tell_policy()  # what was used until now goes first all the same
        free = self.retained.release(session, None if all else keys)
        self._let_go_of_ended()
        known = set(free)
        self._go_first([*free, *(key for key in keys if key not in known)])

    @abstractmethod
    def _tell_policy(self) -> None:
        """Pass on to the policy what was touched."""

    def _go_first(self, keys: Sequence[BlockKey]) -> None:
        where = self._where
        self._policy.release(
            [where[key] for key in keys if key in where and not self.retained.wanted(key)]
        )

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        return self.retained.blocks_of(session)

    def _let_go_of_ended(self) -> None:
        """What nobody retains any more is like others, whatever has become of it."""
        where = self._where
        if ended := self.retained.take_ended():
            self._policy.give_back([where[key] for key in ended if key in where])

    def _tick_retained(self) -> None:
        self.retained.expire()
        self._let_go_of_ended()

    def _count_retained(self, stats: TierStats) -> None:
        stats.retained = len(self.retained)
        stats.retain_refused = self.retained.refused
        stats.released = self.retained.released
