"""What runs behind the engine: blocks written down the chain, ahead of eviction or as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kvtier.core.chain.health import Health
from kvtier.core.chain.in_flight import Settled
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.plan import HOST, plan_links
from kvtier.core.chain.writes.catch_up import CatchUp
from kvtier.core.chain.writes.write_links import Link, LinkStats
from kvtier.core.interfaces.mover import Mover, TransferResult
from kvtier.core.interfaces.tier import Tier
from kvtier.core.settings import TierSettings, WritePolicy
from kvtier.types import BlockKey, Outcome, Presence

STEP_BLOCKS = 64
"""So many blocks one step starts to write into one tier, beside as many as have come or ended since
the last one; and so many one transfer carries at most, for its slots are free when all of it is
written."""
AHEAD_BLOCKS_MAX = 256
_STEP_KEYS, _REQUESTS_KEPT = 1024, 1024
"""From the requests of about so many blocks one step learns, in a millisecond; and so many
requests wait for that."""
_TARGET_FAILS = (Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.NO_SPACE, Outcome.DROPPED)


class Cascade:
    """Carries blocks from tier to tier, as many at each step of the engine as there is room for."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: Sequence[TierSettings],
        slots: Sequence[int],
        ledger: Ledger,
        mover: Mover,
        health: Health,
    ) -> None:
        self._tiers = tiers
        self._settings = settings
        self._slots = slots
        self._ledger = ledger
        self._mover = mover
        self._health = health
        plans = plan_links(settings)
        # What is under way is pinned above: all links together leave half of host memory free.
        window = max(1, slots[HOST] // (2 * max(1, len(plans))))
        self._links = [
            Link(
                plan,
                tiers[plan.target].medium,
                settings[plan.target].queue_blocks,
                window,
                slots[plan.source],
                slots[plan.target],
                tiers[plan.target].allowance,
            )
            for plan in plans
        ]
        self._into = {link.target: link for link in self._links}
        ledger.watched = {link.source for link in self._links if link.write is WritePolicy.ON_EVICT}
        self._catch_ups = {
            link.target: CatchUp(link, tiers[link.source], tiers[link.target], slots[link.target])
            for link in self._links
            if link.write is WritePolicy.THROUGH
        }
        sources = {link.source for link in self._links if link.target in self._catch_ups}
        self._others = [tier for at, tier in enumerate(tiers) if at not in sources]
        """Tiers of which nobody wants to know what outlived an earlier process."""
        for link in self._links:
            link.pressed = tiers[link.source].recovered > 0
        self._budgeted = [link for link in self._links if link.dynamic is not None]
        self._requests: deque[tuple[Sequence[BlockKey], Sequence[bool]]] = deque(
            maxlen=_REQUESTS_KEPT
        )
        self.started = 0
        """Blocks that the last step has started to write."""

    def committed(
        self, tier: int, keys: Sequence[BlockKey], now: float, origin: int | None = None
    ) -> None:
        """A tier has these now. If they came up from a lower one, the `origin`, only tiers above
        that may lack them."""
        for link in self._links:
            if link.source == tier and (origin is None or link.target < origin):
                self._offer(link, keys, now)
            elif link.target == origin and link.dynamic is not None:
                link.dynamic.earned.loaded(keys)

    def used_again(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of a prompt's keys that host memory has: it is not the first to use them, though it
        may load none, because the engine itself still has them. None if no link asks for it."""
        if not any(link.listens for link in self._links):
            return []
        here = [at is Presence.HIT for at in self._tiers[HOST].lookup(keys)]
        if self._budgeted:
            self._requests.append((keys, here))
        return [key for key, held in zip(keys, here, strict=True) if held]

    def _learn(self, left: int) -> None:
        """Of requests with about so many blocks, what was missed in host memory."""
        while self._requests and left > 0:
            keys, here = self._requests.popleft()
            left -= len(keys)
            for link in self._budgeted:
                assert link.dynamic is not None
                link.dynamic.earned.request(keys, here)

    def used(self, keys: Sequence[BlockKey], now: float) -> None:
        """A request has used these, or loads them."""
        self._learn(1)
        for link in self._links:
            down = self._tiers[link.target].unwell or self._health.down(link.target, now)
            if down and link.touches is None:
                continue
            again = link.used(keys)
            if again:  # most of them are there already, and must take up no room in the queue
                lacking = self._lacking(link, again)
                worthy = link.worthy(lacking, now)
                if link.write is WritePolicy.THROUGH:
                    link.offer(len(lacking), worthy)

    def forget(self, keys: Sequence[BlockKey] | None = None) -> None:
        """Do not write these, or any, that wait."""
        for link in self._links:
            link.forget(keys)
        for catch_up in self._catch_ups.values():
            catch_up.forget(keys)

    def unsaved(self, keys: Sequence[BlockKey]) -> Collection[BlockKey]:
        """Those of host memory's keys that would be written down before they are evicted, and have
        not been yet."""
        for link in self._links:
            if link.source == HOST and link.write is WritePolicy.ON_EVICT and keys:
                return set(self._lacking(link, link.admitted(keys)))
        return ()

    @property
    def waiting(self) -> bool:
        """Whether something is to be written yet."""
        for link in self._links:  # asked in every step of an engine: no generator
            left = link.backlog or (link.pressed and link.write is WritePolicy.ON_EVICT)
            if left and not link.awaits_budget:
                return True
        return bool(self._catch_ups) and any(each.pending for each in self._catch_ups.values())

    def step(self, now: float) -> None:
        """Start what there is room for."""
        self._learn(_STEP_KEYS)
        self._count_lost()
        self.started = 0
        counts = [link.startable(STEP_BLOCKS) for link in self._links]
        if self._mover.down:  # what waits can wait for it, and nothing below makes room in vain
            return
        for link, count in zip(self._links, counts, strict=True):
            down = self._health.down(link.target, now)
            if down:
                keys = link.take(link.backlog)
                link.drop("down", len(keys))
                link.missed(keys)
                self._pass_on(link, keys, now)
                link.pressed = False
            elif link.backlog:
                self._write(link, link.take(link.affordable(min(count, link.backlog))), now)
            if link.target in self._catch_ups:
                self._catch_up(link, self._catch_ups[link.target], now, down=down)
            elif link.pressed:
                self._demote(link, count, now)
        for tier in self._others:
            if tier.recovered:
                tier.forget_recovered()

    def settled(self, move: Settled, result: TransferResult, now: float) -> None:
        """Book the end of a move of ours."""
        transfer = move.move.transfer
        link = self._into[transfer.target]
        link.ended(len(transfer.keys))
        link.stats.written += len(move.committed)
        link.stats.bytes_written += result.bytes_moved
        link.failed(move.failed.values())
        self._health.observe(transfer.target, result.outcomes, now)
        self.committed(transfer.target, move.committed, now)
        refused = [key for key, outcome in move.failed.items() if outcome in _TARGET_FAILS]
        # What is full would take the bytes of each, use by use, before it refuses them again.
        full = Outcome.NO_SPACE
        link.missed(key for key in refused if move.failed[key] is not full)
        self._pass_on(link, refused, now)
        if refused and not move.committed:  # not again before something else wants room above
            link.pressed = False

    def stats(self) -> list[LinkStats]:
        """Counters and gauges of every link."""
        for link in self._links:
            link.stats.waiting = link.backlog
            if link.target in self._catch_ups:
                link.stats.behind = self._catch_ups[link.target].behind
        return [link.stats for link in self._links]

    def _catch_up(self, link: Link, catch_up: CatchUp, now: float, *, down: bool) -> None:
        keys = catch_up.next(now, min(link.spare, STEP_BLOCKS), down=down)
        if keys:
            link.stats.offered += len(keys)
            link.stats.admitted += len(keys)
            self._write(link, keys, now, old=True)
            catch_up.began(keys, now)

    def _write(
        self, link: Link, keys: Sequence[BlockKey], now: float, *, old: bool = False
    ) -> None:
        # From host memory the mover writes without a copy; the tier above is the second choice.
        for source in dict.fromkeys((HOST, link.source)):
            if keys:
                keys, left = self._carry(link, source, keys, now, old=old)
                lacking = self._lacking(link, left)
                link.missed(lacking)
                self._pass_on(link, lacking, now)
        if keys:  # what was used while it was on its way up, from there or past it, is not gone
            here = self._tiers[HOST].lookup(self._lacking(link, keys))
            link.drop("gone", here.count(Presence.MISS))

    def _demote(self, link: Link, count: int, now: float) -> None:
        """Write down what eviction will take next, so that it takes nothing that is only there."""
        source = self._tiers[link.source]
        ahead = max(1, min(AHEAD_BLOCKS_MAX, self._slots[link.source] // 8))
        short = ahead - source.stats().free
        if short <= 0:
            link.pressed = False
            return
        # What the tier below has, or will have, is lost to nobody when it is evicted.
        alone = self._lacking(link, link.admitted(source.victims(short)))
        keys = alone[: link.affordable(min(count, len(alone)))]
        link.pressed = len(keys) < len(alone)
        if keys:
            under_way = link.stats.in_flight
            # Victims come tail first, but a tier takes what it is given first for a prompt's head.
            self._carry(link, link.source, keys[::-1], now)
            if link.stats.in_flight == under_way:  # none was taken: try again when that may help
                link.pressed = False

    def _carry(
        self, link: Link, source: int, keys: Sequence[BlockKey], now: float, *, old: bool = False
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Start to move what the source has and the target has not. Answers with what the source
        lacks, and with what the target has or has no room for."""
        deadline = now + self._settings[link.target].store_deadline.seconds
        lacking: list[BlockKey] = []
        left: list[BlockKey] = []
        refused: list[BlockKey] = []
        for start in range(0, len(keys), STEP_BLOCKS):
            some = keys[start : start + STEP_BLOCKS]
            # What is bad must not spread: only what the engine has just stored goes on unproved.
            prove = old or source != HOST or self._ledger.unproved.any_of(some)
            transfer, absent = self._ledger.carry(source, link.target, some, deadline, prove)
            if transfer is not None and self._mover.submit(transfer):
                link.stats.in_flight += len(transfer.keys)
                self.started += len(transfer.keys)
            elif transfer is not None:
                self._ledger.refuse(transfer)
                refused = [*transfer.keys, *keys[start + STEP_BLOCKS :]]
                link.drop("refused", len(refused))
                link.missed(refused)
            lacking += absent
            settled = {*absent, *(transfer.keys if transfer is not None else ())}
            left += [key for key in some if key not in settled] if len(settled) < len(some) else []
            if refused:  # nothing below makes room for the rest in vain
                break
        return lacking, left

    def _pass_on(self, link: Link, keys: Sequence[BlockKey], now: float) -> None:
        """What a tier has no room for, cannot write, or may not, may go to the one below all the
        same."""
        if keys:
            for below in self._links:
                if below.source == link.target:
                    self._offer(below, keys, now)

    def _offer(self, link: Link, keys: Sequence[BlockKey], now: float) -> None:
        self._pass_on(link, link.committed(self._lacking(link, keys), now), now)

    def _count_lost(self) -> None:
        """Count what was evicted before there was time to write it down."""
        evicted, self._ledger.evicted = self._ledger.evicted, []
        for tier, keys in evicted:
            for link in self._links:
                link.pressed |= link.source == tier
                if link.source == tier and link.write is WritePolicy.ON_EVICT:
                    link.drop("gone", len(self._lacking(link, link.admitted(keys))))

    def _lacking(self, link: Link, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that a link's tier neither has nor is about to have."""
        below = self._tiers[link.target].lookup(keys)
        return [key for key, at in zip(keys, below, strict=True) if at is Presence.MISS]
