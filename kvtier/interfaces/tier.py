"""The catalogue of a medium: what a medium must answer to be a tier.

A `Tier` runs on an engine's scheduler thread, answers from memory and never blocks. Its counterpart
is the `Handler` (`kvtier.interfaces.handler`), which moves the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvtier.interfaces.write_budget import WriteAllowance
from kvtier.types import (
    BlockKey,
    EventKind,
    Fate,
    FilePlace,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)


class TierContext(msgspec.Struct, frozen=True):
    """What a backend is told beside its settings. Crosses to the mover's process."""

    namespace: Namespace
    engine: str = "default"
    """Names this engine among those of one machine: what it alone writes carries it."""
    near: tuple[int, ...] = ()
    """The NUMA nodes that host memory should come from; empty where there is no choice."""
    serving: bool = False
    """Whether an engine is about to serve with it: what takes long is then done at once."""
    stack: str = "default"
    """Names the stack, whose engines share their host memory."""


class Tier(ABC):
    """Catalogue of one medium: what it holds, what it can take, what must go.

    Guarantees that the contract suite (`kvtier.testing`) checks:

    - nothing here blocks, and nothing raises but for a caller's own mistake (`NotResident`);
    - a key is a HIT only between its commit and its removal; a reserved key is PENDING;
    - a block that is being loaded (pinned) is never evicted nor overwritten;
    - reserve (`prepare_store`), commit and abort (`complete_store`) are the only ways in; after an
      abort there is no trace; capacity holds at every moment.
    """

    medium: str
    in_files: bool = False
    """Whether records lie in local files as they are: `files` says where."""
    shared: bool = True
    """Whether what other engines store may be found here."""
    out_of_use: bool = False
    """Whether it has broken these guarantees: it holds and takes nothing more (`IsolatedTier`)."""
    unwell: bool = False
    """Whether what it does itself on its medium, beside the mover, fails now. When that has ended,
    nobody need wait any longer to try."""
    learning: bool = False
    """Whether it has still to learn what its medium holds: what it lacks may well be there."""
    finds: bool = False
    """Whether only its medium can tell what it holds, because others write and evict there:
    `prepare_find` says what to ask it (`Handler.find`) when a request comes into the queue."""
    strikes: int = 3
    """So many transfers fail in a row before it is left alone for a while."""
    allowance: WriteAllowance | None = None
    """What may be written to its medium now; None: as much as comes."""

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        """What is known of each key; from memory, and no promise until `prepare_load`."""

    @abstractmethod
    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        """Pin resident keys and say where they are; raises NotResident and pins none otherwise."""

    @abstractmethod
    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        """Unpin what `prepare_load` pinned. Keys that failed are no longer offered; the corrupt
        ones are quarantined, and counted."""

    @abstractmethod
    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        """Reserve room for the keys that are new here, evicting if allowed; in their order.

        A subset means that the rest is resident, on its way, or has no room. Never waits.
        """

    @abstractmethod
    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        """Commit reserved keys, all bytes of which have landed; abort those in `failed`."""

    def prepare_find(
        self, keys: Sequence[BlockKey]
    ) -> tuple[Sequence[BlockKey], LoadStoreSpec | None]:
        """Those of these of which its medium has to be asked whether it holds them, and where they
        would be; None if there are none."""
        return [], None

    def complete_find(  # noqa: B027 - most tiers know
        self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]
    ) -> None:
        """What the medium has answered: OK, GONE, or why it could not be asked."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        """A request used these keys: `keys[i]` is block `start + i` of its prefix."""

    @abstractmethod
    def victims(self, count: int) -> list[BlockKey]:
        """The next keys that eviction would take, coldest first: what to demote ahead of time."""

    def victims_within(self, count: int, seconds: float, chance: float) -> list[BlockKey]:
        """As `victims`, up to the first that is used within so many seconds with a greater chance,
        as far as its eviction policy can tell: what gives way to a block that may be used then."""
        return self.victims(count)

    @abstractmethod
    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop these keys if they are resident and not pinned (pinned ones: when unpinned)."""

    @abstractmethod
    def clear(self) -> None:
        """Invalidate everything of this namespace: what is resident is offered no longer (pinned
        slots are free when unpinned), and what is reserved now will never become visible."""

    @abstractmethod
    def take_events(self) -> list[TierEvent]:
        """What became visible or vanished since the last call, oldest first."""

    def take_lost(self) -> Sequence[tuple[Sequence[BlockKey], Fate]]:
        """What it lost since the last call though nobody asked it to make room or to forget, and
        how: to others, to its capacity. It tells why a request misses, and may be incomplete."""
        return ()

    @abstractmethod
    def stats(self) -> TierStats:
        """Counters and gauges at this moment."""

    def give_up(  # noqa: B027 - only host memory is read before it is committed
        self, keys: Sequence[BlockKey]
    ) -> None:
        """Tell whoever watches their slots that what has not landed of these reserved keys never
        will: their mover died, and did not say so."""

    def arrived(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those of these reserved keys that have landed, and only wait for their move to end."""
        return []

    def files(self, spec: LoadStoreSpec) -> list[FilePlace]:
        """Where pinned records lie, for a reader that fetches them itself, around host memory. It
        proves what it reads: who does not own a file cannot keep its owner from changing it."""
        return []

    @property
    def recovered(self) -> int:
        """How many blocks that outlived an earlier process `take_recovered` may still tell of: a
        tier below may lack them, because that process died before it wrote them there."""
        return 0

    def take_recovered(self, count: int) -> tuple[Sequence[BlockKey], Sequence[int]]:
        """The next of these that are still here, the hottest first, each once, at most so many;
        and how often each was used after it was stored. It takes microseconds, and so may answer
        with fewer than there are."""
        return [], []

    def forget_recovered(self) -> None:  # noqa: B027 - there may be none
        """Nobody will ask `take_recovered` for what it has not told of yet."""

    def take_hottest(self, count: int) -> Sequence[BlockKey]:
        """The next of the blocks that outlived an earlier process and are still here, the hottest
        first, each once, at most so many: what host memory should have again before anybody asks.
        It takes microseconds, and so may answer with fewer than there are."""
        return []

    def forget_hottest(self) -> None:  # noqa: B027 - there may be none
        """Nobody will ask `take_hottest` any more."""

    def retain_at_most(self, blocks: int) -> None:  # noqa: B027 - not every tier retains
        """Let so many blocks be retained; what an earlier process has retained is, from now on."""

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        """Let these blocks of a prefix, its head first, be evicted after all others, now and when
        they come, until then (seconds since 1970) or until the session is over. A wish: `forget`
        and `clear` heed none. Says how many were refused: here, all of them."""
        return len(keys)

    def release(  # noqa: B027 - not every tier retains
        self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True
    ) -> None:
        """A session does not need these any more, nor (`all`) anything else: its blocks are evicted
        before others, but for what another session retains, or would if there were room."""

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        """The blocks that are retained for a session, each prefix from its head on."""
        return []

    @property
    def unwritten(self) -> bool:
        """Whether `tick` has something to write down that would be lost with this process."""
        return False

    def tick(self) -> None:  # noqa: B027 - most media have no housekeeping
        """Short housekeeping, called between steps; never blocks."""

    def refresh(self) -> None:  # noqa: B027 - not every medium is shared
        """Learn now what other processes have committed or dropped. May block: never called on a
        scheduler thread, which learns the same a moment later by itself."""

    def flush(self) -> None:  # noqa: B027 - not every medium outlives its process
        """Wait until what was dropped so far stays dropped even if this process dies. May block:
        never called on a scheduler thread. (What is committed survives at once.)"""

    def carry_uses(  # noqa: B027 - not every medium counts them
        self, used: Mapping[BlockKey, tuple[int, float]]
    ) -> None:
        """Write down how often these blocks were used, and when last, before they were copied here:
        a statistic, no more. May block: never called on a scheduler thread."""

    def close(self) -> None:  # noqa: B027 - memory needs no closing
        """Release what this process holds; committed blocks stay where they are."""


# -- events ----------------------------------------------------------------------------------------


_KEYS_MAX = 1 << 14
"""So many keys are told of in order; nobody may listen for days, or at all."""


class Events:
    """Not more than what there was when somebody listened last, and what there is now."""

    def __init__(self) -> None:
        self._recent: list[tuple[EventKind, tuple[BlockKey, ...]]] = []
        self._keys = 0
        self._kind_of: dict[BlockKey, EventKind] = {}

    def add(self, kind: EventKind, keys: Collection[BlockKey]) -> None:
        """This has happened to these keys."""
        if keys:
            self._recent.append((kind, tuple(keys)))
            self._keys += len(keys)
            if self._keys > _KEYS_MAX:
                self.fold()

    def fold(self) -> None:
        """Keep of all until now only what it comes to."""
        kind_of = self._kind_of
        for kind, keys in self._recent:
            for key in keys:
                if kind_of.setdefault(key, kind) is not kind:
                    del kind_of[key]  # it is again as it was
        self._recent, self._keys = [], 0

    def take(self, medium: str) -> list[TierEvent]:
        """What to tell now, of this medium."""
        kind_of, recent = self._kind_of, self._recent
        if not kind_of and not recent:
            return []
        self.clear()
        folded = [(kind, tuple(k for k in kind_of if kind_of[k] is kind)) for kind in EventKind]
        return [TierEvent(kind, medium, keys) for kind, keys in folded + recent if keys]

    def clear(self) -> None:
        """Tell nothing of all this."""
        self._kind_of, self._recent, self._keys = {}, [], 0


class Losses:
    """What a tier lost to others, or to its capacity, until somebody asks; the last of it, if
    nobody does."""

    def __init__(self) -> None:
        self._lost: deque[tuple[Sequence[BlockKey], Fate]] = deque()
        self._keys = 0

    def add(self, keys: Collection[BlockKey], fate: Fate) -> None:
        """These are gone."""
        if keys:
            self._lost.append((list(keys)[:_KEYS_MAX], fate))
            self._keys += len(self._lost[-1][0])
            while self._keys > _KEYS_MAX:
                self._keys -= len(self._lost.popleft()[0])

    def take(self) -> Sequence[tuple[Sequence[BlockKey], Fate]]:
        """All of it, oldest first."""
        if not self._lost:
            return ()
        taken, self._lost, self._keys = self._lost, deque(), 0
        return taken
