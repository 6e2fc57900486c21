"""The default eviction policy: learns when blocks are used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from itertools import islice
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.forecast import (
    NO_RUN,
    SAMPLED_IN,
    Forecast,
    History,
    Runs,
    history_bytes,
    history_cells,
)
from kvtier.eviction.policy import UNKNOWN, EvictionPolicy, fingerprint

_REST_MAX = 3
_REST_MAX_WATCHED = 16
_REST_MAX_SHARED = 255
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

    def shared_bytes(self, slots: int) -> int:
        return history_bytes(KINDS, history_cells(slots))

    def share(self, memory: memoryview, now: float) -> None:
        self._history.share(memory)
        epoch = self._history.epoch(now)
        if self._epoch is not None:
            later = self._epoch - epoch
            self._runs.times()[:] += later
            self._now += later
        self._epoch = epoch
        self._tell_time(now)

    def close(self) -> None:
        self._history.leave()

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
            self._epoch = self._history.epoch(now)
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
        if self._history.has_learned(len(watched)):
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


SHARED = 128
"""A slot's mark is one byte. Below this it counts how often its conversation has come back (its
turn). From this on it says that requests went different ways after the block, and how many used it
since."""
MARK_MAX = 255
TURN_MAX = SHARED - 1

_LENGTHS = 8
_FRESH = 0
_FORKED = _FRESH + _LENGTHS
_RETURNED = _FORKED + 1
_TURN_LEVELS = 6
_PAUSES = 3
"""So many lengths are told apart of the pause before a turn: up to 4 s, to 24 s, more."""
_SHORTEST_PAUSE_S = 4.0
_PAUSE_STEP = 6.0
_GREW = _RETURNED + _TURN_LEVELS * _PAUSES
_ADDED = _GREW + _PAUSES - _RETURNED
"""What a turn adds is of a kind of its own, so far behind that of what it came back to."""
RESTORED = _RETURNED + 2 * _ADDED
POOLED = RESTORED + 1
_SHARE_LEVELS = 7
KINDS = POOLED + _SHARE_LEVELS
SUPERSEDED = KINDS
"""What a conversation left behind when its next turn wrote its last block anew: worth nothing."""

GROUPS = (*[1] * _RETURNED, *[_PAUSES] * (2 * (_TURN_LEVELS + 1)), 1)
"""The kinds below POOLED in groups: turns that differ only in the pause before are together."""
HEADS = slice(_RETURNED, _RETURNED + _ADDED)
TAILS = slice(_RETURNED + _ADDED, _RETURNED + 2 * _ADDED)

NEAR_TAIL = 2
"""A request that goes on from one of the last blocks of another continues it. (Its very last block
is often partial, and written anew by the next turn.)"""
_GREW_BLOCKS = 4
_FEW_USES = 32


def fresh_kind(length: int) -> int:
    """The first request of a conversation, by its length in blocks: the long return less often."""
    bits = (length - 1).bit_length()
    return _FRESH + (bits if bits < _LENGTHS else _LENGTHS - 1)


def forked_kind(length: int, mark: int) -> int:
    """A first request that begins like others did: what few have shared so far is a document or a
    retry, what many share is everyone's system prompt and says nothing."""
    return _FORKED if mark - SHARED < _FEW_USES else fresh_kind(length)


def pause_level(seconds: float) -> int:
    """A pause on the scale by which kinds are told apart."""
    level, limit = 0, _SHORTEST_PAUSE_S
    while seconds > limit and level < _PAUSES - 1:
        level += 1
        limit *= _PAUSE_STEP
    return level


def pause_of(kind: int) -> int:
    """The pause before a turn of this kind, on that scale; the longest for kinds that are none."""
    return (kind - _RETURNED) % _PAUSES if _RETURNED <= kind < RESTORED else _PAUSES - 1


def turn_kind(turn: int, fresh: int, length: int, pause: int) -> int:
    """A conversation that has come back: the more often, the likelier again, but not after a turn
    that brought much that is new. How soon tells the pace of its user, or of its tools."""
    if not turn:
        return fresh_kind(length)
    if fresh > _GREW_BLOCKS:
        return _GREW + pause
    bits = turn.bit_length()
    level = (bits if bits < _TURN_LEVELS else _TURN_LEVELS) - 1
    return _RETURNED + level * _PAUSES + pause


def added_kind(kind: int) -> int:
    """The kind of what this request adds, where `kind` is that of the blocks it came back to."""
    return kind + _ADDED if came_back(kind) else kind


def came_back(kind: int) -> bool:
    """Whether blocks of this kind are those that a turn came back to, without what it added."""
    return _RETURNED <= kind < _RETURNED + _ADDED


def shared_kind(mark: int) -> int:
    """A block after which requests went different ways, by how many used it."""
    bits = (mark - SHARED + 1).bit_length()
    return POOLED + (bits if bits < _SHARE_LEVELS else _SHARE_LEVELS) - 1


class Seen(msgspec.Struct, frozen=True, gc=False):
    """The last block of a request that was seen before."""

    mark: int
    rest: int
    """How many blocks the request before had behind it."""
    again: bool
    """Seen in another request, not in an earlier part of this one."""
    pause: int
    """How long ago that was, as a level; in an earlier part of this request: its pause."""


