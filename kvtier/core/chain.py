"""Ordered tiers that behave as one: where plan, ledger and tiers meet the mover."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvtier.core.cascade import Cascade
from kvtier.core.costs import CostModel
from kvtier.core.flight import Ticket
from kvtier.core.health import Health
from kvtier.core.ledger import Ledger
from kvtier.core.plan import HOST, JOINING, NOWHERE, plan_host, plan_lower, plan_room, plan_runs
from kvtier.core.record import record_bytes
from kvtier.core.settings import TierSettings
from kvtier.core.tally import ChainStats, Sample, Tally
from kvtier.core.tier import Tier
from kvtier.core.transfer import Mover, TransferResult
from kvtier.errors import NotResident
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
"""The most written blocks that one call settles."""
STEP_USES = 8
"""The most requests whose use of blocks one call passes on to the lower tiers."""
USES_KEPT = 1024
"""More than a hundred steps of uses: who falls so far behind does without them."""
REST_SECONDS = 30.0
_NOT_RESTED = (Outcome.GONE, Outcome.CORRUPT, Outcome.CANCELLED)


class TierChain(Tier):
    """A composite of tiers, the first of which is host memory.

    Beside what every tier answers it loads in one hop (`begin_load`) and works between the steps
    of an engine (`poll`). All of it is for one thread and none of it blocks. It owns its tiers;
    the mover belongs to whoever opened it, and is closed before the chain.

    Lookup answers HIT for what `begin_load` can take in. What it promises it keeps until the next
    `poll`, as long as the engine stores nothing in between.
    """

    medium = "chain"

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: Sequence[TierSettings],
        mover: Mover,
        namespace: Namespace,
        *,
        costs: CostModel | None = None,
        rest_seconds: float = REST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = list(tiers)
        self._settings = list(settings)
        self._mover = mover
        self._namespace = namespace
        self._costs = costs
        self._clock = clock
        slot = record_bytes(namespace.payload_bytes)
        self._slots = [max(1, tier.stats().bytes_capacity // slot) for tier in tiers]
        self._ledger = Ledger(self.tiers)
        self._load_health = Health(len(tiers), rest_seconds)
        # Apart from loads: what can no longer be written to may well be read.
        self._store_health = Health(len(tiers), rest_seconds)
        self._cascade = Cascade(
            self.tiers, settings, self._slots, self._ledger, mover, self._store_health
        )
        self._names = [*[Presence.HIT] * len(tiers), Presence.HIT, Presence.PENDING, Presence.MISS]
        self._promised: dict[BlockKey, int] = {}
        self._free: int | None = None
        self._anonymous: list[tuple[Ticket, set[BlockKey]]] = []
        self._ended: list[Ticket] = []
        self._stored: deque[TransferResult] = deque()
        self._uses: deque[Sequence[BlockKey]] = deque(maxlen=USES_KEPT)
        self._touches: deque[tuple[Sequence[BlockKey], int]] = deque(maxlen=USES_KEPT)
        self._media = [tier.medium for tier in tiers]
        self._tally = Tally(self._media)

    # lookup

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        origins = plan_room(keys, self.locate(keys), self._promised, self._room())
        hits = zip(keys, origins, strict=True)
        if min(origins, default=HOST) >= HOST:
            self._promised.update(hits)
        else:
            self._promised.update([hit for hit in hits if hit[1] >= HOST])
        names = self._names
        return [names[origin] for origin in origins]

    def locate(self, keys: Sequence[BlockKey]) -> list[int]:
        """The nearest tier that can give each key, or NOWHERE, COMING, JOINING (see plan).

        Promises nothing, and does not ask whether there is room.
        """
        ledger = self._ledger
        answers = self.tiers[HOST].lookup(keys)
        if Presence.MISS not in answers and Presence.PENDING not in answers:
            return [HOST] * len(keys)
        origins = plan_host(keys, answers, ledger.joinable, ledger.stranded)
        asked = [at for at, answer in enumerate(answers) if answer is Presence.MISS]
        now = self._clock()
        for tier in range(HOST + 1, len(self.tiers)):
            if not asked:
                break
            if self._load_health.down(tier, now):
                continue
            resting = self._load_health.resting(tier)
            skipped = [at for at in asked if keys[at] in resting] if resting else []
            if skipped:
                asked = [at for at in asked if keys[at] not in resting]
            whole = len(asked) == len(keys)
            answers = self.tiers[tier].lookup(keys if whole else [keys[at] for at in asked])
            origins, asked = plan_lower(origins, asked, tier, answers)
            asked = sorted(asked + skipped) if skipped else asked
        return origins

    def worth(self, keys: Sequence[BlockKey], tokens_per_block: int, start: int = 0) -> int:
        """How many leading keys of a prefix are here and cost less to load than to recompute.

        The first of them is at token `start`.
        """
        runs = plan_runs(self.locate(keys), self._media, self._sizes(keys))
        if self._costs is None:
            return sum(run.blocks for run in runs)
        return self._costs.admit(runs, tokens_per_block, start)

    def _room(self) -> int:
        """Host slots that hits can still be promised."""
        if self._free is None:
            host = self.tiers[HOST].stats()
            self._free = self._slots[HOST] - host.pinned - host.in_flight
        return self._free - len(self._promised)

    def _sizes(self, keys: Sequence[BlockKey]) -> list[int]:
        sizes = self._namespace.group_bytes
        if len(sizes) == 1:
            return [sizes[0]] * len(keys)
        return [self._namespace.payload_of(key) for key in keys]

    # load

    def begin_load(self, keys: Sequence[BlockKey], request: str, deadline: float) -> Ticket:
        """Take blocks in for a request: pin what is in host memory, start to move in the rest.

        The ticket's spec holds for all of its keys at once; the mover marks each block as it
        lands. `poll` hands the ticket out when all has landed, or will not. What could not be
        taken in is in `missing`. Its owner ends it: `end_load`, or `cancel` of the request.
        """
        keys = list(keys)
        promised = self._promised
        origins = [promised.pop(key, NOWHERE) for key in keys]
        if NOWHERE in origins:
            origins = self.locate(keys)
        ticket = self._ledger.open_ticket(request, deadline)
        if not self._pin(ticket, keys, origins):
            origins = self.locate(keys)
            self._pin(ticket, keys, origins)
        if origins.count(HOST) < len(keys):
            self._take_in(ticket, keys, origins)
        self._ledger.seal(ticket, keys)
        self._tally.opened(ticket)
        self._uses.append(ticket.keys)
        self._free = None
        return ticket

    def _pin(self, ticket: Ticket, keys: list[BlockKey], origins: list[int]) -> bool:
        mine = keys
        if origins.count(HOST) < len(keys):
            mine = [key for key, origin in zip(keys, origins, strict=True) if origin == HOST]
        if mine and not self._ledger.pin(ticket, mine):
            return False
        self._tally.found(HOST, self._sizes(mine))
        return True

    def _take_in(self, ticket: Ticket, keys: list[BlockKey], origins: list[int]) -> None:
        for origin in sorted(set(origins)):
            mine = [key for key, from_ in zip(keys, origins, strict=True) if from_ == origin]
            if origin == JOINING:
                for key in mine:
                    source = self._ledger.joinable[key].transfer.source
                    self._tally.found(source, self._sizes([key]))
                self._ledger.join(ticket, mine)
            elif origin > HOST:
                self._promote(ticket, origin, mine)

    def _promote(self, ticket: Ticket, source: int, keys: list[BlockKey]) -> None:
        limit = self._clock() + self._settings[source].load_deadline.seconds
        transfer = self._ledger.promote(ticket, source, keys, min(limit, ticket.deadline))
        if transfer is None:
            return
        if not self._mover.submit(transfer):
            self._ledger.refuse(transfer)
            self._load_health.rest(source, transfer.keys, self._clock())
            self._tally.failed(source, [Outcome.DROPPED] * len(transfer.keys))
            return
        sizes = self._sizes(transfer.keys)
        self._tally.found(source, sizes)
        if self._costs is not None:
            self._costs.started(self._media[source], transfer.id, sum(sizes))

    def end_load(self, ticket: Ticket, failed: Mapping[BlockKey, Outcome] | None = None) -> None:
        """Nobody reads for this ticket any more; `failed` could not be read, or were not right."""
        self._ledger.release(ticket, None, failed)
        self._free = None

    def cancel(self, request: str) -> None:
        """The request is gone and nobody reads for it: let go of all that it held."""
        idle: list[int] = []
        for ticket in self._ledger.tickets(request):
            idle += self._ledger.release(ticket)
        self._drop(idle)

    def _drop(self, ids: list[int]) -> None:
        self._mover.cancel(self._ledger.strand(ids))
        self._free = None

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        """As `begin_load`, for callers without requests; blocks of lower tiers land later."""
        ticket = self.begin_load(keys, "", float("inf"))
        if ticket.missing:
            self._drop(self._ledger.release(ticket))
            missing = f"{len(ticket.missing)} of {len(keys)} keys"
            raise NotResident(f"{missing} are not here: look up first")
        self._anonymous.append((ticket, set(ticket.keys)))
        return ticket.spec

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        left = list(keys)
        for ticket, unread in list(self._anonymous):
            mine = [key for key in dict.fromkeys(left) if key in unread]
            if not mine:
                continue
            for key in mine:
                left.remove(key)
            unread.difference_update(mine)
            self._ledger.release(ticket, mine if unread else None, failed)
            if not unread:
                self._anonymous.remove((ticket, unread))
        self._free = None

    # store

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._free = None
        return self._ledger.reserve(keys, evict)

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        self._free = None
        self._cascade.committed(HOST, self._ledger.commit(keys, failed))

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
        self._settle(now)
        late, ids = self._ledger.expire(now)
        self._tally.expired += len(late)
        self._ended += late
        if ids:
            self._mover.cancel(ids)
        for _ in range(min(STEP_USES, len(self._uses))):
            self._cascade.used(self._uses.popleft())
        for _ in range(min(STEP_USES, len(self._touches))):
            keys, start = self._touches.popleft()
            for tier in self.tiers[HOST + 1 :]:
                tier.touch(keys, start)
        self._cascade.step(now)
        self._load_health.tick(now)
        for tier in self.tiers:
            tier.tick()
        self._promised.clear()
        self._free = None

    @property
    def has_pending_work(self) -> bool:
        """Whether `poll` must be called although the engine is idle."""
        return bool(self._ledger.moving or self._stored or self._ended or self._cascade.waiting)

    def _settle(self, now: float) -> None:
        for result in self._mover.poll():
            if self._ledger.promoting(result.id):
                self._settle_load(result, now)
            else:
                self._stored.append(result)
        budget = STEP_BLOCKS
        while self._stored and budget > 0:
            result = self._stored.popleft()
            settled = self._ledger.settle(result)
            if settled is not None:
                self._cascade.settled(settled, result, now)
                self._tally.ended(settled, result)
                budget -= len(result.outcomes)

    def _settle_load(self, result: TransferResult, now: float) -> None:
        settled = self._ledger.settle(result)
        if settled is None:
            return
        source = settled.move.transfer.source
        self._load_health.observe(source, result.outcomes, now)
        rest = [key for key, why in settled.failed.items() if why not in _NOT_RESTED]
        self._load_health.rest(source, rest, now)
        self._tally.failed(source, settled.failed.values())
        if self._costs is not None:
            complete = not settled.failed
            self._costs.ended(self._media[source], result.id, complete, result.busy_seconds)
        self._ended += settled.landed
        self._cascade.committed(HOST, settled.committed, source)
        self._tally.ended(settled, result)

    # the rest of a tier

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        self.tiers[HOST].touch(keys, start)
        self._touches.append((keys, start))

    def victims(self, count: int) -> list[BlockKey]:
        return self.tiers[-1].victims(count)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._cascade.forget(keys)
        self._ledger.void(keys)
        for tier in self.tiers:
            tier.forget(keys)
        self._promised.clear()

    def clear(self) -> None:
        self._cascade.forget()
        for tier in self.tiers:
            tier.clear()
        self._promised.clear()

    def invalidate(self) -> None:
        """Serve nothing any more of what was stored so far, or is being stored or moved now.

        For weights that changed under the same name: stricter than `clear`, which leaves alone
        what is in use.
        """
        self.clear()
        self._drop(self._ledger.void_all())
        for index, tier in enumerate(self.tiers):
            tier.forget(self._ledger.pinned(index))

    def take_events(self) -> list[TierEvent]:
        return [event for tier in self.tiers for event in tier.take_events()]

    def take_samples(self) -> list[Sample]:
        """Transfers that ended since the last call, for histograms."""
        return self._tally.take_samples()

    def stats(self) -> TierStats:
        tiers = [tier.stats() for tier in self.tiers]
        total = {
            name: sum(getattr(stats, name) for stats in tiers)
            for name in TierStats.__struct_fields__
            if name != "medium"
        }
        return TierStats(self.medium, **total)

    def chain_stats(self) -> ChainStats:
        """All there is to know, tier by tier and link by link."""
        return self._tally.stats(
            [tier.stats() for tier in self.tiers],
            self._cascade.stats(),
            self._mover.stats(),
            self._ledger.overdue(self._clock()),
        )

    def close(self) -> None:
        """Commit what the mover has finished and close the tiers; close the mover first."""
        self._settle(self._clock())
        for tier in self.tiers:
            tier.close()
