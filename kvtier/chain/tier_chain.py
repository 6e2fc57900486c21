"""Ordered tiers that behave as one: where plan, ledger and tiers meet the mover."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import partial

from kvtier.chain.context import ChainContext
from kvtier.chain.hits import Decision, HitPlanner, Span, asked, columns, needed
from kvtier.chain.ledger import Ticket
from kvtier.chain.load import Loads
from kvtier.chain.lookup import Reservations, locate, why_missed
from kvtier.chain.misses import Cause, Past
from kvtier.chain.plan import HOST, JOINING, NOWHERE
from kvtier.chain.prefetch import Prefetches
from kvtier.chain.queries import Queries
from kvtier.chain.stats import ChainStats
from kvtier.chain.store import Cascade
from kvtier.interfaces.mover import TransferResult
from kvtier.interfaces.tier import Tier
from kvtier.settings import PrefetchSettings, RetainSettings, TierSettings, WritePolicy
from kvtier.system.calls import close_all
from kvtier.types import (
    BlockKey,
    Fate,
    MissReason,
    Outcome,
    Presence,
    Reservation,
)

_OFF = RetainSettings(share=0.0)


class Retention:
    """Passes on what is to be kept, and for how long, to every tier that decides on its blocks."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        rules: Sequence[TierSettings],
        slots: Sequence[int],
        settings: RetainSettings | None,
    ) -> None:
        settings = settings or _OFF
        self._max_ttl = settings.max_ttl.seconds
        self._clock = time.time
        # What is only read takes nothing in, and so lets nothing go.
        self._tiers = [
            tier
            for at, (tier, rule) in enumerate(zip(tiers, rules, strict=True))
            if settings.share and (at == HOST or rule.write is not WritePolicy.NEVER)
        ]
        for tier, count in zip(tiers, slots, strict=True):
            if tier in self._tiers:
                tier.retain_at_most(int(count * settings.share))

    @property
    def unwritten(self) -> bool:
        """Whether a tier has still to write down what it retains: at its next `tick`."""
        return any(tier.unwritten for tier in self._tiers)

    def retain(
        self, keys: Sequence[BlockKey], session: str, seconds: float | None = None
    ) -> list[int]:
        """Keep these blocks of a prefix, its head first, for so long, or (None) until the session
        is over; never longer than `max_ttl`. Says how many each tier has refused."""
        span = self._max_ttl if seconds is None else min(seconds, self._max_ttl)
        if not span > 0 or math.isnan(span):
            return [0] * len(self._tiers)
        until = self._clock() + span
        return [tier.retain(keys, session, until) for tier in self._tiers]

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        """A session is over (`all`), or needs these no more: what it retained goes first, and so do
        `keys`; but nothing that others retain."""
        for tier in self._tiers:
            tier.release(session, keys, all=all)

    def blocks_of(self, session: str) -> Sequence[BlockKey]:
        """What is retained for a session, in the tier that has most of it."""
        found: list[Sequence[BlockKey]] = [tier.retained_for(session) for tier in self._tiers]
        return max(found, key=len, default=[])


STEP_BLOCKS = 128
"""The most written blocks that one call settles, beside as many as the last one has started."""
STEP_USES, USES_KEPT = 8, 1024
"""Of how many requests one call tells the lower tiers what they use, and how many wait for it."""


PREFETCH_OFF = PrefetchSettings(waiting=False, warmup_share=0.0)


