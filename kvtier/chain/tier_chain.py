"""Ordered tiers that behave as one: where plan, ledger and tiers meet the mover."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.chain.health import Health
from kvtier.chain.hits import Appraiser, Decision, Span, asked, columns, needed
from kvtier.chain.ledger import Ledger, Ticket
from kvtier.chain.load import EmbeddedLoads, LoadStarter
from kvtier.chain.lookup import DirectReads, Locator, Promises
from kvtier.chain.plan import HOST, NOWHERE
from kvtier.chain.prefetch import AheadOfTime
from kvtier.chain.promotion import Promotion
from kvtier.chain.stats import ChainStats, Sample, Tally, budgets_of
from kvtier.chain.store import Cascade
from kvtier.core.retained.retention import Retention
from kvtier.cost.model import CostModel
from kvtier.errors import NotResident
from kvtier.interfaces.mover import Mover, TransferResult
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import PrefetchSettings, RetainSettings, TierSettings
from kvtier.system.calls import close_all
from kvtier.types import (
    BlockKey,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)

STEP_BLOCKS = 128
"""The most written blocks that one call settles, beside as many as the last one has started."""
STEP_USES, USES_KEPT = 8, 1024
"""Of how many requests one call tells the lower tiers what they use, and how many wait for it."""
REST_SECONDS = 30.0


class TierChain(Tier):
    """A composite of tiers, the first of which is host memory.

    Beside what every tier answers it loads in one hop (`begin_load`) and works between the steps
    of an engine (`poll`). All of it is for one thread and none of it blocks. It owns its tiers, not
    the mover, which is closed before it. Lookup answers HIT for what `begin_load` can take in. What
    it promises it keeps until the next `poll`, as long as the engine stores nothing in between.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: Sequence[TierSettings],
        mover: Mover,
        namespace: Namespace,
        *,
        costs: CostModel | None = None,
        prefetch: PrefetchSettings | None = None,
        retain: RetainSettings | None = None,
        rest_seconds: float = REST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = list(tiers)
        self.medium, self._mover = tiers[HOST].medium, mover
        self._clock, self._costs = clock, costs
        slot = record_bytes(namespace.payload_bytes)
        self._slots = [max(1, tier.stats().bytes_capacity // slot) for tier in tiers]
        self.retention = Retention(tiers, settings, self._slots, retain)
        self._tally = Tally([tier.medium for tier in tiers], namespace)
        self._ledger = Ledger(self.tiers)
        self._load_health = Health(len(tiers), rest_seconds)
        self._appraiser = Appraiser(self._tally, costs, self._ledger.joinable, clock)
        self._promotion = Promotion(
            settings, self._ledger, mover, self._load_health, self._tally, costs
        )
        self._direct = DirectReads(tiers, self._ledger, self._load_health, self._tally, costs)
        queues = [rule.queue_blocks for rule in settings]
        self.promises = Promises(tiers[HOST], self._slots[HOST], queues, self._ledger, self._direct)
        self._locator = Locator(
            self.tiers, self._ledger, self._load_health, self._direct, mover, clock
        )
        # Apart from loads: what can no longer be written to may well be read.
        self._store_health = Health(len(tiers), rest_seconds)
        self._cascade = Cascade(
            self.tiers, settings, self._slots, self._ledger, mover, self._store_health
        )
        self._ahead = AheadOfTime(
            prefetch,
            self.tiers,
            queues,
            self._slots[HOST],
            self._ledger,
            mover,
            self._locator,
            self.promises,
            self._promotion,
            self._direct,
            self._cascade,
            self._tally,
            costs,
            clock,
        )
        self.prefetches = self._ahead.prefetches
        self._load_starter = LoadStarter(
            self._ledger,
            self._promotion,
            self._direct,
            self.promises,
            self.prefetches,
            mover,
            self._tally,
            clock,
        )
        # By origin: those of plan that are no tier's (NOWHERE, COMING, JOINING) count from the end.
        self._names = [*[Presence.HIT] * len(tiers), Presence.HIT, Presence.PENDING, Presence.MISS]
        self._anonymous, self._stored = EmbeddedLoads(self._ledger), deque[TransferResult]()
        self._ended: list[Ticket] = []
        self._uses: deque[Sequence[BlockKey]] = deque(maxlen=USES_KEPT)
        self._touches: deque[tuple[Sequence[BlockKey], int]] = deque(maxlen=USES_KEPT)

    # lookup

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        promised = self.promises.kept
        if promised and all(key in promised for key in keys):
            return [Presence.HIT] * len(keys)
        return [self._names[origin] for origin in self.promises.make(keys, self.locate(keys))]

    def worth(
        self,
        keys: Sequence[BlockKey],
        tokens_per_block: int,
        start: int = 0,
        decision: Decision | None = None,
    ) -> int:
        """How many leading keys of a prefix are here, can be taken in, and cost less to load than
        to recompute; the first of them is at token `start`. They are promised as by `lookup`.

        With the `decision` of an earlier call, that one is repeated if nothing has changed.
        """
        decision = decision or Decision()
        origins = self.locate(keys, at_hand=decision.at_hand)
        count = self._appraiser.lead(keys, origins, tokens_per_block, start, decision)
        kept = self.promises.make(keys[:count], origins[:count]) if count else []
        decision.cramped = NOWHERE in kept
        self._ahead.make_way(decision, keys)
        return kept.index(NOWHERE) if NOWHERE in kept else count

    def reach(
        self, spans: Sequence[Span], start: int, limit: int, decision: Decision
    ) -> tuple[int, list[list[int]]]:
        """As `worth`, for a request with several cache groups, or with windows: the token up to
        which it is worth loading from `start` on, and where each chunk after that is."""
        sought = asked(spans, start)
        origins = columns(spans, start, self.locate(sought, at_hand=decision.at_hand))
        promises = self.promises
        for _ in range(2):
            room = promises.left()
            stop = self._appraiser.furthest(spans, origins, start, limit, room, decision)
            keys, places = needed(spans, origins, start, stop)
            fits = NOWHERE not in promises.make(keys, places)
            decision.cramped |= not fits
            self._ahead.make_way(decision, sought)
            if fits:
                return stop, origins
        return start, origins

    def locate(self, keys: Sequence[BlockKey], *, at_hand: bool = False) -> list[int]:
        """The nearest tier that can give each key, or NOWHERE, COMING, JOINING (see plan); with
        `at_hand` what need not be waited for. Promises nothing, and does not ask about room."""
        return self._locator.locate(keys, at_hand=at_hand)

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
        promised = self.promises.kept
        origins = [promised.pop(key, NOWHERE) for key in keys]
        if NOWHERE in origins:
            origins = self.locate(keys)
        ticket = self._ledger.open_ticket(request, deadline, proves)
        if not self._pin(ticket, keys, origins):
            origins = self.locate(keys)
            self._pin(ticket, keys, origins)
        if origins.count(HOST) < len(keys):
            self._load_starter.start(ticket, keys, origins)
        self._ledger.seal(ticket, keys)
        self._uses.append([*ticket.keys, *ticket.files] if ticket.files else ticket.keys)
        self.promises.count_again()
        return ticket

    def _pin(self, ticket: Ticket, keys: list[BlockKey], origins: list[int]) -> bool:
        here = origins.count(HOST) == len(keys)
        mine = keys if here else [k for k, at in zip(keys, origins, strict=True) if at == HOST]
        if mine and not self._ledger.pin(ticket, mine):
            return False
        self._tally.found(HOST, mine)
        self.prefetches.found(mine)
        return True

    def read_directly(self, able: bool) -> None:
        """Say whether the readers of `begin_load` fetch what lies in files themselves."""
        self._direct.allow(able)

    def end_load(
        self,
        ticket: Ticket,
        failed: Mapping[BlockKey, Outcome] | None = None,
        read: tuple[int, float] = (0, 0.0),
        proved: Iterable[BlockKey] = (),
    ) -> None:
        """Nobody reads for this ticket any more; `failed` could not be read, or were not right, and
        `proved` were. `read` is what its reader has fetched from files: bytes, and seconds."""
        self._direct.ended(ticket, failed or {}, *read, self._clock())
        self._ledger.unproved.ended(proved)
        self._ledger.release(ticket, None, failed)
        self._ledger.unproved.tell_blamed(self._tally.failed)
        self.promises.count_again()
        if failed:
            self.promises.end()

    def _drop(self, ids: list[int]) -> None:
        self._mover.cancel(self._ledger.abandon(ids))
        self.promises.count_again()

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        """As `begin_load`, for callers without requests (and who do not read files); blocks of
        lower tiers land later."""
        ticket = self.begin_load(keys, "", float("inf"))
        if ticket.missing or ticket.files:
            self._drop(self._ledger.release(ticket))
            missing = len(keys) - len(ticket.keys)
            raise NotResident(f"{missing} of {len(keys)} keys are not here: look up first")
        self._anonymous.add(ticket, keys)
        return ticket.spec

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        self._anonymous.end(keys, failed)
        self._ledger.unproved.tell_blamed(self._tally.failed)
        self.promises.count_again()
        if failed:
            self.promises.end()

    # store

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self.promises.count_again()
        return self._ledger.reserve(keys, evict)

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        self.promises.count_again()
        self._cascade.committed(HOST, self._ledger.commit(keys, failed), self._clock())

    # between the steps of an engine

    def poll(self) -> list[Ticket]:
        """Collect what the mover has done, start what is next; call it once a step.

        Answers with the tickets whose last block has landed or failed since the last call.
        """
        self.tick()
        ended, self._ended = self._ended, []
        return ended

    def tick(self) -> None:
        now = self._clock()
        self._settle(now, STEP_BLOCKS + self._cascade.started)
        if self._costs is not None:
            self._costs.collected()
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
        for health in (self._load_health, self._store_health):
            health.tick(now, self.tiers)
        for tier in self.tiers:
            tier.tick()
        self.promises.end()
        self._ahead.step(now)

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll` must be called although the engine is idle."""
        waiting = self._cascade.waiting or self._ahead.warm_up.pending
        waiting = waiting and not self._mover.lost  # else no step would start it
        moving = self._ledger.moving or self.prefetches.pending
        return bool(moving or self._stored or self._ended or waiting)

    @property
    def at_rest(self) -> bool:
        """Whether `poll` would find nothing but news of the tiers, which can wait for a moment."""
        changed = self.promises.made or self._uses or self._touches or self._ledger.evicted
        return not (changed or self.has_pending_work)

    @property
    def settled(self) -> bool:
        """Whether nothing is under way, and nothing waits to be written down."""
        return not (self.has_pending_work or self._cascade.waiting)

    def _settle(self, now: float, budget: float = STEP_BLOCKS) -> None:
        for result in self._mover.poll():
            if not self._ledger.promoting(result.id):
                self._stored.append(result)
            elif settled := self._ledger.settle(result):
                self._promotion.settled(settled, result, now)
                self._tally.ended(settled, result)
                self._ended += settled.landed
                loaded = self._ahead.settled(settled, now)
                self._cascade.committed(HOST, loaded, now, settled.move.transfer.source)
        while self._stored and budget > 0:
            result = self._stored.popleft()
            budget -= len(result.outcomes)
            if settled := self._ledger.settle(result):
                self._cascade.settled(settled, result, now)
                self._tally.ended(settled, result)

    # the rest of a tier

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        self.tiers[HOST].touch(keys, start)
        self._touches.append((keys, start))
        if again := self._cascade.used_again(keys):
            self._uses.append(again)

    def victims(self, count: int) -> list[BlockKey]:
        return self.tiers[-1].victims(count)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._cascade.forget(keys)
        self.prefetches.forget(keys)
        self._ledger.void(keys)
        for tier in self.tiers:
            tier.forget(keys)
        self._ledger.note_dropped(keys)
        self.promises.end()

    def clear(self) -> None:
        self._cascade.forget()
        self._ahead.forget()
        for tier in self.tiers:
            tier.clear()
        self._drop(self._ledger.void_all())
        self._ledger.note_dropped(self._ledger.pinned(HOST))
        self.promises.end()

    def take_events(self) -> list[TierEvent]:
        return [event for tier in self.tiers for event in tier.take_events()]

    def take_samples(self) -> list[Sample]:
        """Transfers that ended since the last call, for histograms."""
        return self._tally.take_samples()

    def stats(self) -> TierStats:
        return TierStats.total(self.medium, [tier.stats() for tier in self.tiers])

    def chain_stats(self) -> ChainStats:
        """All there is to know, tier by tier and link by link."""
        now, healths = self._clock(), (self._load_health, self._store_health)
        down = [
            tier.out_of_use or tier.unwell or any(health.down(at, now) for health in healths)
            for at, tier in enumerate(self.tiers)
        ]
        links, ahead = self._cascade.stats(), self.prefetches.counted()
        budgets, tiers = budgets_of(self.tiers), [tier.stats() for tier in self.tiers]
        return self._tally.stats(tiers, links, self._mover.stats(), down, ahead, budgets)

    def close(self) -> None:
        """Commit what the mover has finished and close the tiers; close the mover first."""
        self._settle(self._clock(), float("inf"))
        close_all(self.tiers)
