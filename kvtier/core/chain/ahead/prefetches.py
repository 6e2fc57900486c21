"""Promotions that begin before their request is served: while it waits in the engine's queue.

A prefetch is the promotion that the request's load would be, begun earlier: the load joins it, or
finds its blocks in host memory. Until then it gives way to everything: to loads in the mover, to
blocks that are hotter in host memory, and to the room that others lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile

import msgspec

from kvtier.core.chain.ahead.prefetch_share import PrefetchShare
from kvtier.core.chain.in_flight import Move, Settled
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.direct_reads import DirectReads
from kvtier.core.chain.loads.promises import Promises
from kvtier.core.chain.loads.promotion import Promotion
from kvtier.core.chain.locator import Locator
from kvtier.core.chain.plan import HOST, plan_ahead
from kvtier.core.chain.stats import PrefetchStats, Tally
from kvtier.core.costs.model import CostModel
from kvtier.core.interfaces.mover import Mover
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey, Outcome, Presence

PIECE_BLOCKS = 16
"""The most blocks of one transfer: they are in host memory for good when all of them are."""
QUEUE_SHARE = 4
"""Prefetches take up at most this part of a tier's queue."""
AHEAD_S = 1.0
"""Nor more than the link moves in so long: what comes to the head of the queue is to come soon."""
HORIZON_S = 10.0
"""A block that is likely to be used within so long gives way to no prefetch."""


class Wish(msgspec.Struct, eq=False):
    """What one waiting request will ask for."""

    keys: Sequence[BlockKey]
    left: Sequence[BlockKey]
    """Those of them that are still to be looked for, in their order."""
    served: bool = False
    """It got what it takes; else it was given up, and nobody asks for its blocks."""


