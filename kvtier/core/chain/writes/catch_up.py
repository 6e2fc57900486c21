"""After a restart: what outlived the process before in a tier, and the tier below may lack.

That process died, or the tier below was down, before it was written there. Nobody knows which
blocks those are: all are looked at, a few at each step, and what the tier below lacks is written as
far as nothing fresher waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.core.chain.writes.write_links import Link
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey, Presence

LOOKED_AT = 256
"""How many blocks one step looks at, in some 100 microseconds."""
PAUSE_S = 1.0
PAUSE_MAX_S = 300.0
"""A tier that takes nothing is tried again after a pause, which doubles up to this."""
PATIENCE_S = 10.0
"""How long an idle engine is kept stepping for a tier that takes nothing, or does not know yet what
it holds. What is left goes on when the engine steps again."""


class CatchUp:
    """The way of what was recovered into the tier of one link that is written through."""

    def __init__(self, link: Link, source: Tier, target: Tier, holds: int) -> None:
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
        self._patient_until = 0.0
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
        if not self._patient_until:
            self._patient_until = now + PATIENCE_S
        if self._begun:
            self._see(now)
        target = self._target
        keys: list[BlockKey] = []
        if not (down or target.unwell or target.learning or now < self._not_before):
            if not self._ready:
                self._look(now)
                self._patient_until = now + PATIENCE_S
            count = self._link.affordable(min(room, len(self._ready)))
            keys = [self._ready.popleft() for _ in range(count)]
            self._begun += keys
        self.pending = self.behind > 0 and now < self._patient_until
        return keys

    def _see(self, now: float) -> None:
        """What has become of what was begun. If a tier took none of it, all is tried again later;
        else it is not the tier that fails, and a block waits for its use, as others do."""
        below = self._target.lookup(self._begun)
        coming = [k for k, at in zip(self._begun, below, strict=True) if at is Presence.PENDING]
        lacking = [k for k, at in zip(self._begun, below, strict=True) if at is Presence.MISS]
        if len(coming) + len(lacking) < len(self._begun):
            self._pause_s = PAUSE_S
            self._patient_until = now + PATIENCE_S
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
            self.pending = self.behind > 0 and now < self._patient_until

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
            self._ready.extend(self._link.worthy(left_over, now, used))
            return
        # Its first use was the one that stored it.
        self._ready.extend(keys[at] for at in lacking if uses[at])
        self._ready.extend(touches.note(keys[at] for at in lacking if not uses[at]))

    def forget(self, keys: Sequence[BlockKey] | None) -> None:
        """Do not write these, or any, that were looked at and wait."""
        gone = None if keys is None else set(keys)
        self._ready = deque(key for key in self._ready if gone is not None and key not in gone)
