"""The default policy: keep what earns the most hits for the room and time it takes.

It learns from the requests themselves when blocks of each kind are used again (`reuse_forecast`),
by watching a sample of keys beyond their eviction (`history`). It evicts the run of blocks
(`prefix_runs`) with the lowest rate of hits to come, its tail first (`eviction_queue`). See
docs/how_it_works/eviction.md.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtier.core.eviction.adaptive.block_kinds import (
    GROUPS,
    HEADS,
    KINDS,
    MARK_MAX,
    NEAR_TAIL,
    POOLED,
    RESTORED,
    SHARED,
    SUPERSEDED,
    TAILS,
    Seen,
    Story,
    added_kind,
    came_back,
    conclude,
    pause_level,
    pause_of,
    shared_kind,
)
from kvtier.core.eviction.adaptive.eviction_queue import EvictionQueue
from kvtier.core.eviction.adaptive.history import SAMPLED_IN, History
from kvtier.core.eviction.adaptive.prefix_runs import NO_RUN, Runs
from kvtier.core.eviction.adaptive.reuse_forecast import Forecast
from kvtier.core.eviction.policy import UNKNOWN, EvictionPolicy, fingerprint

_REST_MAX = 3
_REST_MAX_WATCHED = 16
_REST_MAX_SHARED = 255
_REFRESHES = 32
"""The forecast is refreshed so often while as many uses are watched as the history has cells."""
_RESTORED_RUN = 32
_RESTORED_STEP_S = 1e-3

_Watched = list[tuple[int, int, int]]


class Adaptive(EvictionPolicy):
    """Evicts by learned rates of hits to come; 36 to 75 bytes a slot."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, slots: int = 0) -> None:
        self._runs = Runs()
        self._marks = bytearray()
        self._rests = bytearray()
        """How many blocks the last request that stored some had behind this one, at most 3."""
        self._epoch: float | None = None
        self._now = 0.0
        self._until_learning = 0
        self._forecast = Forecast(KINDS, GROUPS, HEADS, TAILS)
        self._history = History(self._forecast)
        self._queue = EvictionQueue(self._runs, self._forecast)
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        more = slots - self.slots
        if more > 0:
            self.slots = slots
            self._runs.resize(slots)
            self._marks.extend(bytes(more))
            self._rests.extend(bytes(more))
            self._history.resize(slots)

    def __len__(self) -> int:
        return self._runs.resident

    def __contains__(self, slot: object) -> bool:
        return (
            isinstance(slot, int) and 0 <= slot < self.slots and self._runs.run_of[slot] != NO_RUN
        )

    @property
    def nbytes(self) -> int:
        parts = (self._runs, self._history, self._forecast)
        return 2 * self.slots + sum(part.nbytes for part in parts)

    # -- what requests tell --------------------------------------------------------------------

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        if not slots:
            return
        runs = self._runs
        run_of = runs.run_of
        self._tell_time(now)
        parent = NO_RUN if after == UNKNOWN else run_of[after]
        watched = self._history.sample(map(fingerprint, keys))
        known, seen, shared_mark = self._recall(slots, watched)
        left = NO_RUN if known < 0 else run_of[slots[known]]
        depth = len(slots)
        fresh = depth - 1 - known
        new = fresh + ahead
        if parent == NO_RUN:
            after = UNKNOWN
        else:
            depth += runs.depth[parent]
            if seen is None:
                pause = pause_of(runs.kind[parent])
                seen = Seen(self._marks[after], self._rests[after], False, pause)
                new += runs.fresh[parent]
        if known >= 0 and left == NO_RUN:
            # Only a sample is watched: blocks after this one may have been seen as well.
            new = max(0, new - SAMPLED_IN)
        story = conclude(seen, new, depth + ahead)
        shared = known + 1 if shared_mark else 0
        if story.forked and ahead:
            # Undecided: what is missing here may have been evicted, which its store will tell.
            assert seen is not None
            before = SUPERSEDED if left == NO_RUN else runs.kind[left]
            story = Story(seen.mark, before if before < POOLED else story.kind)
        elif story.forked and known >= 0:
            assert seen is not None
            shared, shared_mark = known + 1, SHARED | seen.mark
        elif story.forked:
            self._share(after)
        shared = self._mark(slots, story.turn, shared, shared_mark)
        if fresh:
            self._note_rests(slots, after)
        if known >= 0:
            runs.unlink(slots[: known + 1])  # those after it are in no run
            if left != NO_RUN and not story.forked and 0 < runs.size[left] <= NEAR_TAIL:
                runs.kind[left] = SUPERSEDED
                runs.queued[left] = 0
        self._arrange(slots, story.kind, shared, known + 1, depth, after)
        self._watch(slots, watched, shared, ahead)

    def _tell_time(self, now: float) -> None:
        if self._epoch is None:
            self._epoch = now
        passed = now - self._epoch
        if passed < self._now:  # the clock was put back: time goes on from where it was
            self._epoch += passed - self._now
        else:
            self._now = passed

    def _recall(self, slots: Sequence[int], watched: _Watched) -> tuple[int, Seen | None, int]:
        """The index of the last block that was seen before, resident or not; what is known of it;
        and the mark of everything up to it if it was shared when it was evicted, else 0."""
        run_of, history = self._runs.run_of, self._history
        known = len(slots) - 1
        for slot in reversed(slots):
            if run_of[slot] != NO_RUN:
                break
            known -= 1
        tags = history.tags
        for index, cell, tag in reversed(watched):
            if index <= known:
                break
            if tags[cell] == tag:
                mark, rest = history.marks[cell], history.rests[cell]
                if mark >= SHARED:
                    seen = Seen(mark, 0, True, 0)
                    return min(index + rest, len(slots) - 1), seen, min(mark + 1, MARK_MAX)
                # Only a sample is watched: blocks after this one may have been seen as well.
                pause = pause_level(self._now - history.times[cell])
                return index, Seen(mark, max(0, rest - SAMPLED_IN), True, pause), 0
        if known < 0:
            return known, None, 0
        slot = slots[known]
        pause = pause_level(self._now - self._runs.used_at[run_of[slot]])
        return known, Seen(self._marks[slot], self._rests[slot], True, pause), 0

    def _mark(self, slots: Sequence[int], turn: int, shared: int, shared_mark: int) -> int:
        """Mark these slots; returns how many of them, from the first on, are shared."""
        run_of, marks = self._runs.run_of, self._marks
        index = 0
        for slot in slots:
            mark = marks[slot]
            if mark >= SHARED and run_of[slot] != NO_RUN:
                if mark < MARK_MAX:
                    marks[slot] = mark + 1
            elif index < shared:
                marks[slot] = shared_mark
            else:
                break
            index += 1
        for slot in slots[index:] if index else slots:
            marks[slot] = turn
        return index

    def _share(self, slot: int) -> None:
        """Another request went a different way after this block: its whole prefix is shared."""
        runs, marks = self._runs, self._marks
        for before in runs.from_tail(slot):
            marks[before] |= SHARED  # its turns so far count as uses
        run = runs.run_of[slot]
        runs.kind[run] = shared_kind(marks[slot])
        runs.queued[run] = 0

    def _note_rests(self, slots: Sequence[int], after: int) -> None:
        """Remember how near to the end of the request each block is."""
        rests = self._rests
        for slot in slots:
            rests[slot] = _REST_MAX
        behind = 0
        for slot in slots[: -_REST_MAX - 1 : -1]:
            rests[slot] = behind
            behind += 1
        if after != UNKNOWN and len(slots) < _REST_MAX:
            for slot in islice(self._runs.from_tail(after), _REST_MAX - len(slots)):
                rests[slot] = behind
                behind += 1

    def _arrange(
        self, slots: Sequence[int], kind: int, shared: int, known: int, depth: int, after: int
    ) -> None:
        """Put the blocks into runs: what is shared by how much it is, what was known before, and
        what is new. Behind the blocks of the same request they go on from theirs."""
        runs, marks = self._runs, self._marks
        count = len(slots)
        first = 0
        if shared:
            base = depth - count
            while first < shared:
                level = shared_kind(marks[slots[first]])
                end = first + 1
                while end < shared and shared_kind(marks[slots[end]]) == level:
                    end += 1
                runs.open(slots[first:end], self._now, level, base + end)
                first = end
            if first == count:
                return
            after = slots[first - 1]
        if first < known:
            self._continue(after, slots[first:known], kind, depth - count + known, 0)
            after = slots[known - 1]
        elif after != UNKNOWN:
            self._renew(after, kind)
        first = max(first, known)
        if first < count:
            self._continue(after, slots[first:], added_kind(kind), depth, count - first)

    def _continue(
        self, after: int, slots: Sequence[int], kind: int, depth: int, fresh: int
    ) -> None:
        """Extend the run that ends with `after` if it is of the same sort, else open one."""
        runs = self._runs
        run = NO_RUN if after == UNKNOWN else runs.run_of[after]
        if run != NO_RUN and runs.tail[run] == after:
            before = runs.kind[run]
            if before < POOLED and came_back(before) == came_back(kind):
                runs.extend(run, slots, self._now, kind, fresh)
                return
        runs.open(slots, self._now, kind, depth, fresh, after)

    def _renew(self, slot: int, kind: int) -> None:
        """What this request came back to, which ends here or before what it added here, is used."""
        runs = self._runs
        run = runs.run_of[slot]
        if not came_back(runs.kind[run]):
            slot = runs.before[run]
            run = NO_RUN if slot == UNKNOWN else runs.run_of[slot]
        if run != NO_RUN and runs.tail[run] == slot and came_back(runs.kind[run]):
            runs.renew(run, self._now, kind)

    def _watch(self, slots: Sequence[int], watched: _Watched, shared: int, ahead: int) -> None:
        """Write down the watched blocks, and learn from time to time."""
        runs, marks, write, now = self._runs, self._marks, self._history.write, self._now
        run_of, kind_of = runs.run_of, runs.kind
        last = len(slots) - 1 + ahead
        for index, cell, tag in watched:
            slot = slots[index]
            rest, most = last - index, _REST_MAX_WATCHED
            if index < shared:
                rest, most = shared - 1 - index, _REST_MAX_SHARED
            if rest > most:
                rest = most
            write(cell, tag, now, kind_of[run_of[slot]], marks[slot], rest)
        self._until_learning -= len(watched)
        if self._until_learning <= 0:
            self._until_learning = self._history.cells // _REFRESHES
            self._forecast.refresh(self._history.waiting(self._now, KINDS))

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        return self._queue.victims(count, pinned, self._now)

    def chances(self, slots: Sequence[int], seconds: float, now: float) -> Sequence[float]:
        if not slots:
            return []
        self._tell_time(now)
        runs = self._runs
        of = np.frombuffer(runs.run_of, dtype=np.int32).take(slots)
        rates = self._forecast.rate(runs.kinds().take(of), self._now - runs.times().take(of))
        chances: list[float] = (-np.expm1(-rates * seconds)).tolist()
        return chances

    def evict(self, count: int, pinned: Container[int] = ()) -> list[int]:
        return self._queue.evict(count, pinned, self._now)

    def remove(self, slots: Sequence[int]) -> None:
        self._runs.unlink(slots)

    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        if not len(slots):
            return
        times: NDArray[np.float64]
        if last_used is None:
            steps = np.arange(len(slots), dtype=np.float64) // _RESTORED_RUN
            times = self._now + (steps - steps[-1]) * _RESTORED_STEP_S
        else:
            times = np.asarray(last_used, dtype=np.float64)
            newest = float(times[-1])
            if self._epoch is None or newest > self._epoch + self._now:
                self._tell_time(newest)
            times = times - (self._epoch or 0.0)
        newest_first = np.asarray(slots, dtype=np.int32)[::-1]
        self._runs.open_many(newest_first, times[::-1], RESTORED, _RESTORED_RUN)
        np.frombuffer(self._marks, dtype=np.uint8)[newest_first] = 0
        np.frombuffer(self._rests, dtype=np.uint8)[newest_first] = 0
