"""Stores: blocks go down from tier to tier, by write policy and admission."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kvtier.chain.admission import DynamicAdmission
from kvtier.chain.context import ChainContext
from kvtier.chain.ledger import SettledMove
from kvtier.chain.plan import HOST, LinkPlan, plan_links
from kvtier.chain.stats import LinkStats
from kvtier.interfaces.mover import TransferResult
from kvtier.interfaces.tier import Tier
from kvtier.interfaces.write_budget import WriteAllowance
from kvtier.settings import Admission, WritePolicy
from kvtier.types import BlockKey, Fate, Outcome, Presence

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
    """Stores blocks in the lower tiers, as many at each step of the engine as there is room for."""

    def __init__(self, context: ChainContext) -> None:
        self._context = context
        self._tiers = tiers = context.tiers
        self._settings = settings = context.settings
        self._slots = slots = context.slots
        self._ledger = context.ledger
        self._mover = context.mover
        plans = plan_links(settings)
        # What is under way is pinned above: all links together leave half of host memory free.
        window = max(1, slots[HOST] // (2 * max(1, len(plans))))
        self._links = [
            StoreLink(
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
        for link in self._links:
            link.tell = partial(context.misses.note, link.target)
        self._into = {link.target: link for link in self._links}
        context.ledger.watched = {
            link.source for link in self._links if link.write is WritePolicy.ON_EVICT
        }
        self._catch_ups = {
            link.target: CatchUp(link, tiers[link.source], tiers[link.target], slots[link.target])
            for link in self._links
            if link.write is WritePolicy.THROUGH
        }
        sources = {link.source for link in self._links if link.target in self._catch_ups}
        self._others = [tier for at, tier in enumerate(tiers) if at not in sources]
        """Tiers of which nobody wants to know what outlived an earlier process."""
        for link in self._links:
            link.demotion_due = tiers[link.source].recovered > 0
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
        if self._requests:
            self._learn(1)
        for link in self._links:
            if link.touches is None and not self._context.writable(link.target, now):
                continue
            again = link.used(keys)
            if again:  # most of them are there already, and must take up no room in the queue
                lacking = self._lacking(link, again)
                chosen = link.within_budget(lacking, now)
                if link.write is WritePolicy.THROUGH:
                    link.offer(len(lacking), chosen)

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

    def storable(self, count: int) -> int:
        """How many of so many new blocks host memory can take so that each gets as far down as the
        write policies say."""
        for link in self._links:
            above = [each for each in self._links if each.target == link.source]
            coming = sum(each.backlog + each.stats.in_flight for each in above)
            if link.write is WritePolicy.THROUGH:
                count = min(count, link.space - coming)
            count = min(count, self.takes(link.source, count + coming) - coming)
        return max(0, count)

    def takes(self, tier: int, count: int) -> int:
        """How many of so many blocks a tier can take in before it evicts one that has still to be
        written below it."""
        free = self._tiers[tier].stats().free
        victims = self._tiers[tier].victims(count - free) if count > free else []
        for link in self._links if victims else ():
            if link.source == tier:
                at_risk: Collection[BlockKey] = link.queued
                if link.write is WritePolicy.ON_EVICT:
                    at_risk = set(self._lacking(link, link.admitted(victims)))
                first = next((at for at, key in enumerate(victims) if key in at_risk), None)
                count = count if first is None else min(count, free + first)
        return count

    def waits_for(self, key: BlockKey) -> list[int]:
        """The tiers that a block is still to be written to."""
        return [link.target for link in self._links if key in link.queued]

    @property
    def waiting(self) -> bool:
        """Whether something is to be written yet."""
        for link in self._links:  # asked in every step of an engine: no generator
            left = link.backlog or (link.demotion_due and link.write is WritePolicy.ON_EVICT)
            if left and not link.awaits_budget:
                return True
        return bool(self._catch_ups) and any(each.pending for each in self._catch_ups.values())

    def step(self, now: float) -> None:
        """Start the stores that there is room for."""
        if self._requests:
            self._learn(_STEP_KEYS)
        if self._ledger.evicted:
            self._count_lost()
        self.started = 0
        counts = [link.startable(STEP_BLOCKS) for link in self._links]
        if self._mover.down:  # what waits can wait for it, and nothing below makes room in vain
            return
        for link, count in zip(self._links, counts, strict=True):
            down = self._context.stores.down(link.target, now)
            if down:
                keys = link.take(link.backlog)
                link.drop(Fate.DOWN, keys)
                link.missed(keys)
                self._pass_on(link, keys, now)
                link.demotion_due = False
            elif link.backlog:
                self._write(link, link.take(link.affordable(min(count, link.backlog))), now)
            if link.target in self._catch_ups:
                self._catch_up(link, self._catch_ups[link.target], now, down=down)
            elif link.demotion_due:
                self._demote(link, count, now)
        for tier in self._others:
            if tier.recovered:
                tier.forget_recovered()

    def settled(self, move: SettledMove, result: TransferResult, now: float) -> None:
        """Book the end of a store."""
        transfer = move.move.transfer
        link = self._into[transfer.target]
        link.ended(len(transfer.keys))
        link.stats.written += len(move.committed)
        link.stats.bytes_written += result.bytes_moved
        self._context.stores.observe(transfer.target, result.outcomes, now)
        self.committed(transfer.target, move.committed, now)
        if not move.failed:
            return
        link.failed(move.failed.values())
        refused = [key for key, outcome in move.failed.items() if outcome in _TARGET_FAILS]
        # What is full would take the bytes of each, use by use, before it refuses them again.
        full = Outcome.NO_SPACE
        link.missed(key for key in refused if move.failed[key] is not full)
        link.tell(refused, Fate.FAILED)
        self._pass_on(link, refused, now)
        if refused and not move.committed:  # not again before something else wants room above
            link.demotion_due = False

    def stats(self) -> list[LinkStats]:
        """Counters and gauges of every link."""
        for link in self._links:
            link.stats.waiting = link.backlog
            if link.target in self._catch_ups:
                link.stats.behind = self._catch_ups[link.target].behind
        return [link.stats for link in self._links]

    def _catch_up(self, link: StoreLink, catch_up: CatchUp, now: float, *, down: bool) -> None:
        keys = catch_up.next(now, min(link.spare, STEP_BLOCKS), down=down)
        if keys:
            link.stats.offered += len(keys)
            link.stats.admitted += len(keys)
            self._write(link, keys, now, old=True)
            catch_up.began(keys, now)

    def _write(
        self, link: StoreLink, keys: Sequence[BlockKey], now: float, *, old: bool = False
    ) -> None:
        # From host memory the mover writes without a copy; the tier above is the second choice.
        for source in dict.fromkeys((HOST, link.source)):
            if keys:
                keys, left = self._carry(link, source, keys, now, old=old)
                if left:
                    lacking = self._lacking(link, left)
                    link.missed(lacking)
                    link.tell(lacking, Fate.LACKS_ROOM)
                    self._pass_on(link, lacking, now)
        if keys:  # what was used while it was on its way up, from there or past it, is not gone
            lacking = self._lacking(link, keys)
            here = self._tiers[HOST].lookup(lacking)
            gone = [key for key, at in zip(lacking, here, strict=True) if at is Presence.MISS]
            link.drop(Fate.GONE, gone)

    def _demote(self, link: StoreLink, count: int, now: float) -> None:
        """Write down what eviction will take next, so that it takes nothing that is only there."""
        source = self._tiers[link.source]
        ahead = max(1, min(AHEAD_BLOCKS_MAX, self._slots[link.source] // 8))
        short = ahead - source.stats().free
        if short <= 0:
            link.demotion_due = False
            return
        # What the tier below has, or will have, is lost to nobody when it is evicted.
        alone = self._lacking(link, link.admitted(source.victims(short)))
        keys = alone[: link.affordable(min(count, len(alone)))]
        link.demotion_due = len(keys) < len(alone)
        if keys:
            under_way = link.stats.in_flight
            # Victims come tail first, but a tier takes what it is given first for a prompt's head.
            self._carry(link, link.source, keys[::-1], now)
            if link.stats.in_flight == under_way:  # none was taken: try again when that may help
                link.demotion_due = False

    def _carry(
        self,
        link: StoreLink,
        source: int,
        keys: Sequence[BlockKey],
        now: float,
        *,
        old: bool = False,
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Start to move what the source has and the target has not. Answers with what the source
        lacks, and with what the target has or has no room for."""
        deadline = now + self._settings[link.target].store_deadline.seconds
        lacking: list[BlockKey] = []
        left: list[BlockKey] = []
        refused: list[BlockKey] = []
        for start in range(0, len(keys), STEP_BLOCKS):
            some = keys[start : start + STEP_BLOCKS]
            # What is bad must not spread: only what the engine has just stored goes on unverified.
            prove = old or source != HOST or self._ledger.deferred_verification.any_of(some)
            move, absent = self._ledger.carry(source, link.target, some, deadline, prove)
            if move is not None and self._mover.submit(move.transfer):
                link.stats.in_flight += len(move.keys)
                self.started += len(move.keys)
            elif move is not None:
                self._ledger.refuse(move)
                refused = [*move.keys, *keys[start + STEP_BLOCKS :]]
                link.drop(Fate.REFUSED, refused)
                link.missed(refused)
            lacking += absent
            settled = {*absent, *(move.keys if move is not None else ())}
            left += [key for key in some if key not in settled] if len(settled) < len(some) else []
            if refused:  # nothing below makes room for the rest in vain
                break
        return lacking, left

    def _pass_on(self, link: StoreLink, keys: Sequence[BlockKey], now: float) -> None:
        """What a tier has no room for, cannot write, or may not, may go to the one below all the
        same."""
        for below in self._links if keys else ():
            if below.source == link.target:
                self._offer(below, keys, now)

    def _offer(self, link: StoreLink, keys: Sequence[BlockKey], now: float) -> None:
        if left := link.committed(self._lacking(link, keys), now):
            self._pass_on(link, left, now)

    def _count_lost(self) -> None:
        """Count what was evicted before there was time to write it down."""
        evicted, self._ledger.evicted = self._ledger.evicted, []
        for tier, keys in evicted:
            for link in self._links:
                link.demotion_due |= link.source == tier
                if link.source == tier and link.write is WritePolicy.ON_EVICT:
                    admitted = link.admitted(keys)
                    link.drop(Fate.GONE, self._lacking(link, admitted))
                    if len(admitted) < len(keys):
                        link.decline(self._lacking(link, keys), admitted)

    def _lacking(self, link: StoreLink, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that a link's tier neither has nor is about to have."""
        below = self._tiers[link.target].lookup(keys)
        return [key for key, at in zip(keys, below, strict=True) if at is Presence.MISS]


FINGERPRINT_BYTES = 12
TOUCHES_KEPT = 1 << 16
MISSED_KEPT = 1 << 16


class Touches:
    """A bounded memory of which blocks have been used, and which twice.

    It keeps the last bytes of the hash and the group: a collision admits one block too early, no
    more. The oldest use is forgotten first.
    """

    def __init__(self, kept: int = TOUCHES_KEPT) -> None:
        self._kept = kept
        # Ordered, because a plain dict finds its oldest entry by passing all that were deleted.
        self._seen: OrderedDict[bytes, bool] = OrderedDict()

    def note(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Remember one more use of each key; answers with those that were used before."""
        seen = self._seen
        again = []
        for key in keys:
            mark = key[-FINGERPRINT_BYTES:]
            if seen.pop(mark, None) is not None:
                again.append(key)
                seen[mark] = True
            else:
                seen[mark] = False
        while len(seen) > self._kept:
            seen.popitem(last=False)
        return again

    def twice(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of the keys that are known to have been used twice."""
        return [key for key in keys if self._seen.get(key[-FINGERPRINT_BYTES:])]

    def __len__(self) -> int:
        return len(self._seen)


class StoreLink:
    """The stores into one tier: what is offered, admitted, waiting and under way.

    What waits is bounded, and so is what is under way, because that is pinned in the tier above.
    """

    def __init__(
        self,
        plan: LinkPlan,
        target: str,
        queue_blocks: int,
        window: int,
        above: int = 0,
        below: int = 0,
        allowance: WriteAllowance | None = None,
    ) -> None:
        """`above` and `below` are how many blocks the tiers hold; `allowance` is the target's."""
        self.source = plan.source
        self.target = plan.target
        self.write = plan.write
        # What is evicted above was used before all that stays there: to know then whether it was
        # used twice, uses have to be remembered for as many blocks more as that tier holds.
        touches = Touches(TOUCHES_KEPT + above)
        self.touches = touches if plan.admission is Admission.SECOND_TOUCH else None
        self.allowance = allowance
        remembered = TOUCHES_KEPT + above + below
        self.dynamic = None if allowance is None else DynamicAdmission(remembered)
        self.stats = LinkStats(target)
        self.tell: Callable[[Sequence[BlockKey], Fate], None] = lambda _keys, _why: None
        """Told of blocks that are not written."""
        self.demotion_due = False
        """Whether the tier above has taken something in since its victims were last looked at."""
        self._turnover = 0
        self._missed: OrderedDict[BlockKey, None] = OrderedDict()
        self._waiting: deque[BlockKey] = deque()
        self.queued: set[BlockKey] = set()
        """The blocks that wait."""
        self._queue_blocks = queue_blocks
        self._window = max(1, min(window, queue_blocks))

    @property
    def room(self) -> int:
        """How many more blocks may be under way."""
        return max(0, self._window - self.stats.in_flight)

    def startable(self, least: int) -> int:
        """How many stores this step may start: as many as were offered or ended since the last
        step, and `least` more, within `room`. So a step's work follows the engine's."""
        count, self._turnover = least + self._turnover, 0
        return min(count, self.room)

    def ended(self, count: int) -> None:
        """So many stores have ended."""
        self.stats.in_flight -= count
        self._turnover += count

    @property
    def spare(self) -> int:
        """How many more stores of the catch-up may be under way: half of the window is spared."""
        return 0 if self._waiting else max(0, (self._window + 1) // 2 - self.stats.in_flight)

    @property
    def backlog(self) -> int:
        """How many blocks wait."""
        return len(self._waiting)

    @property
    def space(self) -> int:
        """How many more blocks may wait."""
        return self._queue_blocks - len(self._waiting)

    def affordable(self, count: int) -> int:
        """How many of so many blocks the write budget allows now."""
        return count if self.allowance is None else self.allowance.blocks(count)

    @property
    def awaits_budget(self) -> bool:
        """Whether the write budget has not room for one block."""
        allowance = self.allowance
        return allowance is not None and allowance.level < allowance.block_bytes

    def committed(self, keys: Sequence[BlockKey], now: float) -> Sequence[BlockKey]:
        """Offer blocks that the tier above has and this one lacks; answers with those for which the
        write budget has no room."""
        self.demotion_due = True
        self._turnover += len(keys)
        admitted = keys if self.touches is None else self.touches.note(keys)
        chosen = admitted if self.dynamic is None else self.within_budget(admitted, now)
        if self.write is not WritePolicy.THROUGH:
            return []
        if len(admitted) < len(keys):
            self.decline(keys, admitted)
        self.offer(len(keys), chosen)
        if len(chosen) == len(admitted):
            return []
        within = set(chosen)
        return [key for key in admitted if key not in within]

    def within_budget(
        self, keys: Sequence[BlockKey], now: float, uses: Sequence[int] = ()
    ) -> Sequence[BlockKey]:
        """The blocks on which the write budget is best spent; all of them without a budget. `uses`
        counts the uses of blocks that outlived a restart."""
        if self.dynamic is None or self.allowance is None:
            return keys
        room = self.allowance.level / self.allowance.block_bytes - len(self._waiting)
        chosen = self.dynamic.select(keys, room, now, uses)
        if self.write is WritePolicy.THROUGH and len(chosen) < len(keys):
            within = set(chosen)
            self.drop(Fate.BUDGET, [key for key in keys if key not in within])
        return chosen

    def used(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Note that a request has used these. Answers with those to offer now, unless the tier has
        them: at their second use, after the tier missed them, or at each use within a budget."""
        if self.touches is not None:
            again = self.touches.note(keys)
            return again if self.write is WritePolicy.THROUGH else []
        if self.dynamic is not None:
            return keys
        again = [key for key in keys if key in self._missed] if self._missed else []
        for key in again:
            self._missed.pop(key, None)
        return again

    @property
    def listens(self) -> bool:
        """Whether `used` can answer with anything."""
        return self.touches is not None or self.dynamic is not None or bool(self._missed)

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """Remember blocks that the tier could not take: their next use offers them again. The
        oldest of too many are forgotten."""
        if self.write is WritePolicy.THROUGH and self.touches is None and self.dynamic is None:
            self._missed.update(dict.fromkeys(keys))
            while len(self._missed) > MISSED_KEPT:
                self._missed.popitem(last=False)

    def admitted(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those that this link would take."""
        admitted = keys if self.touches is None else self.touches.twice(keys)
        return admitted if self.dynamic is None else self.dynamic.admitted(admitted)

    def offer(self, offered: int, admitted: Sequence[BlockKey]) -> None:
        """Queue the admitted of so many offered blocks, as far as the queue has room."""
        fresh = [key for key in admitted if key not in self.queued]
        space = self.space
        taken, left = fresh[:space], fresh[space:]
        self.stats.offered += offered
        self.stats.admitted += len(taken)
        if left:
            self.drop(Fate.FULL, left)
            self.missed(left)
        self._waiting.extend(taken)
        self.queued.update(taken)

    def take(self, count: int) -> list[BlockKey]:
        """The next keys to write."""
        keys = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self.queued.difference_update(keys)
        return keys

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Drop these (None: all) from the queue and from the missed."""
        asked = None if keys is None else set(keys)
        for key in self._missed.keys() & (self._missed if asked is None else asked):
            del self._missed[key]
        dropped = self.queued & (self.queued if asked is None else asked)
        if dropped:
            self._waiting = deque(key for key in self._waiting if key not in dropped)
            self.queued -= dropped

    def drop(self, why: Fate, keys: Sequence[BlockKey]) -> None:
        """Count blocks that are not written."""
        if keys:
            self.stats.drops[why.label] = self.stats.drops.get(why.label, 0) + len(keys)
            self.tell(keys, why)

    def decline(self, keys: Sequence[BlockKey], admitted: Sequence[BlockKey]) -> None:
        """Admission does not take those of the blocks that are not `admitted`."""
        taken = set(admitted)
        if declined := [key for key in keys if key not in taken]:
            why = Fate.BUDGET if self.touches is None else Fate.NOT_ADMITTED
            self.tell(declined, why)

    def failed(self, outcomes: Iterable[Outcome]) -> None:
        """Count blocks whose writing failed."""
        for outcome in outcomes:
            name = outcome.value
            self.stats.failures[name] = self.stats.failures.get(name, 0) + 1


LOOKED_AT = 256
"""How many blocks one step looks at, in some 100 microseconds."""
PAUSE_S = 1.0
PAUSE_MAX_S = 300.0
"""The pause after which a tier that took nothing is tried again doubles up to this."""
WAIT_LIMIT_S = 10.0
"""Wait limit of an idle engine that steps for a tier which takes nothing, or does not know yet what
it holds. The rest follows when the engine steps again."""


class CatchUp:
    """Stores, after a restart, of what outlived the process before and the tier below may lack.

    That process died, or the tier below was down, before these blocks were written there, and
    nobody knows which they are. Each step looks at a few, the hottest first, and writes what the
    tier below lacks as far as no newer store waits.
    """

    def __init__(self, link: StoreLink, source: Tier, target: Tier, holds: int) -> None:
        """`holds` is how many blocks the target holds."""
        self._link = link
        self._source = source
        self._target = target
        self._holds = holds
        self._looked_at = 0
        self._full = False
        self._ready: deque[BlockKey] = deque()
        self._begun: list[BlockKey] = []
        self._not_before = 0.0
        self._pause_s = PAUSE_S
        self._wait_until = 0.0
        self.pending = source.recovered > 0
        """Whether steps should go on for it though the engine is idle."""

    @property
    def behind(self) -> int:
        """How many blocks are still to be looked at, or written."""
        unseen = 0 if self._full else self._source.recovered
        return unseen + len(self._ready) + len(self._begun)

    def next(self, now: float, room: int, *, down: bool) -> Sequence[BlockKey]:
        """What to write now, at most so many: the hottest of what is left."""
        if not (self._begun or self._ready or self._source.recovered):
            self.pending = False
            return []
        if not self._wait_until:
            self._wait_until = now + WAIT_LIMIT_S
        if self._begun:
            self._see(now)
        target = self._target
        keys: list[BlockKey] = []
        if not (down or target.unwell or target.learning or now < self._not_before):
            if not self._ready:
                self._look(now)
                self._wait_until = now + WAIT_LIMIT_S
            count = self._link.affordable(min(room, len(self._ready)))
            keys = [self._ready.popleft() for _ in range(count)]
            self._begun += keys
        self.pending = self.behind > 0 and now < self._wait_until
        return keys

    def _see(self, now: float) -> None:
        """What has become of what was begun. If a tier took none of it, all is tried again later;
        else it is not the tier that fails, and a block waits for its use, as others do."""
        below = self._target.lookup(self._begun)
        coming = [k for k, at in zip(self._begun, below, strict=True) if at is Presence.PENDING]
        lacking = [k for k, at in zip(self._begun, below, strict=True) if at is Presence.MISS]
        if len(coming) + len(lacking) < len(self._begun):
            self._pause_s = PAUSE_S
            self._wait_until = now + WAIT_LIMIT_S
        else:
            self._try_again(lacking, now)
        self._begun = coming

    def began(self, keys: Sequence[BlockKey], now: float) -> None:
        """These were given away to be written; for what there was no room there may be some later:
        room in a shared bucket is granted piece by piece."""
        below = self._target.lookup(keys)
        refused = {key for key, at in zip(keys, below, strict=True) if at is Presence.MISS}
        if refused:
            self._begun = [key for key in self._begun if key not in refused]
            self._try_again([key for key in keys if key in refused], now)
            self.pending = self.behind > 0 and now < self._wait_until

    def _try_again(self, keys: Sequence[BlockKey], now: float) -> None:
        """After a while, what is still here."""
        above = self._source.lookup(keys)
        left = [key for key, at in zip(keys, above, strict=True) if at is Presence.HIT]
        if left:
            self._ready.extendleft(reversed(left))
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def _look(self, now: float) -> None:
        """Look at some more. Of a tier that holds more than the one below only the hottest may
        push anything out there, or every restart would write the same blocks again."""
        left = max(self._holds - self._looked_at, self._target.stats().free)
        self._full = left <= 0
        if self._full:
            return
        keys, uses = self._source.take_recovered(min(LOOKED_AT, left))
        self._looked_at += len(keys)
        below = self._target.lookup(keys)
        lacking = [at for at, found in enumerate(below) if found is Presence.MISS]
        touches = self._link.touches
        if touches is None:
            left_over = [keys[at] for at in lacking]
            used = [1 + uses[at] for at in lacking]  # its first use was the one that stored it
            self._ready.extend(self._link.within_budget(left_over, now, used))
            return
        # Its first use was the one that stored it.
        self._ready.extend(keys[at] for at in lacking if uses[at])
        self._ready.extend(touches.note(keys[at] for at in lacking if not uses[at]))

    def forget(self, keys: Sequence[BlockKey] | None) -> None:
        """Drop these (None: all) from what was looked at and waits."""
        dropped = set(self._ready if keys is None else keys)
        self._ready = deque(key for key in self._ready if key not in dropped)