class Story(msgspec.Struct, frozen=True, gc=False):
    """What a request is taken for."""

    turn: int
    kind: int
    forked: bool = False
    """It went another way than the request before it: what they share is of another kind."""


def conclude(seen: Seen | None, fresh: int, length: int) -> Story:
    """Tell a new conversation, the next turn of one and a fork apart; `fresh` blocks are new."""
    if seen is None:
        return Story(0, fresh_kind(length))
    if seen.mark >= SHARED:
        return Story(0, forked_kind(length, seen.mark))
    if not fresh or seen.rest <= NEAR_TAIL:
        turn = seen.mark + seen.again
        if turn > TURN_MAX:
            turn = TURN_MAX
        return Story(turn, turn_kind(turn, fresh, length, seen.pause))
    return Story(0, forked_kind(length, SHARED), forked=True)


_QUEUED_SHARE = 64
"""The worst 1/64 of what is ranked is queued; when that is used up, all is ranked again."""
_RANKED_MAX = 8192
"""At most so many runs are ranked at once, in turns: no request waits for more than that."""
_LOW_SHARE = 16
_SORTED_MAX = 256


class EvictionQueue:
    """The runs with the lowest rates of hits to come, worst first.

    Ranking all runs at each eviction would take too long. The queue holds the worst, evictions take
    their tails, and a run that is used again leaves it. The rest is ranked when it is used up.
    """

    def __init__(self, runs: Runs, forecast: Forecast) -> None:
        self._runs = runs
        self._forecast = forecast
        self._queue: deque[int] = deque()
        self._ranked_to = 0

    def victims(self, count: int, pinned: Container[int], now: float) -> list[int]:
        """The next slots to go, which stay where they are."""
        if count <= 0:
            return []
        self._skip_unqueued()
        while True:
            found = self._first(count, pinned)
            if len(found) == count or not self._rank(count - len(found), now):
                return found

    def evict(self, count: int, pinned: Container[int], now: float) -> list[int]:
        """Cut the next slots to go off their runs."""
        runs = self._runs
        found: list[int] = []
        self._skip_unqueued()
        while len(found) < count:
            queued = (run for run in self._queue if runs.queued[run])
            found += runs.cut_tails(queued, count - len(found), pinned)
            if len(found) < count and not self._rank(count - len(found), now):
                break
        return found

    def _skip_unqueued(self) -> None:
        queue, queued = self._queue, self._runs.queued
        while queue and not queued[queue[0]]:
            queue.popleft()

    def _first(self, count: int, pinned: Container[int]) -> list[int]:
        """Up to `count` slots of the queued runs, in the order they have to go."""
        queued, tail, toward_head = self._runs.queued, self._runs.tail, self._runs.toward_head
        found: list[int] = []
        for run in self._queue:
            if not queued[run]:
                continue
            slot = tail[run]
            while slot != UNKNOWN:
                if slot not in pinned:
                    found.append(slot)
                    if len(found) == count:
                        return found
                slot = toward_head[slot]
        return found

    def _rank(self, wanted: int, now: float) -> bool:
        """Queue more runs, worst first, with at least `wanted` blocks; false if all are queued."""
        runs = self._runs
        queued = runs.queued
        self._queue = deque(filter(queued.__getitem__, self._queue))
        ranked = self._next_to_rank()
        if not len(ranked):
            return False
        worst = self._worst(ranked, wanted, now)
        self._queue.extend(worst)
        for run in worst:
            queued[run] = 1
        return True

    def _next_to_rank(self) -> NDArray[np.intp]:
        """All runs that are not queued, or of very many those whose turn it is, ascending."""
        runs, start = self._runs, self._ranked_to
        enough = _RANKED_MAX + 1
        turn = runs.unqueued(start, len(runs.queued), enough)
        first = runs.unqueued(0, start, enough - len(turn))
        if len(first) + len(turn) < enough:
            return np.concatenate([first, turn])
        turn = (turn if len(turn) else first)[:_RANKED_MAX]
        self._ranked_to = int(turn[-1]) + 1
        return turn

    def _worst(self, ranked: NDArray[np.intp], wanted: int, now: float) -> list[int]:
        """The first of these runs to go, in order: with so many blocks, or its share of all."""
        runs = self._runs
        blocks = runs.sizes().take(ranked)
        wanted = max(wanted, int(blocks.sum()) // _QUEUED_SHARE)
        used_at = runs.times().take(ranked)
        rates = self._forecast.rate(runs.kinds().take(ranked), now - used_at)
        if len(ranked) >= _SORTED_MAX:
            # To tell the low ones apart and sort only them is quicker than to sort all.
            few = len(ranked) // _LOW_SHARE
            low = (rates <= np.partition(rates, few)[few]).nonzero()[0]
            if blocks.take(low).sum() >= wanted:
                ranked, blocks = ranked.take(low), blocks.take(low)
                rates, used_at = rates.take(low), used_at.take(low)
        order = np.lexsort((-runs.depths().take(ranked), used_at, rates))
        needed = int(blocks.take(order).cumsum().searchsorted(wanted)) + 1
        worst: list[int] = ranked.take(order[:needed]).tolist()
        return worst
