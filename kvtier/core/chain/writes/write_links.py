"""The way down: what is offered to a tier, what is admitted, and how much of it is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import msgspec

from kvtier.core.chain.plan import LinkPlan
from kvtier.core.settings import Admission, WritePolicy
from kvtier.core.wear.allowance import WriteAllowance
from kvtier.core.wear.dynamic_admission import DynamicAdmission
from kvtier.types import BlockKey, Outcome

FINGERPRINT_BYTES = 12
TOUCHES_KEPT = 1 << 16
MISSED_KEPT = 1 << 16


class LinkStats(msgspec.Struct):
    """Counters and gauges of the way into one tier, in blocks."""

    target: str
    offered: int = 0
    admitted: int = 0
    written: int = 0
    bytes_written: int = 0
    waiting: int = 0
    in_flight: int = 0
    behind: int = 0
    """Blocks above that outlived an earlier process, and that this tier may lack: they are looked
    at, and written, in the background."""
    drops: dict[str, int] = {}
    """Not written, by reason: "full" (too many waiting), "gone" (evicted first), "down" (the tier
    is failing), "refused" (by the mover), "budget" (others are worth more of what may be
    written)."""
    failures: dict[str, int] = {}
    """Blocks whose transfer failed, by outcome."""


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


class Link:
    """The way into one tier. Bounded: what waits, and what is under way and so holds pins above."""

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
        self.pressed = False
        """Whether the tier above took something in since it was last looked at."""
        self._turnover = 0
        self._missed: OrderedDict[BlockKey, None] = OrderedDict()
        self._waiting: deque[BlockKey] = deque()
        self._queued: set[BlockKey] = set()
        self._queue_blocks = queue_blocks
        self._window = max(1, min(window, queue_blocks))

    @property
    def room(self) -> int:
        """How many more blocks may be under way."""
        return max(0, self._window - self.stats.in_flight)

    def startable(self, least: int) -> int:
        """How many may be started by this step: as far as there is room, as many as have come or
        ended since the last one, and `least` more. So the room is filled again as it becomes free,
        and a step's work stays in proportion to the engine's and to the tier's."""
        count, self._turnover = least + self._turnover, 0
        return min(count, self.room)

    def ended(self, count: int) -> None:
        """So many of those under way are not any more."""
        self.stats.in_flight -= count
        self._turnover += count

    @property
    def spare(self) -> int:
        """How many more may be under way of what is not urgent: half of the rest is for what is."""
        return 0 if self._waiting else max(0, (self._window + 1) // 2 - self.stats.in_flight)

    @property
    def backlog(self) -> int:
        """How many blocks wait."""
        return len(self._waiting)

    def affordable(self, count: int) -> int:
        """How many of the next so many blocks may be written at this moment."""
        return count if self.allowance is None else self.allowance.blocks(count)

    @property
    def awaits_budget(self) -> bool:
        """Whether nothing may be written for a while."""
        allowance = self.allowance
        return allowance is not None and allowance.level < allowance.block_bytes

    def committed(self, keys: Sequence[BlockKey], now: float) -> Sequence[BlockKey]:
        """The tier above has these now, which this one lacks; answers with those that are not
        written for want of budget."""
        self.pressed = True
        self._turnover += len(keys)
        admitted = keys if self.touches is None else self.touches.note(keys)
        worthy = self.worthy(admitted, now)
        if self.write is not WritePolicy.THROUGH:
            return []
        self.offer(len(keys), worthy)
        chosen = set(worthy) if len(worthy) < len(admitted) else admitted
        return [key for key in admitted if key not in chosen] if chosen is not admitted else []

    def worthy(
        self, keys: Sequence[BlockKey], now: float, uses: Sequence[int] = ()
    ) -> Sequence[BlockKey]:
        """Those on which the write budget is best spent; all where there is none. `uses` says how
        often each was used, of blocks that outlived a restart."""
        if self.dynamic is None or self.allowance is None:
            return keys
        room = self.allowance.level / self.allowance.block_bytes - len(self._waiting)
        worthy = self.dynamic.select(keys, room, now, uses)
        if self.write is WritePolicy.THROUGH:
            self.drop("budget", len(keys) - len(worthy))
        return worthy

    def used(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """A request has used these, wherever they were; answers with those that are to be offered
        now, because it was their second use or the tier missed them, unless it has them. Within a
        budget each use is one more chance."""
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
        """Whether it matters to this link what is used."""
        return self.touches is not None or self.dynamic is not None or bool(self._missed)

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """The tier was down, or had no room, when these came: whoever uses one of them offers it
        again. Of very many the oldest are forgotten."""
        if self.write is WritePolicy.THROUGH and self.touches is None and self.dynamic is None:
            self._missed.update(dict.fromkeys(keys))
            while len(self._missed) > MISSED_KEPT:
                self._missed.popitem(last=False)

    def admitted(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those that this link would take."""
        admitted = keys if self.touches is None else self.touches.twice(keys)
        return admitted if self.dynamic is None else self.dynamic.admitted(admitted)

    def offer(self, offered: int, admitted: Sequence[BlockKey]) -> None:
        """Let those that are admitted of so many wait to be written, as far as there is room."""
        fresh = [key for key in admitted if key not in self._queued]
        room = self._queue_blocks - len(self._waiting)
        taken, left = fresh[:room], fresh[room:]
        self.stats.offered += offered
        self.stats.admitted += len(taken)
        self.drop("full", len(left))
        self.missed(left)
        self._waiting.extend(taken)
        self._queued.update(taken)

    def take(self, count: int) -> list[BlockKey]:
        """The next keys to write."""
        keys = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._queued.difference_update(keys)
        return keys

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Do not write these (None: any) that wait, or were missed."""
        asked = None if keys is None else set(keys)
        for key in self._missed.keys() & (self._missed if asked is None else asked):
            del self._missed[key]
        gone = self._queued & (self._queued if asked is None else asked)
        if gone:
            self._waiting = deque(key for key in self._waiting if key not in gone)
            self._queued -= gone

    def drop(self, reason: str, count: int) -> None:
        """Count blocks that are not written."""
        if count:
            self.stats.drops[reason] = self.stats.drops.get(reason, 0) + count

    def failed(self, outcomes: Iterable[Outcome]) -> None:
        """Count blocks whose writing failed."""
        for outcome in outcomes:
            name = outcome.value
            self.stats.failures[name] = self.stats.failures.get(name, 0) + 1
