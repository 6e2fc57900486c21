"""Lookup: which tier can give each block, and which hits are reserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.chain.context import ChainContext
from kvtier.chain.hits import HitRoom
from kvtier.chain.misses import Cause, last_loss
from kvtier.chain.plan import (
    COMING,
    HOST,
    JOINING,
    NOWHERE,
    plan_at_hand,
    plan_host,
    plan_lower,
    plan_queue,
    plan_room,
)
from kvtier.types import BlockKey, MissReason, Presence


def locate(context: ChainContext, keys: Sequence[BlockKey], *, at_hand: bool = False) -> list[int]:
    """The nearest tier that can give each key, or NOWHERE, COMING, JOINING (see plan); with
    `at_hand` only blocks that need no waiting. It promises nothing and ignores room. Tiers are
    asked in order, except those that are down, and except for keys that failed just now."""
    tiers, ledger = context.tiers, context.ledger
    answers = tiers[HOST].lookup(keys)
    if Presence.MISS not in answers and Presence.PENDING not in answers:
        return [HOST] * len(keys)
    if at_hand:
        coming = [key for key in keys if key in ledger.joinable]
        return plan_at_hand(keys, answers, set(tiers[HOST].arrived(coming)))
    # Their slots are not free yet: nothing could be loaded into host memory under these keys.
    lost = ledger.abandoned | ledger.dropped_pinned
    origins = plan_host(keys, answers, ledger.joinable, lost)
    sought = [at for at, origin in enumerate(origins) if origin == NOWHERE]
    if lost:
        sought = [at for at in sought if keys[at] not in lost]
    now = context.clock()
    for tier in range(HOST + 1, len(tiers)):
        if not sought:
            break
        if not context.readable(tier, now):
            continue
        resting = context.loads.resting(tier)
        skipped = [at for at in sought if keys[at] in resting] if resting else []
        if skipped:
            sought = [at for at in sought if keys[at] not in resting]
        whole = len(sought) == len(keys)
        answers = tiers[tier].lookup(keys if whole else [keys[at] for at in sought])
        origins, sought = plan_lower(origins, sought, tier, answers)
        sought = sorted(sought + skipped) if skipped else sought
    return origins


def why_missed(context: ChainContext, key: BlockKey) -> Cause:
    """Why no tier gives this block now; without a reason if one does."""
    now = context.clock()
    (origin,) = locate(context, [key])
    if origin >= HOST or origin == JOINING:
        return Cause(None, origin)
    if origin == COMING:
        return Cause(MissReason.NOT_STORED)
    for tier in range(HOST + 1, len(context.tiers)):
        if context.tiers[tier].lookup([key]) == [Presence.HIT]:
            failed = context.readable(tier, now)  # and so it is the key that rests
            return Cause(MissReason.LOAD_FAILED if failed else MissReason.UNREACHABLE, tier)
    if (known := last_loss(context.misses.history(key))) is not None:
        past, besides = known
        return Cause(past.fate.reason, past.tier, past, besides)
    for tier in range(HOST + 1, len(context.tiers)):
        if context.tiers[tier].learning or not context.readable(tier, now):
            return Cause(MissReason.UNREACHABLE, tier)
    return Cause(MissReason.NOT_COMPUTED)


class Reservations:
    """Room for every hit of a lookup, in host memory and with the mover, until the engine's step is
    over: an account of the slots, and of the loads that may be under way."""

    def __init__(self, context: ChainContext) -> None:
        self._context = context
        self._queues = queues = context.queues
        self._free: int | None = None
        self._queued: Counter[int] = Counter()
        """Blocks reserved from each lower tier; some of them may be under way already."""
        self._withheld = [0] * len(queues)
        """Host slots, and blocks of each lower tier, that are kept for requests which wait and are
        not asked about again in this step."""
        self.held = context.ledger.promised

    @property
    def made(self) -> bool:
        """Whether there is anything to be ended."""
        return bool(self.held or self._queued) or self._free is not None or any(self._withheld)

    def room(self) -> int:
        """Host slots that hits can still reserve."""
        if self._free is None:
            host = self._context.tiers[HOST].stats()
            self._free = self._context.slots[HOST] - host.pinned - host.in_flight - host.quarantined
        return self._free - len(self.held) - self._withheld[HOST]

    def spare(self) -> list[int]:
        """Host slots, and blocks of each lower tier, that can still be reserved."""
        return [self.room(), *map(self._queue, range(HOST + 1, len(self._queues)))]

    def withhold(self, taken: Sequence[int]) -> None:
        """Keep so much of `spare` for one request in this step, without saying for which keys."""
        self._withheld = [a + b for a, b in zip(self._withheld, taken, strict=True)]

    def left(self) -> HitRoom:
        """What can still be reserved for a request, wherever its blocks are."""
        tiers = range(HOST + 1, len(self._queues))
        if any(self._queue(tier) < self._queues[tier] // 2 for tier in tiers):
            self._queued = Counter(self.held.values())
        queues = {tier: max(0, self._queue(tier)) for tier in tiers}
        return HitRoom(self.room(), self.held, self._context.direct, queues)

    def _queue(self, tier: int) -> int:
        loading, withheld = self._context.ledger.loading[tier], self._withheld[tier]
        return self._queues[tier] - loading - self._queued[tier] - withheld

    def reserve(self, keys: Sequence[BlockKey], origins: list[int]) -> list[int]:
        """Reserve the room of these; answers NOWHERE in place of what there is no room for."""
        slotless = self._context.direct
        origins = plan_room(keys, origins, self.held, self.room(), slotless)
        for tier in range(HOST + 1, len(self._queues)):
            if tier in slotless or tier not in origins:
                continue
            if origins.count(tier) > self._queue(tier):
                self._queued = Counter(self.held.values())
                origins = plan_queue(keys, origins, self.held, tier, self._queue(tier))
            self._queued[tier] += origins.count(tier)
        hits = zip(keys, origins, strict=True)
        if min(origins, default=HOST) >= HOST and not slotless:
            self.held.update(hits)
        else:
            self.held.update([hit for hit in hits if hit[1] >= HOST and hit[1] not in slotless])
        return origins

    def count_again(self) -> None:
        """Slots may have been taken, or set free."""
        self._free = None

    def end(self) -> None:
        """Nothing is reserved any more."""
        self.held.clear()
        self._queued.clear()
        self._withheld = [0] * len(self._queues)
        self._free = None
