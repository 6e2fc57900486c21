"""The interface of eviction policies, the registry that finds them by name, and the plainest."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Container, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import ClassVar

import numpy as np

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
    - the same calls give the same answers, in every process, unless it shares what it learns.
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

    def shared_bytes(self, slots: int) -> int:
        """How much memory the policies of several processes may share, which have so many slots
        together, to learn from what all of them see; 0 if there is nothing to be learned."""
        return 0

    def share(self, memory: memoryview, now: float) -> None:  # noqa: B027 - most learn nothing
        """Keep there from now on what is learned: zeros at first, and what others have written
        later, or anything. It has the size that `shared_bytes` said, to this policy or another."""

    def close(self) -> None:  # noqa: B027 - most share nothing
        """Let go of memory that is shared."""

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
    "lru": "kvtier.eviction.policy:LRU",
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


# -- least recently used ---------------------------------------------------------------------------


NOWHERE = 0
"""The list of a slot that is in none."""

_END = -1


class SlotLists:
    """Doubly linked lists, numbered from 1, each with a cold and a hot end; a slot is in at most
    one. Every operation on a slot takes the same short time."""

    def __init__(self, lists: int) -> None:
        self.member_of = bytearray()
        self._colder = array("i")
        self._hotter = array("i")
        self._coldest = [_END] * (lists + 1)
        self._hottest = [_END] * (lists + 1)
        self.length = [0] * (lists + 1)

    def resize(self, slots: int) -> None:
        more = slots - len(self.member_of)
        if more > 0:
            self.member_of.extend(bytes(more))
            self._colder.frombytes(bytes(more * self._colder.itemsize))
            self._hotter.frombytes(bytes(more * self._hotter.itemsize))

    @property
    def nbytes(self) -> int:
        return len(self.member_of) * (1 + 2 * self._colder.itemsize)

    def append(self, which: int, slot: int) -> None:
        """Put a slot that is in no list at the hot end."""
        last = self._hottest[which]
        self._colder[slot] = last
        self._hotter[slot] = _END
        self._hottest[which] = slot
        if last == _END:
            self._coldest[which] = slot
        else:
            self._hotter[last] = slot
        self.member_of[slot] = which
        self.length[which] += 1

    def insert_below(self, anchor: int, slot: int) -> None:
        """Put a slot that is in no list just colder than one that is."""
        which = self.member_of[anchor]
        below = self._colder[anchor]
        self._colder[slot] = below
        self._hotter[slot] = anchor
        self._colder[anchor] = slot
        if below == _END:
            self._coldest[which] = slot
        else:
            self._hotter[below] = slot
        self.member_of[slot] = which
        self.length[which] += 1

    def unlink(self, slot: int) -> None:
        """Take a slot out of its list."""
        which = self.member_of[slot]
        below, above = self._colder[slot], self._hotter[slot]
        if below == _END:
            self._coldest[which] = above
        else:
            self._hotter[below] = above
        if above == _END:
            self._hottest[which] = below
        else:
            self._colder[above] = below
        self.member_of[slot] = NOWHERE
        self.length[which] -= 1

    def place(self, which: int, slots: Sequence[int], after: int = UNKNOWN) -> None:
        """Put a run of a prefix, head first, into a list so that its tail is colder than its head:
        just below `after` if that is in this list, else at the hot end."""
        if after != UNKNOWN and self.member_of[after] == which:
            for slot in slots:
                self.insert_below(after, slot)
                after = slot
        else:
            for slot in reversed(slots):
                self.append(which, slot)

    def coldest(self, which: int) -> int:
        """The slot at the cold end; the list must not be empty."""
        return self._coldest[which]

    def from_coldest(self, which: int) -> Iterator[int]:
        """Slots from cold to hot; the list must not change meanwhile."""
        hotter = self._hotter
        slot = self._coldest[which]
        while slot != _END:
            yield slot
            slot = hotter[slot]

    def append_all(self, which: int, slots: Sequence[int]) -> None:
        """Put many slots that are in no list at the hot end, coldest first, all at once."""
        if not len(slots):
            return
        run = np.asarray(slots, dtype=np.int32)
        colder = np.frombuffer(self._colder, dtype=np.int32)
        hotter = np.frombuffer(self._hotter, dtype=np.int32)
        last = self._hottest[which]
        colder[run[1:]] = run[:-1]
        hotter[run[:-1]] = run[1:]
        colder[run[0]] = last
        hotter[run[-1]] = _END
        np.frombuffer(self.member_of, dtype=np.uint8)[run] = which
        if last == _END:
            self._coldest[which] = int(run[0])
        else:
            hotter[last] = run[0]
        self._hottest[which] = int(run[-1])
        self.length[which] += len(run)


class ListPolicy(EvictionPolicy):
    """A policy whose resident slots are those in its lists."""

    lists: ClassVar[int]
    """How many there are."""
    loaded_into: ClassVar[int] = 1
    """The one for what a restart found."""

    def __init__(self, slots: int = 0) -> None:
        self._lists = SlotLists(self.lists)
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        self.slots = max(self.slots, slots)
        self._lists.resize(slots)

    def remove(self, slots: Sequence[int]) -> None:
        member_of, unlink = self._lists.member_of, self._lists.unlink
        for slot in slots:
            if member_of[slot] != NOWHERE:
                unlink(slot)

    def _unpinned(self, which: int, pinned: Container[int]) -> Iterator[int]:
        """The slots of a list that may go, from cold to hot."""
        return (slot for slot in self._lists.from_coldest(which) if slot not in pinned)

    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        self._lists.append_all(self.loaded_into, slots)

    def __len__(self) -> int:
        return sum(self._lists.length)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < self.slots and self._lists.member_of[slot] > 0

    @property
    def nbytes(self) -> int:
        return self._lists.nbytes


_ALL = 1


class LRU(ListPolicy):
    """Evicts the least recently used, the tail of a prefix before its head; 9 bytes a slot."""

    name: ClassVar[str] = "lru"
    lists = 1

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        self.remove(slots)
        self._lists.place(_ALL, slots, after)

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        return list(islice(self._unpinned(_ALL, pinned), max(count, 0)))