class Prefetches:
    """Begins prefetches, within bounds, and knows what has become of their blocks."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        queues: Sequence[int],
        share: int,
        ledger: Ledger,
        mover: Mover,
        locator: Locator,
        promises: Promises,
        promotion: Promotion,
        direct: DirectReads,
        tally: Tally,
        costs: CostModel | None,
        clock: Callable[[], float],
        unsaved: Callable[[Sequence[BlockKey]], Collection[BlockKey]],
        used: Callable[[Sequence[BlockKey], int], None],
    ) -> None:
        """`share` is how many blocks prefetches may hold, `unsaved` are those of host memory that
        would be gone, and `used` is told of blocks that a load took, and of their tier."""
        self._tiers = tiers
        self._queues = queues
        self._ledger = ledger
        self._mover = mover
        self._locator = locator
        self._promises = promises
        self._promotion = promotion
        self._direct = direct
        self._tally = tally
        self._costs = costs
        self._clock = clock
        self._unsaved = unsaved
        self._tell_used = used
        self.share = PrefetchShare(share)
        self.stats = PrefetchStats.of(len(tiers))
        self._wishes: dict[str, Wish] = {}
        self._over: list[Wish] = []
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
        self._give_way = False

    # -- what is wanted ----------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether there is anything to be prefetched, and room for it."""
        return self.share.blocks > 0 and len(self._tiers) > 1

    @property
    def busy(self) -> bool:
        """Whether requests wait for whom there is something to be brought yet."""
        return bool(self._moves) or any(wish.left for wish in self._wishes.values())

    @property
    def pending(self) -> bool:
        """Whether something is to be cleaned up at the next `tick`."""
        return bool(self._over or self._give_way)

    def want(self, request: str, keys: Sequence[BlockKey]) -> list[int]:
        """A request that waits will ask for these; answers with the bytes of them that lie in each
        tier below host memory. `begin` brings them up."""
        self.end(request, served=True)
        origins = self._locator.locate(keys)
        left = [key for key, at in zip(keys, origins, strict=True) if self._comes_from(at)]
        self._wishes[request] = Wish(keys=keys, left=left)
        self._wanted.update(keys)
        sizes = [0] * len(self._tiers)
        for at, size in zip(origins, self._tally.sizes(keys), strict=True):
            if self._comes_from(at):
                sizes[at] += size
        return sizes

    def _comes_from(self, origin: int) -> bool:
        """Whether blocks with this origin come up through host memory."""
        return origin > HOST and origin not in self._direct.tiers

    def begin(self, request: str) -> bool:
        """Begin to move in what a request wants, as far as there is room; whether that is all."""
        wish = self._wishes.get(request)
        if wish is None or not wish.left:
            return True
        if self._mover.down or self._give_way:
            return False
        now, left = self._clock(), wish.left
        origins = self._locator.locate(left)
        at, room = 0, PIECE_BLOCKS
        while at < len(left) and room > 0:
            source, stop = plan_ahead(origins, at, PIECE_BLOCKS)
            if self._comes_from(source):
                room = self.room(source, stop - at)
                stop = at + (room if room and self._start(source, left[at : at + room], now) else 0)
                room = stop - at
            at = stop
        wish.left = left[at:]
        return not wish.left

    def room(self, source: int, blocks: int) -> int:
        """How many of so many blocks of a tier may be begun to move in now."""
        flying = self._in_flight[source]
        held = sum(self._in_flight) + len(self._unused)
        queued = max(1, self._queues[source] // QUEUE_SHARE) - flying
        room = min(blocks, self.share.blocks - held, queued, self._promises.room())
        if room <= 0 or (flying and self._busy_seconds(source) > AHEAD_S):
            return 0
        return self._takes(room)

    def _busy_seconds(self, source: int) -> float:
        if self._costs is None:
            return 0.0
        return self._costs.load_seconds(self._tally.moved[source], self._bytes[source])

    def takes_seconds(self, sizes: Sequence[int]) -> float:
        """How long it takes until so many bytes have come from each tier, as far as known."""
        if self._costs is None:
            return 0.0
        links = zip(self._tally.moved, sizes, strict=True)
        return max(
            (self._costs.load_seconds(link, size) for link, size in links if size), default=0.0
        )

    def _takes(self, blocks: int) -> int:
        """For how many of so many host memory has room without losing what is hotter: what waiting
        requests want, or what is likely to be used before; or what is nowhere else yet. What comes
        after such a block in the order of eviction is hotter than that."""
        host = self._tiers[HOST]
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
        move = self._promotion.prefetch(source, keys, now)
        if move is not None:
            self._moves[move.transfer.id] = (move, now)
            self._in_flight[source] += len(move.keys)
            self._bytes[source] += sum(self._tally.sizes(move.keys))
            self._promises.count_again()
        return move is not None

    def end(self, request: str, *, served: bool) -> None:
        """It does not wait any more: it is `served`, or has ended. What was begun for nobody else
        is cancelled at the next `tick`: a load may be about to join it."""
        wish = self._wishes.pop(request, None)
        if wish is not None:
            wish.served = served
            self._over.append(wish)

    def stop(self, request: str) -> None:
        """What is not here yet will not be in time: bring no more of it. What is here stays."""
        wish = self._wishes.get(request)
        if wish is None:
            return
        moving = {key for move, _ in self._moves.values() if move.prefetch for key in move.keys}
        here = [key for key in wish.keys if key not in moving]
        self.end(request, served=True)
        self._wishes[request] = Wish(keys=here, left=[])
        self._wanted.update(here)

    def give_way(self) -> None:
        """A load lacks room: it gets what prefetches hold that nobody has joined."""
        self._give_way = any(move.prefetch for move, _ in self._moves.values())

    @property
    def holds_room(self) -> bool:
        """Whether there will be more room in a moment, because prefetches give way."""
        return self._give_way or any(map(_leaves, self._moves.values()))

    def leaving(self, keys: Collection[BlockKey]) -> bool:
        """Whether some of these cannot be loaded for a moment: their prefetch was cancelled, and
        the mover may not have let go of it yet."""
        moves = [move for move, _ in filter(_leaves, self._moves.values())]
        return any(not set(move.keys).isdisjoint(keys) for move in moves)

    # -- what becomes of it --------------------------------------------------------------------

    def joined(self, move: Move, keys: Collection[BlockKey]) -> None:
        """A load waits for a move, for those of its blocks that are among these keys."""
        known = self._moves.get(move.transfer.id)
        if known is not None:
            self._joined.update(key for key in move.keys if key in keys)
        if move.prefetch:
            self._promotion.hasten(move)
            if known is not None:
                size = sum(self._tally.sizes(move.keys))
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
            came = [self._unused.pop(key) for key in mine]
            began, ended = min(each[1] for each in came), max(each[2] for each in came)
            self._save(sum(self._tally.sizes(mine)), tier, began, ended)
            self._use(mine, tier)

    def _use(self, keys: Sequence[BlockKey], tier: int) -> None:
        self.stats.used[tier] += len(keys)
        self.share.used(len(keys))
        self._tell_used(keys, tier)

    def _save(self, size: int, tier: int, began: float, ended: float | None) -> None:
        """A load need not wait for so many bytes: no longer than they were under way, nor than the
        link is expected to take for them."""
        saved = (self._clock() if ended is None else ended) - began
        if self._costs is not None:
            saved = min(saved, self._costs.load_seconds(self._tally.moved[tier], size))
        self.stats.saved_seconds += max(0.0, saved)

    def settled(self, settled: Settled, now: float) -> None:
        """A move that was begun as a prefetch has ended."""
        move, source = settled.move, settled.move.transfer.source
        known = self._moves.pop(move.transfer.id, None)
        if known is None:
            return
        self._in_flight[source] -= len(move.keys)
        self._bytes[source] -= sum(self._tally.sizes(move.keys))
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
            below = [tier.lookup(keys) for tier in self._tiers[HOST + 1 :]]
            read = set(self._ledger.pinned(HOST))  # evicted, and loaded again since then
            self._tiers[HOST].forget(
                [
                    key
                    for key, *found in zip(keys, *below, strict=True)
                    if Presence.HIT in found and key not in read
                ]
            )
            self._promises.count_again()

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

    def tick(self, now: float) -> None:
        """Once a step: cancel what nobody wants any more, what is late, and what gives way."""
        over, self._over = self._over, []
        for wish in over:
            self._wanted.subtract(wish.keys)
            for key in wish.keys:
                if self._wanted[key] <= 0:
                    del self._wanted[key]
        for wish in over:
            self._waste([k for k in wish.keys if k not in self._wanted], drop=not wish.served)
        ids = [
            id
            for id, (move, _) in self._moves.items()
            if move.prefetch
            and (
                self._give_way
                or self._promotion.late(move, now)
                or (over and self._wanted.keys().isdisjoint(move.keys))
            )
        ]
        self._give_way = False
        if ids:
            self._mover.cancel(self._ledger.abandon(ids))

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """These (None: all) are dropped everywhere, and no news of what was prefetched."""
        if keys is None:
            self._unused.clear()
            self._wishes.clear()
            self._over.clear()
            self._wanted.clear()
        else:
            for key in keys:
                self._unused.pop(key, None)


def _leaves(known: tuple[Move, float]) -> bool:
    move, _ = known
    return move.prefetch and not move.joinable