class TierChain:
    """Tiers that behave as one, the first of which is host memory.

    It loads in one hop (`begin_load`) and works between the steps of an engine (`poll`). All of it
    is for one thread and none of it blocks. It owns its tiers, not the mover, which is closed
    before it. Lookup answers HIT for what `begin_load` can take in. What it reserves it keeps until
    the next `poll`, as long as the engine stores nothing in between.
    """

    def __init__(
        self,
        context: ChainContext,
        *,
        prefetch: PrefetchSettings | None = None,
        retain: RetainSettings | None = None,
    ) -> None:
        self._context = context
        self.tiers, self._mover, self._clock = context.tiers, context.mover, context.clock
        self._ledger, self._counters = context.ledger, context.counters
        self.misses = context.misses
        self.retention = Retention(self.tiers, context.settings, context.slots, retain)
        self.reservations = Reservations(context)
        # By origin: those of plan that are no tier's (NOWHERE, COMING, JOINING) count from the end.
        hits = [Presence.HIT] * len(self.tiers)
        self._presences = [*hits, Presence.HIT, Presence.PENDING, Presence.MISS]
        self._planner = HitPlanner(
            context.counters, context.costs, context.ledger.joinable, context.clock
        )
        self._loads = Loads(context, self.reservations)
        self._cascade = Cascade(context)
        self.prefetches = Prefetches(
            context,
            self.reservations,
            self._loads,
            prefetch or PREFETCH_OFF,
            unsaved=self._cascade.unsaved,
            used=partial(self._cascade.committed, HOST),
        )
        self.queries = Queries(context)
        # What a part does alone is called there at once.
        self.locate, self.find = partial(locate, context), self.queries.ask
        self.read_directly = self._loads.read_directly
        self.take_samples = context.counters.take_samples
        self._stored = deque[TransferResult]()
        self._ended: list[Ticket] = []
        self._uses: deque[Sequence[BlockKey]] = deque(maxlen=USES_KEPT)
        self._touches: deque[tuple[Sequence[BlockKey], int]] = deque(maxlen=USES_KEPT)

    # lookup

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        """What is known of each key; a hit has its room reserved."""
        reserved = self.reservations.held
        if reserved and all(key in reserved for key in keys):
            return [Presence.HIT] * len(keys)
        origins = self.reservations.reserve(keys, self.locate(keys))
        return [self._presences[origin] for origin in origins]

    def match_prefix(
        self,
        keys: Sequence[BlockKey],
        tokens_per_block: int,
        start: int = 0,
        decision: Decision | None = None,
    ) -> int:
        """How many leading keys of a prefix are here, can be taken in, and cost less to load than
        to recompute; the first of them is at token `start`. Their room is reserved as by `lookup`.

        With the `decision` of an earlier call, that one is repeated if nothing has changed.
        """
        decision = decision or Decision()
        origins = self.locate(keys, at_hand=decision.at_hand)
        count = self._planner.prefix(keys, origins, tokens_per_block, start, decision)
        taken = self.reservations.reserve(keys[:count], origins[:count]) if count else []
        decision.short_of_room = NOWHERE in taken
        self.prefetches.release_room(decision, keys)
        return taken.index(NOWHERE) if NOWHERE in taken else count

    def match_windows(
        self, spans: Sequence[Span], start: int, limit: int, decision: Decision
    ) -> tuple[int, list[list[int]]]:
        """As `match_prefix`, for a request with several cache groups, or with windows: the token up
        to which it is worth loading from `start` on, and where each chunk after that is."""
        sought = asked(spans, start)
        origins: list[list[int]] = []
        for _ in range(2):  # what is too much at first may fit with what was counted again since
            origins = columns(spans, start, self.locate(sought, at_hand=decision.at_hand))
            room = self.reservations.left()
            stop = self._planner.furthest(spans, origins, start, limit, room, decision)
            fits = NOWHERE not in self.reservations.reserve(*needed(spans, origins, start, stop))
            decision.short_of_room |= not fits
            self.prefetches.release_room(decision, sought)
            if fits:
                return stop, origins
        return start, origins

    def why_missed(self, key: BlockKey) -> Cause:
        """Why a block is not found now, or, if it is, that it is here."""
        cause = why_missed(self._context, key)
        left = cause.past
        if left is not None and left.fate.reason is MissReason.EVICTED:
            for tier in self._cascade.waits_for(key):
                if tier > left.tier:
                    late = Past(Fate.GONE, tier, left.seconds)
                    return Cause(MissReason.NOT_WRITTEN, tier, late, left)
        return cause

    # load

    def begin_load(
        self, keys: Sequence[BlockKey], request: str, deadline: float, *, proves: bool = False
    ) -> Ticket:
        """Take blocks in for a request: pin what is in host memory, start to move in the rest.

        The ticket's spec holds for all of its keys at once; the mover marks each block as it
        lands. `poll` hands the ticket out when all has landed, or will not. What could not be
        taken in is in `missing`. Its owner ends it: `end_load`. One that `proves` every record that
        it reads spares the mover the same.
        """
        keys = list(keys)
        reserved = self.reservations.held
        origins = [reserved.pop(key, NOWHERE) for key in keys]
        if NOWHERE in origins:
            origins = self.locate(keys)
        ticket = self._ledger.open_ticket(request, deadline, proves)
        if HOST in origins:
            if not self._loads.pin(ticket, keys, origins):
                origins = self.locate(keys)
                self._loads.pin(ticket, keys, origins)
            self.prefetches.found(ticket.pinned)
        if origins.count(HOST) < len(keys):
            if JOINING in origins:
                for move in self._loads.join(ticket, keys, origins):
                    self.prefetches.joined(move, ticket.pending)
            self._loads.start(ticket, keys, origins)
        self._ledger.seal(ticket, keys)
        self._uses.append([*ticket.keys, *ticket.files] if ticket.files else ticket.keys)
        self.reservations.count_again()
        return ticket

    def end_load(
        self,
        ticket: Ticket,
        failed: Mapping[BlockKey, Outcome] | None = None,
        read: tuple[int, float] = (0, 0.0),
        proved: Iterable[BlockKey] = (),
    ) -> None:
        """Nobody reads for this ticket any more; `failed` could not be read, or were not right, and
        `proved` were. `read` is what its reader has fetched from files: bytes, and seconds."""
        if ticket.pinned_files:
            self._loads.end_direct(ticket, failed or {}, read)
        self._ledger.deferred_verification.remove(proved)
        self._ledger.release(ticket, failed)
        self._ledger.deferred_verification.tell_blamed(self._counters.failed)
        self.reservations.count_again()
        if failed:
            self.reservations.end()

    # store

    def prepare_store(self, keys: Sequence[BlockKey]) -> Reservation:
        """Reserve room in host memory for the keys that are new there, in their order: evict if
        need be, never wait."""
        self.reservations.count_again()
        return self._ledger.reserve(keys)

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        """Commit reserved keys, but abort those in `failed`; the cascade takes them down."""
        self.reservations.count_again()
        self._cascade.committed(HOST, self._ledger.commit(keys, failed), self._clock())

    def room_beside_unwritten(self, count: int, *, new: bool) -> int:
        """How many of so many blocks host memory can take in now without evicting one that has
        still to be written down, be they `new` or loaded. All of them if nothing is under way that
        would make room."""
        cascade = self._cascade
        room = cascade.storable(count) if new else cascade.takes(HOST, count)
        return room or (0 if self.has_pending_work else count)

    # between the steps of an engine

    def poll(self) -> list[Ticket]:
        """Collect what the mover has done, start what is next; call it once a step.

        Answers with the tickets whose last block has landed or failed since the last call.
        """
        now = self._clock()
        self._settle(now, STEP_BLOCKS + self._cascade.started)
        if self._context.costs is not None:
            self._context.costs.collected()
        late, ids = self._ledger.expire(now)
        self._ended += late
        if ids:
            self._mover.cancel(ids)
        for _ in range(min(STEP_USES, len(self._uses))):
            self._cascade.used(self._uses.popleft(), now)
        for _ in range(min(STEP_USES, len(self._touches))):
            keys, start = self._touches.popleft()
            for tier in self.tiers[HOST + 1 :]:
                tier.touch(keys, start)
        self._cascade.step(now)
        for health in (self._context.loads, self._context.stores):
            health.tick(now, self.tiers)
        for at, tier in enumerate(self.tiers):
            tier.tick()
            for lost, fate in tier.take_lost() if self.misses.on else ():
                self.misses.note(at, lost, fate)
        self.queries.step(now)
        self.reservations.end()
        self.prefetches.step(now)
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll` must be called although the engine is idle."""
        waiting = self._cascade.waiting or self.prefetches.warm_up.pending
        waiting = waiting and not self._mover.lost  # else no step would start it
        moving = self._ledger.moving or self.prefetches.pending or self.queries.pending
        return bool(moving or self._stored or self._ended or waiting)

    @property
    def at_rest(self) -> bool:
        """Whether `poll` would find nothing but news of the tiers, which can wait for a moment."""
        changed = self.reservations.made or self._uses or self._touches or self._ledger.evicted
        return not (changed or self.has_pending_work)

    @property
    def settled(self) -> bool:
        """Whether nothing is under way, and nothing waits to be written down."""
        return not (self.has_pending_work or self._cascade.waiting)

    def _settle(self, now: float, budget: float = STEP_BLOCKS) -> None:
        for result in self._mover.poll():
            if result.id < 0:  # of a query: the ledger numbers from 1 on
                self.queries.settled(result, now)
            elif not self._ledger.promoting(result.id):
                self._stored.append(result)
            elif settled := self._ledger.settle(result.id, result.outcomes):
                self._loads.settled(settled, result, now)
                self._counters.ended(settled, result)
                self._ended += settled.landed
                loaded: Sequence[BlockKey] = settled.committed
                if settled.move.ahead:
                    loaded = self.prefetches.settled(settled, now)
                self._cascade.committed(HOST, loaded, now, settled.move.transfer.source)
        while self._stored and budget > 0:
            result = self._stored.popleft()
            budget -= len(result.outcomes)
            if settled := self._ledger.settle(result.id, result.outcomes):
                self._cascade.settled(settled, result, now)
                self._counters.ended(settled, result)

    # what all tiers are told

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        """A request uses these keys: `keys[i]` is block `start + i` of its prefix. Lower tiers hear
        of it in later steps."""
        self.tiers[HOST].touch(keys, start)
        self._touches.append((keys, start))
        if again := self._cascade.used_again(keys):
            self._uses.append(again)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop these keys from every tier, pinned ones when they are unpinned."""
        self._cascade.forget(keys)
        self.prefetches.forget(keys)
        self._ledger.void(keys)
        self.misses.note(HOST, keys, Fate.REMOVED)
        for tier in self.tiers:
            tier.forget(keys)
        self._ledger.note_dropped(keys)
        self.reservations.end()

    def clear(self) -> None:
        """Invalidate everything: what is under way or being stored will never become visible."""
        self._cascade.forget()
        self.prefetches.forget()
        for tier in self.tiers:
            tier.clear()
        self._mover.cancel(self._ledger.void_all())
        self._ledger.note_dropped(self._ledger.pinned(HOST))
        self.reservations.end()

    def chain_stats(self) -> ChainStats:
        """All there is to know, tier by tier and link by link."""
        counters = self._counters
        leases = [tier.allowance for tier in self.tiers]
        return ChainStats(
            tiers=[tier.stats() for tier in self.tiers],
            links=self._cascade.stats(),
            mover=self._mover.stats(),
            hits=list(counters.hits),
            hit_bytes=list(counters.hit_bytes),
            misses=list(counters.misses),
            failures=[dict(failures) for failures in counters.failures],
            down=self._context.left_alone(),
            prefetch=self.prefetches.counted(),
            reads=[copy(each) for each in counters.reads],
            writes=[copy(each) for each in counters.writes],
            budgets=[None if lease is None else lease.stats() for lease in leases],
        )

    def close(self) -> None:
        """Commit what the mover has finished and close the tiers; close the mover first."""
        self._settle(self._clock(), float("inf"))
        close_all(self.tiers)
