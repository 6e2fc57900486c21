"""Lookup: which tier can give each block, and which hits are reserved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvtier.chain.health import Health
from kvtier.chain.hits import Room
from kvtier.chain.ledger import Ledger, Ticket
from kvtier.chain.plan import (
    HOST,
    NOWHERE,
    plan_at_hand,
    plan_host,
    plan_lower,
    plan_queue,
    plan_room,
)
from kvtier.chain.stats import Tally, direct
from kvtier.cost.model import CostModel
from kvtier.interfaces.mover import Mover
from kvtier.interfaces.tier import Tier
from kvtier.types import BlockKey, Outcome, Presence


class Locator:
    """Asks the tiers in order, except those that are down, and keys that failed just now."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        ledger: Ledger,
        health: Health,
        direct: DirectReads,
        mover: Mover,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._health = health
        self._direct = direct
        self._mover = mover
        self._clock = clock

    def locate(self, keys: Sequence[BlockKey], *, at_hand: bool = False) -> list[int]:
        """The nearest tier that can give each key, or NOWHERE, COMING, JOINING (see plan); with
        `at_hand` only blocks that need no waiting. It promises nothing and ignores room."""
        ledger = self._ledger
        answers = self._tiers[HOST].lookup(keys)
        if Presence.MISS not in answers and Presence.PENDING not in answers:
            return [HOST] * len(keys)
        if at_hand:
            coming = [key for key in keys if key in ledger.joinable]
            return plan_at_hand(keys, answers, set(self._tiers[HOST].arrived(coming)))
        # Their slots are not free yet: nothing could be loaded into host memory under these keys.
        lost = ledger.abandoned | ledger.dropped_pinned
        origins = plan_host(keys, answers, ledger.joinable, lost)
        sought = [at for at, origin in enumerate(origins) if origin == NOWHERE]
        if lost:
            sought = [at for at in sought if keys[at] not in lost]
        now = self._clock()
        for tier in range(HOST + 1, len(self._tiers)):
            if not sought:
                break
            if self._health.down(tier, now) or not self._reachable(tier):
                continue
            resting = self._health.resting(tier)
            skipped = [at for at in sought if keys[at] in resting] if resting else []
            if skipped:
                sought = [at for at in sought if keys[at] not in resting]
            whole = len(sought) == len(keys)
            answers = self._tiers[tier].lookup(keys if whole else [keys[at] for at in sought])
            origins, sought = plan_lower(origins, sought, tier, answers)
            sought = sorted(sought + skipped) if skipped else sought
        return origins

    def _reachable(self, tier: int) -> bool:
        """Whether blocks of a lower tier can be had: by readers of its files, or by the mover."""
        return tier in self._direct.tiers or not self._mover.down


# The way around host memory: readers that fetch blocks from the files of a lower tier themselves.
#
# A block takes it the first time. One that is used again is worth a slot in host memory, if there
# is room: from there it is nearer still. Whoever pins here is told how the reads ended, as for a
# move.

_USES_KEPT = 1 << 16


class DirectReads:
    """Decides which blocks are read directly, pins them, and learns from how the reads end."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        ledger: Ledger,
        health: Health,
        tally: Tally,
        costs: CostModel | None,
    ) -> None:
        self._in_files = frozenset(
            index for index, tier in enumerate(tiers) if index and tier.in_files
        )
        self._ledger = ledger
        self._health = health
        self._tally = tally
        self._costs = costs
        self._used: OrderedDict[BlockKey, None] = OrderedDict()
        self.tiers: frozenset[int] = frozenset()
        """Those whose blocks need no slot now."""

    def allow(self, able: bool) -> None:
        """Whether the readers can do it, from now on."""
        tiers = self._in_files if able else frozenset()
        if tiers == self.tiers:
            return
        if not able:
            self._used.clear()
        self.tiers = tiers
        self._tally.links = [
            direct(link) if tier in self.tiers else link
            for tier, link in enumerate(self._tally.moved)
        ]

    def start(
        self, ticket: Ticket, tier: int, keys: Sequence[BlockKey], room: int
    ) -> list[BlockKey]:
        """Pin what the ticket's reader will fetch itself; answers with what is to get a slot."""
        again = [key for key in keys if key in self._used]
        if len(again) > room:
            again = []
        for key in again:
            self._used.pop(key, None)  # it may be asked for twice
        taken = set(again)
        first = [key for key in keys if key not in taken]
        if first:
            self._tally.found(tier, self._ledger.pin_files(ticket, tier, first))
        for key in first:
            self._used[key] = None
        while len(self._used) > _USES_KEPT:
            self._used.popitem(last=False)
        return again

    def ended(
        self,
        ticket: Ticket,
        failed: Mapping[BlockKey, Outcome],
        bytes_read: int,
        seconds: float,
        now: float,
    ) -> None:
        """Book how a ticket's reads have ended, before it is released."""
        for tier, keys in ticket.pinned_files:
            bad = {key: failed[key] for key in keys if key in failed}
            self._health.observe(tier, [bad.get(key, Outcome.OK) for key in keys], now)
            self._health.rest(tier, [k for k in bad if bad[k] is not Outcome.CANCELLED], now)
            self._tally.failed(tier, bad.values())
            if self._costs is not None and seconds > 0:
                size = sum(self._tally.sizes(keys)) if bad else bytes_read
                # Not by `tally.links`: this may have been the last read around host memory.
                link = direct(self._tally.moved[tier])
                self._costs.observe_load(link, size, seconds, not bad)
                seconds = 0.0


