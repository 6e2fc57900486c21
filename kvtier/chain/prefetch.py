"""Prefetches: blocks come up before a request is served, and after a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile

import msgspec

from kvtier.chain.context import ChainContext
from kvtier.chain.hits import Decision
from kvtier.chain.ledger import Move, SettledMove
from kvtier.chain.load import Loads
from kvtier.chain.lookup import Reservations, locate
from kvtier.chain.plan import HOST, plan_ahead
from kvtier.chain.stats import PrefetchStats
from kvtier.settings import PrefetchSettings
from kvtier.types import BlockKey, Outcome, Presence

PIECE_BLOCKS = 16
"""The most blocks of one transfer: they are in host memory for good when all of them are."""
QUEUE_SHARE = 4
"""Prefetches take up at most this part of a tier's queue."""
AHEAD_S = 1.0
"""Nor more than the link moves in so long: what comes to the head of the queue is to come soon."""
HORIZON_S = 10.0
"""No prefetch evicts a block that is likely to be used within so long."""


class PrefetchRequest(msgspec.Struct, eq=False):
    """The blocks that one waiting request will ask for."""

    keys: Sequence[BlockKey]
    left: Sequence[BlockKey]
    """Those of them that are still to be looked for, in their order."""
    served: bool = False
    """Whether it was scheduled; else it ended, and nobody asks for its blocks."""


