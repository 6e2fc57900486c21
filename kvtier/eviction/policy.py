"""The interface of eviction policies, and the registry that finds them by name."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

from kvtier.errors import ConfigError

UNKNOWN = -1
"""In place of a slot: not known, or none."""

fingerprint = zlib.crc32
"""32 bits that stand for a key: the same in every process, and quick (20 ns)."""


class EvictionPolicy(ABC):
    """Which blocks must go. One per tier, called from one thread, never blocks.

    A slot is resident from the `use` that first names it until `evict` or `remove` gives it back.
    Guarantees that the property tests check for every policy by name:

    - `evict` returns resident slots only, none twice, none that is in `pinned`, and exactly
      min(count, resident and not pinned) of them;
    - `victims` changes nothing that a caller can see: an `evict` that follows takes the same slots;
    - state is bounded by the number of slots (ghosts of evicted blocks included);
    - the same calls give the same answers, in every process.
    """

    name: ClassVar[str]

    def __init__(self, slots: int = 0) -> None:
        self.slots = 0
        self.resize(slots)

    @abstractmethod
    def resize(self, slots: int) -> None:
        """Slots below this number may be named from now on; never fewer than before."""

    @abstractmethod
    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        """A request uses these blocks now; those that are not resident become so.

        They are consecutive blocks of one prefix, its head first, no slot twice. `after` is the
        slot of the block before `slots[0]`, UNKNOWN for the first block of a prefix (or where the
        caller does not know). `ahead` is how many further blocks of the request are missing here.

        So a request is told in two calls: `use(hits, ..., ahead=misses)` when it is looked up, and
        `use(stored, ..., after=hits[-1])` when its new blocks have landed. Both may leave out what
        they do not know: the policy then decides with less. A lookup that is only repeated for the
        same request is no further use: do not tell it again. `now` is in seconds on any clock that
        does not run backwards (a step back counts as no time passed, and time goes on after it).
        """

    @abstractmethod
    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        """The slots that `evict` would take, first one first; they stay resident."""

    def chances(self, slots: Sequence[int], seconds: float, now: float) -> Sequence[float]:
        """How likely each of these resident slots is to be used within so many seconds: 0 by a
        policy that knows an order only, which says that the first victims go before all others."""
        return [0.0] * len(slots)

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more; slots that are not resident are ignored."""

    def evict(self, count: int, pinned: Container[int] = ()) -> list[int]:
        """Give up to `count` slots back, none of them pinned: fewer only if too many are pinned."""
        slots = self.victims(count, pinned)
        self.remove(slots)
        return slots

    @abstractmethod
    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        """Take in the blocks that a restart found, in bulk: new slots, the longest unused first.

        `last_used` is on the clock of `use`, ascending; without it the order is all that is known.
        Blocks used at the same time count as one request's, its deepest block first.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many slots are resident."""

    @abstractmethod
    def __contains__(self, slot: object) -> bool:
        """Whether this slot is resident."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that this policy holds."""


GROUP = "kvtier.eviction"
"""The entry point under which other packages install policies."""
DEFAULT = "adaptive"

_OURS = {
    "adaptive": "kvtier.eviction.adaptive:Adaptive",
    "lru": "kvtier.eviction.lru:LRU",
}


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OURS}


def policy_names() -> list[str]:
    """Every name that `create_policy` knows; ours cannot be replaced by another's."""
    return sorted([*_OURS, *_others()])


@cache
def policy_class(name: str) -> type[EvictionPolicy]:
    """Import the policy of this name; raises ConfigError if there is none or it is broken."""
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        found: object = getattr(import_module(module), attribute)
    elif name in _others():
        try:
            found = _others()[name].load()
        except Exception as error:  # whatever its package raises
            raise ConfigError(
                ".eviction",
                f"the eviction policy {name!r} cannot be imported: {error}",
                "reinstall the package that brings it",
            ) from error
    else:
        raise ConfigError(
            ".eviction",
            f"there is no eviction policy {name!r}",
            f"write one of {', '.join(policy_names())}",
        )
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(
            ".eviction",
            f"what is installed as {name!r} is no EvictionPolicy: {found!r}",
            f"its entry point in the group {GROUP} must name a subclass",
        )
    return found


def create_policy(name: str = DEFAULT, slots: int = 0) -> EvictionPolicy:
    """A new policy of this name for a tier of `slots` slots."""
    return policy_class(name)(slots)