# What lookup promises: room for every hit, in host memory and with the mover, until the engine's
# step is over.


class Promises:
    """Keeps account of host memory's slots and of the loads that may be under way: what is taken,
    and what was promised. `queues` is how many blocks of each tier the mover has at most."""

    def __init__(
        self,
        host: Tier,
        slots: int,
        queues: Sequence[int],
        ledger: Ledger,
        direct: DirectReads,
    ) -> None:
        self._host = host
        self._slots = slots
        self._queues = queues
        self._ledger = ledger
        self._direct = direct
        self._free: int | None = None
        self._queued: Counter[int] = Counter()
        """Blocks promised from each lower tier; some of them may be under way already."""
        self._withheld = [0] * len(queues)
        """Host slots, and blocks of each lower tier, that are kept for requests which wait and are
        not asked about again in this step."""
        self.kept = ledger.promised

    @property
    def made(self) -> bool:
        """Whether there is anything to be ended."""
        return bool(self.kept or self._queued) or self._free is not None or any(self._withheld)

    @property
    def slotless(self) -> frozenset[int]:
        """The tiers whose blocks do not come through host memory."""
        return self._direct.tiers

    def room(self) -> int:
        """Host slots that hits can still be promised."""
        if self._free is None:
            host = self._host.stats()
            self._free = self._slots - host.pinned - host.in_flight - host.quarantined
        return self._free - len(self.kept) - self._withheld[HOST]

    def spare(self) -> list[int]:
        """Host slots, and blocks of each lower tier, that can still be promised."""
        return [self.room(), *map(self._queue, range(HOST + 1, len(self._queues)))]

    def withhold(self, taken: Sequence[int]) -> None:
        """Promise so much of `spare` to nobody in this step, without saying for which keys."""
        self._withheld = [a + b for a, b in zip(self._withheld, taken, strict=True)]

    def left(self) -> Room:
        """What can still be promised to a request, wherever its blocks are."""
        tiers = range(HOST + 1, len(self._queues))
        if any(self._queue(tier) < self._queues[tier] // 2 for tier in tiers):
            self._queued = Counter(self.kept.values())
        queues = {tier: max(0, self._queue(tier)) for tier in tiers}
        return Room(self.room(), self.kept, self.slotless, queues)

    def _queue(self, tier: int) -> int:
        loading, withheld = self._ledger.loading[tier], self._withheld[tier]
        return self._queues[tier] - loading - self._queued[tier] - withheld

    def make(self, keys: Sequence[BlockKey], origins: list[int]) -> list[int]:
        """Take back what there is no room for, and hold the room of the rest."""
        slotless = self.slotless
        origins = plan_room(keys, origins, self.kept, self.room(), slotless)
        for tier in range(HOST + 1, len(self._queues)):
            if tier in slotless or tier not in origins:
                continue
            if origins.count(tier) > self._queue(tier):
                self._queued = Counter(self.kept.values())
                origins = plan_queue(keys, origins, self.kept, tier, self._queue(tier))
            self._queued[tier] += origins.count(tier)
        hits = zip(keys, origins, strict=True)
        if min(origins, default=HOST) >= HOST and not slotless:
            self.kept.update(hits)
        else:
            self.kept.update([hit for hit in hits if hit[1] >= HOST and hit[1] not in slotless])
        return origins

    def count_again(self) -> None:
        """Slots may have been taken, or set free."""
        self._free = None

    def end(self) -> None:
        """What was promised no longer is."""
        self.kept.clear()
        self._queued.clear()
        self._withheld = [0] * len(self._queues)
        self._free = None