class Prefetches:
    """Promotions that begin while their request waits in the engine's queue, within bounds.

    The request's load joins them, or finds its blocks in host memory. Until then a prefetch yields:
    to loads in the mover, to hotter blocks in host memory, and to loads that lack room.
    """

    def __init__(
        self,
        context: ChainContext,
        reservations: Reservations,
        loads: Loads,
        settings: PrefetchSettings,
        unsaved: Callable[[Sequence[BlockKey]], Collection[BlockKey]],
        used: Callable[[Sequence[BlockKey], int], None],
    ) -> None:
        """`unsaved` are those of host memory that would be gone, and `used` is told of blocks that
        a load took, and of their tier."""
        self._context = context
        self._reservations = reservations
        self._loads = loads
        self._unsaved = unsaved
        self._tell_used = used
        slots, tiers = context.slots[HOST], context.tiers
        self.share = PrefetchShare(int(slots * settings.memory) if settings.waiting else 0)
        self.on = self.share.blocks > 0 and len(tiers) > 1
        """Whether there is anything to be prefetched, and room for it."""
        self.stats = PrefetchStats.of(len(tiers))
        self._requests: dict[str, PrefetchRequest] = {}
        self._over: list[PrefetchRequest] = []
        self._wanted: Counter[BlockKey] = Counter()
        """By how many requests that wait."""
        self._moves: dict[int, tuple[Move, float]] = {}
        """Those under way, and since when."""
        self._joined: set[BlockKey] = set()
        """What of these a load waits for."""
        self._unused: dict[BlockKey, tuple[int, float, float]] = {}
        """What has come and was not used yet: from which tier, and when that began and ended."""
        self._in_flight = [0] * len(tiers)
        """Blocks on their way from each tier."""
        self._bytes = [0] * len(tiers)
        self._release_room = False
        self.warm_up = WarmUp(
            context, reservations, loads, self, int(slots * settings.warmup_share)
        )

    # -- what is wanted ----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether requests wait for whom there is something to be brought yet."""
        return bool(self._moves) or any(wanted.left for wanted in self._requests.values())

    @property
    def pending(self) -> bool:
        """Whether something is to be cleaned up at the next `tick`."""
        return bool(self._over or self._release_room)

    def want(self, request: str, keys: Sequence[BlockKey]) -> list[int]:
        """A request that waits will ask for these; answers with the bytes of them that lie in each
        tier below host memory. `begin` brings them up."""
        self.end(request, served=True)
        origins = locate(self._context, keys)
        left = [key for key, at in zip(keys, origins, strict=True) if self._comes_from(at)]
        self._requests[request] = PrefetchRequest(keys=keys, left=left)
        self._wanted.update(keys)
        sizes = [0] * len(self._context.tiers)
        for at, size in zip(origins, self._context.counters.sizes(keys), strict=True):
            if self._comes_from(at):
                sizes[at] += size
        return sizes

    def _comes_from(self, origin: int) -> bool:
        """Whether blocks with this origin come up through host memory."""
        return origin > HOST and origin not in self._context.direct

    def begin(self, request: str) -> bool:
        """Begin to move in what a request wants, as far as there is room; whether that is all."""
        wanted = self._requests.get(request)
        if wanted is None or not wanted.left:
            return True
        if self._context.mover.down or self._release_room:
            return False
        now, left = self._context.clock(), wanted.left
        origins = locate(self._context, left)
        at, room = 0, PIECE_BLOCKS
        while at < len(left) and room > 0:
            source, stop = plan_ahead(origins, at, PIECE_BLOCKS)
            if self._comes_from(source):
                room = self.room(source, stop - at)
                stop = at + (room if room and self._start(source, left[at : at + room], now) else 0)
                room = stop - at
            at = stop
        wanted.left = left[at:]
        return not wanted.left

    def room(self, source: int, blocks: int) -> int:
        """How many of so many blocks of a tier may be begun to move in now."""
        flying = self._in_flight[source]
        held = sum(self._in_flight) + len(self._unused)
        queued = max(1, self._context.queues[source] // QUEUE_SHARE) - flying
        room = min(blocks, self.share.blocks - held, queued, self._reservations.room())
        if room <= 0 or (flying and self._busy_seconds(source) > AHEAD_S):
            return 0
        return self._takes(room)

    def _busy_seconds(self, source: int) -> float:
        if self._context.costs is None:
            return 0.0
        return self._context.costs.load_seconds(
            self._context.counters.moved[source], self._bytes[source]
        )

    def takes_seconds(self, sizes: Sequence[int]) -> float:
        """How long it takes until so many bytes have come from each tier, as far as known."""
        if self._context.costs is None:
            return 0.0
        links = zip(self._context.counters.moved, sizes, strict=True)
        return max(
            (self._context.costs.load_seconds(link, size) for link, size in links if size),
            default=0.0,
        )

    def _takes(self, blocks: int) -> int:
        """For how many of so many host memory has room without losing what is hotter: what waiting
        requests want, or what is likely to be used before; or what is nowhere else yet. What comes
        after such a block in the order of eviction is hotter than that."""
        host = self._context.tiers[HOST]
        short = blocks - host.stats().free
        if short <= 0:
            return blocks
        doomed = host.victims_within(short, HORIZON_S, self.share.trust)
        kept = self._unsaved(doomed)
        yields = takewhile(
            lambda key: not (key in self._wanted or key in self._unused or key in kept), doomed
        )
        return blocks - short + sum(1 for _ in yields)

    def _start(self, source: int, keys: Sequence[BlockKey], now: float) -> bool:
        move = self._loads.prefetch(source, keys, now)
        if move is not None:
            self._moves[move.transfer.id] = (move, now)
            self._in_flight[source] += len(move.keys)
            self._bytes[source] += sum(self._context.counters.sizes(move.keys))
            self._reservations.count_again()
        return move is not None

    def end(self, request: str, *, served: bool) -> None:
        """It does not wait any more: it is `served`, or has ended. What was begun for nobody else
        is cancelled at the next `tick`: a load may be about to join it."""
        wanted = self._requests.pop(request, None)
        if wanted is not None:
            wanted.served = served
            self._over.append(wanted)

    def stop(self, request: str) -> None:
        """What is not here yet will not be in time: bring no more of it. What is here stays."""
        wanted = self._requests.get(request)
        if wanted is None:
            return
        moving = {key for move, _ in self._moves.values() if move.prefetch for key in move.keys}
        here = [key for key in wanted.keys if key not in moving]
        self.end(request, served=True)
        self._requests[request] = PrefetchRequest(keys=here, left=[])
        self._wanted.update(here)

    def release_room(self, decision: Decision, keys: Sequence[BlockKey]) -> None:
        """If a load of these lacks room, cancel the prefetches and warm-ups that nobody has joined
        at the next step, and let the load be decided on again then."""
        if decision.short_of_room:
            self._release_room = any(move.prefetch for move, _ in self._moves.values())
            self.warm_up.cancel_unjoined()
        if self._moves:
            decision.short_of_room |= self._being_cancelled(keys)

    @property
    def holds_room(self) -> bool:
        """Whether prefetches that are being cancelled will free room in a moment."""
        return self._release_room or any(map(_is_being_cancelled, self._moves.values()))

    def _being_cancelled(self, keys: Collection[BlockKey]) -> bool:
        """Whether some of these cannot be loaded for a moment: their prefetch was cancelled, and
        the mover may not have let go of it yet."""
        moves = [move for move, _ in filter(_is_being_cancelled, self._moves.values())]
        return any(not set(move.keys).isdisjoint(keys) for move in moves)

    # -- what becomes of it --------------------------------------------------------------------

    def joined(self, move: Move, keys: Collection[BlockKey]) -> None:
        """A load waits for a move, for those of its blocks that are among these keys."""
        known = self._moves.get(move.transfer.id)
        if known is not None:
            self._joined.update(key for key in move.keys if key in keys)
        if move.prefetch:
            self._loads.hasten(move)
            if known is not None:
                size = sum(self._context.counters.sizes(move.keys))
                self._save(size, move.transfer.source, known[1], None)

    def found(self, keys: Sequence[BlockKey]) -> None:
        """A load takes these from host memory."""
        if not self._unused:
            return
        used: dict[int, list[BlockKey]] = {}
        for key in dict.fromkeys(keys):  # it may be asked for twice
            if key in self._unused:
                used.setdefault(self._unused[key][0], []).append(key)
        for tier, mine in used.items():
            arrivals = [self._unused.pop(key) for key in mine]
            began, ended = min(each[1] for each in arrivals), max(each[2] for each in arrivals)
            self._save(sum(self._context.counters.sizes(mine)), tier, began, ended)
            self._use(mine, tier)

    def _use(self, keys: Sequence[BlockKey], tier: int) -> None:
        self.stats.used[tier] += len(keys)
        self.share.used(len(keys))
        self._tell_used(keys, tier)

    def _save(self, size: int, tier: int, began: float, ended: float | None) -> None:
        """A load need not wait for so many bytes: no longer than they were under way, nor than the
        link is expected to take for them."""
        saved = (self._context.clock() if ended is None else ended) - began
        if self._context.costs is not None:
            saved = min(
                saved, self._context.costs.load_seconds(self._context.counters.moved[tier], size)
            )
        self.stats.saved_seconds += max(0.0, saved)

    def settled(self, settled: SettledMove, now: float) -> Sequence[BlockKey]:
        """A move that began as a prefetch has ended. Answers with what it has brought to a load; of
        others the tiers between are told when they are used."""
        if self.warm_up.settled(settled):
            return [] if settled.move.prefetch else settled.committed
        self._arrived(settled, now)
        return []

    def _arrived(self, settled: SettledMove, now: float) -> None:
        """A move that was begun for a request that waits has ended."""
        move, source = settled.move, settled.move.transfer.source
        known = self._moves.pop(move.transfer.id, None)
        if known is None:
            return
        self._in_flight[source] -= len(move.keys)
        self._bytes[source] -= sum(self._context.counters.sizes(move.keys))
        self.stats.arrived[source] += len(settled.committed)
        cancelled = [k for k, why in settled.failed.items() if why is Outcome.CANCELLED]
        self.stats.cancelled[source] += len(cancelled)
        used = [key for key in settled.committed if key in self._joined]
        rest = [key for key in settled.committed if key not in self._joined]
        self._joined.difference_update(move.keys)
        if used:
            self._use(used, source)
        self._unused.update(dict.fromkeys(rest, (source, known[1], now)))
        self._waste([key for key in rest if not self._wanted[key]], drop=True)

    def _waste(self, keys: Sequence[BlockKey], *, drop: bool) -> None:
        """Nobody has used these, nor waits for them. They are dropped if they are still below: the
        next prefetch is to have their slots, not those of others."""
        keys = [key for key in keys if key in self._unused]
        for key in keys:
            self.stats.wasted[self._unused.pop(key)[0]] += 1
        if not keys:
            return
        self.share.wasted(len(keys))
        if drop:
            below = [tier.lookup(keys) for tier in self._context.tiers[HOST + 1 :]]
            read = set(self._context.ledger.pinned(HOST))  # evicted, and loaded again since then
            self._context.tiers[HOST].forget(
                [
                    key
                    for key, *found in zip(keys, *below, strict=True)
                    if Presence.HIT in found and key not in read
                ]
            )
            self._reservations.count_again()

    def counted(self) -> PrefetchStats:
        """Counters and gauges at this moment."""
        self.stats.blocks = self.share.blocks
        return msgspec.structs.replace(
            self.stats,
            **{
                name: list(getattr(self.stats, name))
                for name in ("arrived", "used", "wasted", "cancelled", "warmed")
            },
        )

    def step(self, now: float) -> None:
        """Between two steps of the engine, when nothing is reserved for anybody."""
        self._tick(now)
        self.warm_up.step(now)

    def _tick(self, now: float) -> None:
        """Cancel what nobody waits for any more, what is late, and what gives its room to loads."""
        over, self._over = self._over, []
        for wanted in over:
            self._wanted.subtract(wanted.keys)
            for key in wanted.keys:
                if self._wanted[key] <= 0:
                    del self._wanted[key]
        for wanted in over:
            self._waste([k for k in wanted.keys if k not in self._wanted], drop=not wanted.served)
        ids = [
            id
            for id, (move, _) in self._moves.items()
            if move.prefetch
            and (
                self._release_room
                or self._loads.late(move, now)
                or (over and self._wanted.keys().isdisjoint(move.keys))
            )
        ]
        self._release_room = False
        if ids:
            self._context.mover.cancel(self._context.ledger.abandon(ids))

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """These (None: all) are dropped everywhere, and no news of what was prefetched."""
        if keys is None:
            self._unused.clear()
            self._requests.clear()
            self._over.clear()
            self._wanted.clear()
            self.warm_up.end()
        else:
            for key in keys:
                self._unused.pop(key, None)


def _is_being_cancelled(known: tuple[Move, float]) -> bool:
    move, _ = known
    return move.prefetch and not move.joinable


LEAST = 1 / 16
"""So much of the share is left at least: else nobody would find out that prefetches pay again."""


class PrefetchShare:
    """How much of host memory prefetches may hold: the less, the more of them were not used.

    It weighs as many of the last prefetched blocks as it may hold at most, used against wasted. So
    a burst of wrong prefetches lowers it within so many blocks, and as many right ones restore it.
    """

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._used, self._wasted = float(blocks), 0.0

    def used(self, blocks: int) -> None:
        """A load took so many that were prefetched."""
        self._used += blocks
        self._fade()

    def wasted(self, blocks: int) -> None:
        """So many were moved for nothing."""
        self._wasted += blocks
        self._fade()

    def _fade(self) -> None:
        known = self._used + self._wasted
        if known > self._most:
            self._used *= self._most / known
            self._wasted *= self._most / known

    @property
    def trust(self) -> float:
        """How likely it is that a block which is prefetched now will be used."""
        known = self._used + self._wasted
        return max(LEAST, self._used / known) if known else 0.0

    @property
    def blocks(self) -> int:
        """How many may be held now; one at least, unless it was none from the start."""
        return max(min(1, self._most), int(self._most * self.trust))


UNDER_WAY_BLOCKS = 64
"""The most blocks that are under way at a time: what is served need not wait for more."""
LONGEST_S = 600.0
"""After so long the engine knows better what is hot than the time before its start."""


class WarmUp:
    """Fills a part of host memory after a start, once, with the hottest blocks of lower tiers.

    They move as prefetches do, behind all others, and evict nothing.
    """

    def __init__(
        self,
        context: ChainContext,
        reservations: Reservations,
        loads: Loads,
        prefetches: Prefetches,
        blocks: int,
    ) -> None:
        """`blocks` is how many host memory may hold then."""
        slots = context.slots[HOST]
        self._context = context
        self._reservations = reservations
        self._loads = loads
        self._prefetches = prefetches
        self._spared = slots - blocks
        self._most = max(1, min(UNDER_WAY_BLOCKS, slots // 8))
        self._moves: dict[int, Move] = {}
        self._cancel_unjoined = False
        self._began = 0.0
        self.pending = blocks > 0 and any(tier.recovered for tier in context.tiers[HOST + 1 :])
        """Whether there may be more to be brought."""
        if not self.pending:
            self.end()

    def step(self, now: float) -> None:
        """Begin some more, unless somebody needs the links, or all is done."""
        if self._cancel_unjoined:
            self._cancel_unjoined = False
            ids = [id for id, move in self._moves.items() if move.prefetch]
            self._context.mover.cancel(self._context.ledger.abandon(ids))
            return
        if not self.pending:
            return
        self._began = self._began or now
        if self._free() <= 0 or now > self._began + LONGEST_S:
            self.end()
            return
        if self._context.mover.down or self._prefetches.busy or any(self._context.ledger.loading):
            return
        under_way = sum(len(move.keys) for move in self._moves.values())
        for source in range(HOST + 1, len(self._context.tiers)):
            while (room := min(self._free(), self._most - under_way, PIECE_BLOCKS)) > 0:
                told = self._context.tiers[source].take_hottest(room)
                if not told:
                    break
                under_way += self._start(source, told, now)
        if not self._moves:
            self.end()

    def _free(self) -> int:
        """Slots that may still be taken: nothing is evicted for this."""
        free = min(self._context.tiers[HOST].stats().free, self._reservations.room())
        return free - self._spared

    def _start(self, source: int, told: Sequence[BlockKey], now: float) -> int:
        places = locate(self._context, told)
        keys = [key for key, at in zip(told, places, strict=True) if at == source]
        move = self._loads.prefetch(source, keys, now) if keys else None
        if move is None:
            return 0
        self._moves[move.transfer.id] = move
        self._reservations.count_again()
        return len(move.keys)

    def settled(self, settled: SettledMove) -> bool:
        """Whether it was one of these moves that has ended."""
        source = settled.move.transfer.source
        if self._moves.pop(settled.move.transfer.id, None) is None:
            return False
        self._prefetches.stats.warmed[source] += len(settled.committed)
        return True

    def cancel_unjoined(self) -> None:
        """Cancel, at the next step, the moves that nobody waits for: a load lacks their room."""
        self._cancel_unjoined = bool(self._moves)

    def end(self) -> None:
        """No more of it."""
        self.pending = False
        for tier in self._context.tiers[HOST + 1 :]:
            tier.forget_hottest()
