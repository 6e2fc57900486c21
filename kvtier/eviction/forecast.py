"""What the adaptive policy learns: histories, prefix runs, and forecasts of reuse."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AGES = 60
_STEPS_PER_OCTAVE = 3
_YOUNGEST_S = 0.125
AGE_STARTS: Floats = _YOUNGEST_S * 2 ** (np.arange(AGES) / _STEPS_PER_OCTAVE)
"""Where the steps of the scale begin, in seconds."""
# Arrays without a dimension: numpy multiplies by them in half the time that a number takes.
_YOUNGEST = np.array(_YOUNGEST_S)
_PER_OCTAVE = np.array(float(_STEPS_PER_OCTAVE))
_OLDEST = np.array(AGES - 1.001)
_ONE = np.array(1.0)
_INSTANT = np.array(1e-300)
_PRIOR_HAZARD = 0.1
"""The same chance in every step of a logarithmic scale: then the rate falls as 1 / age, and blocks
are ordered as LRU does. What is learned moves away from that."""
_PRIOR_WEIGHT = 8.0
_POOL_WEIGHT = 100.0
_LEVEL_WEIGHT = 10.0
"""So many observations a kind needs before its own curve, and its own level, count more than those
of all kinds together."""
_COUNT_MAX = 1e15
"""More was never counted: somebody has written into the memory that processes share."""
_SURE = 100.0
"""So many uses at an age are as good a reason for a sharp curve as for a smooth one."""


def _positions(ages: Floats) -> Floats:
    scaled: Floats = np.fmax(ages, _YOUNGEST)  # what is no number counts as young
    scaled /= _YOUNGEST
    np.log2(scaled, out=scaled)
    scaled *= _PER_OCTAVE
    return scaled


def age_steps(ages: Floats) -> NDArray[np.intp]:
    """The steps of the logarithmic scale that ages in seconds fall into."""
    positions: Floats = _positions(ages)
    return np.minimum(positions, AGES - 1, out=positions).astype(np.intp)


def age_positions(ages: Floats) -> Floats:
    """Where ages in seconds lie on the scale, between the steps."""
    positions: Floats = np.minimum(_positions(ages), _OLDEST)
    return positions


def _smoothing(passes: int) -> Floats:
    """What counts by age are multiplied with to be smoothed so many times."""
    matrix: Floats = np.eye(AGES)
    for _ in range(passes):
        padded = np.hstack([matrix[:, :1], matrix, matrix[:, -1:]])
        matrix = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return matrix


_SHARP = _smoothing(2)
_SMOOTH = _smoothing(6)


def _smoothed(reused: Floats, at_risk: Floats) -> tuple[Floats, Floats]:
    """Where few uses were counted they say little of their very age, where many were they do."""
    sharp = reused @ _SHARP
    sure = sharp / (sharp + _SURE)
    return (
        sure * sharp + (1 - sure) * (reused @ _SMOOTH),
        sure * (at_risk @ _SHARP) + (1 - sure) * (at_risk @ _SMOOTH),
    )


def _leaned(reused: Floats, at_risk: Floats, expected_hazard: Floats) -> Floats:
    """The chances by kind and age: those expected, at a level of the kind's own, as far as it has
    seen too little to know better."""
    expected = (at_risk * expected_hazard).sum(axis=1, keepdims=True)
    level = (reused.sum(axis=1, keepdims=True) + _LEVEL_WEIGHT) / (expected + _LEVEL_WEIGHT)
    leaned = np.minimum(expected_hazard * level, 0.9)
    hazard: Floats = np.minimum((reused + _POOL_WEIGHT * leaned) / (at_risk + _POOL_WEIGHT), 0.95)
    return hazard


class Counts:
    """How many waits of blocks ended at each age, by kind: noted one by one, counted in bulk."""

    def __init__(self, kinds: int) -> None:
        self.total: Floats = np.zeros((kinds, AGES))
        """May lie in memory that other processes count in, too."""
        self._kinds = bytearray()
        self._ages = array("d")

    @property
    def nbytes(self) -> int:
        """Without the counts, which are where the history is."""
        return 9 * len(self._ages)

    def note(self, kind: int, age: float) -> None:
        """One more."""
        self._kinds.append(kind)
        self._ages.append(age)

    def count(self) -> Floats:
        """By kind and age, all that was noted."""
        total = self.total
        if not 0 <= total.min() <= total.max() <= _COUNT_MAX:  # no number, perhaps
            total[:] = 0.0
        if self._ages:
            kinds = np.frombuffer(self._kinds, dtype=np.uint8).astype(np.intp)
            cells = np.minimum(kinds, len(total) - 1) * AGES
            cells += age_steps(np.frombuffer(self._ages))
            total += np.bincount(cells, minlength=total.size).reshape(total.shape)
            self._kinds = bytearray()
            self._ages = array("d")
        return total


class Forecast:
    """Counts of what happened at each age, and the rates that follow, for `kinds` kinds of block.

    The first kinds come in groups of so many. Where they have seen little they lean on their group,
    and the groups on each other. The kinds after these stand alone.
    A kind in `heads` is never worth less than the one in `tails` that follows it in a prefix.
    """

    def __init__(
        self,
        kinds: int,
        groups: Sequence[int],
        heads: slice = slice(0),
        tails: slice = slice(0),
    ) -> None:
        self.kinds = kinds
        self._pooled = sum(groups)
        self._group_sizes = groups
        self._groups = np.cumsum([0, *groups[:-1]])
        self._heads, self._tails = heads, tails
        self.memory = 1 << 14
        """When so many uses were counted, all counts are halved: the old count less and less."""
        self.reused = Counts(kinds)
        """Watched blocks that were used again."""
        self.lost = Counts(kinds)
        """Watched blocks that were given up, not used again yet."""
        edges = _YOUNGEST_S * 2 ** (np.arange(AGES + 1) / _STEPS_PER_OCTAVE)
        edges[0] = 0.0
        self._width: Floats = np.diff(edges)
        self.rates: Floats = np.zeros((kinds + 1, AGES))
        """By kind and age; the last row is of what is worth nothing."""
        self._unseen = np.arange(kinds) < self._pooled
        self._first_cell = np.arange(kinds + 1, dtype=np.intp) * AGES
        self.refresh(np.zeros((kinds, AGES)))

    @property
    def nbytes(self) -> int:
        return self.rates.nbytes + self.reused.nbytes + self.lost.nbytes

    def count_in(self, reused: Floats, lost: Floats) -> None:
        """Count there from now on, from what was counted there so far."""
        self.reused.total, self.lost.total = reused, lost

    def refresh(self, waiting: Floats) -> None:
        """Learn from what was counted; `waiting` counts the watched blocks, by kind and age."""
        reused, lost = self.reused.count(), self.lost.count()
        left = lost + waiting
        at_risk = np.cumsum((reused + left)[:, ::-1], axis=1)[:, ::-1] - 0.5 * left
        hazards = self._hazards(*_smoothed(reused, at_risk))
        # All pooled kinds that nobody has seen yet have one curve, and so have the others.
        curve = np.where(at_risk[:, 0] > 0, np.arange(2, self.kinds + 2), self._unseen)
        _, first, which = np.unique(curve, return_index=True, return_inverse=True)
        self.rates[: self.kinds] = self._best_rates(hazards[first])[which]
        self.rates[self._heads] = np.maximum(self.rates[self._heads], self.rates[self._tails])
        if reused.sum() + lost.sum() > self.memory:
            reused *= 0.5
            lost *= 0.5

    def _hazards(self, reused: Floats, at_risk: Floats) -> Floats:
        pooled, alone = slice(self._pooled), slice(self._pooled, None)
        prior = _PRIOR_WEIGHT * _PRIOR_HAZARD
        together = (reused[pooled].sum(0) + prior) / (at_risk[pooled].sum(0) + _PRIOR_WEIGHT)
        groups = _leaned(
            np.add.reduceat(reused[pooled], self._groups),
            np.add.reduceat(at_risk[pooled], self._groups),
            together,
        )
        hazard = (reused + prior) / (at_risk + _PRIOR_WEIGHT)
        hazard[pooled] = _leaned(
            reused[pooled], at_risk[pooled], np.repeat(groups, self._group_sizes, axis=0)
        )
        hazard[alone] = np.minimum(hazard[alone], 0.95)
        return hazard

    def _best_rates(self, hazard: Floats) -> Floats:
        """For each kind and age, the best over all ages to wait for of hits / time spent."""
        surviving = np.cumprod(1 - hazard, axis=1) / (1 - hazard)
        # By age and kind, so that rows lie together in memory.
        gained: Floats = np.ascontiguousarray(np.cumsum(surviving * hazard, axis=1).T)
        spent: Floats = np.ascontiguousarray(
            np.cumsum(surviving * (1 - hazard / 2) * self._width, axis=1).T
        )
        nothing = np.zeros((1, len(hazard)))
        gained_before = np.vstack([nothing, gained[:-1]])
        spent_before = np.vstack([nothing, spent[:-1]])
        rates: Floats = np.zeros(gained.shape)
        for wait in range(AGES):
            upto = slice(AGES - wait)
            hits = gained[wait:] - gained_before[upto]
            time = spent[wait:] - spent_before[upto]
            hits /= np.maximum(time, _INSTANT, out=time)
            np.maximum(rates[upto], hits, out=rates[upto])
        return rates.T

    def rate(self, kinds: NDArray[np.uint8], ages: Floats) -> Floats:
        """Hits per second that slots of these kinds and ages are worth."""
        position = age_positions(ages)
        step = position.astype(np.intp)
        part = position - step
        step += self._first_cell.take(kinds)
        rates = self.rates.ravel()
        found: Floats = (_ONE - part) * rates.take(step)
        step += 1
        part *= rates.take(step)
        found += part
        return found


SAMPLED_IN = 4
"""One key in so many is watched, chosen by its fingerprint; a power of two."""
_SAMPLE_BITS = SAMPLED_IN.bit_length() - 1
_CELLS_A_SLOT = 2
"""What is popular at random times is told from what is not by uses that lie far apart: with half as
many cells it was forgotten between two of them."""
_CELLS_MIN = 3 << 13
_MEMORY_MIN = 1 << 14
_CENSUS_CELLS = _CELLS_MIN
"""At most so many cells are counted at once."""
_CENSUSES = 12
"""A wait counts half when it is as long as it took to count so many times."""
_EMPTY = 0
_REFRESHES = 32
"""The forecast is refreshed so often while as many uses are watched as the history has cells."""
_WATCHED_MASK = (1 << 64) - 1

_HEADER = struct.Struct("<8sII")
_MAGIC = b"kvtuses1"
_LONGEST_S = 1e9
"""A time further back is none that anybody has seen."""
_EPOCH, _WATCHED, _COUNTS_AT = slice(16, 24), slice(24, 32), 64
_COLUMNS = [np.dtype(each) for each in ("u4", "f4", "u1", "u1", "u1")]
_CELL_BYTES = sum(each.itemsize for each in _COLUMNS)


def history_cells(slots: int) -> int:
    """Of a history for so many slots."""
    return max(_CELLS_A_SLOT * slots, _CELLS_MIN)


def history_bytes(kinds: int, cells: int) -> int:
    """What a history takes, with what was counted."""
    return _COUNTS_AT + 2 * kinds * AGES * 8 + cells * _CELL_BYTES


class History:
    """Remembers sampled blocks, resident or not, in a table of fixed size: the newest that maps to
    a cell replaces the older.

    So it remembers about `SAMPLED_IN` times as many blocks as it has cells, resident or not, at 11
    bytes a cell. Times are kept relative to the first one seen, in 32 bits.

    It lies in one piece of memory with what the forecast has counted. Processes may share that:
    then each learns from the uses that all of them see. They take no lock. A cell that two write at
    the same time may end as a mixture of both, and a count may be lost, which is noise to a
    forecast; nothing that stands there leads out of the table.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._kinds = forecast.kinds
        self._counted_at: deque[float] = deque(maxlen=_CENSUSES)
        self.shared = False
        self._lay_out(_CELLS_MIN)

    def _lay_out(self, cells: int, memory: memoryview | None = None) -> None:
        """Be in this memory from now on, or in new memory; its size is that of `history_bytes`."""
        kinds = self._kinds
        self.cells = cells
        self._forecast.memory = max(cells // _CELLS_A_SLOT, _MEMORY_MIN)
        # Parts of equal size: a small one at the end would say next to nothing of all.
        self._census = -(-cells // -(-cells // _CENSUS_CELLS))
        self._census_at = 0
        view = memory if memory is not None else memoryview(bytearray(history_bytes(kinds, cells)))
        self._view = view
        header = _HEADER.pack(_MAGIC, kinds, cells)
        if view[: _HEADER.size] != header:
            self._forget()
            view[: _HEADER.size] = header
        counts = np.frombuffer(view, np.float64, 2 * kinds * AGES, _COUNTS_AT)
        self._forecast.count_in(*counts.reshape(2, kinds, AGES))
        self._epoch, self._watched = view[_EPOCH].cast("d"), view[_WATCHED].cast("Q")
        self._learned_at = self._watched[0] - cells  # what is there is learned at once
        tags, times, *rest = self._parts(view, cells)
        self.tags, self.times = tags.cast("I"), times.cast("f")
        self.kinds, self.marks, self.rests = rest

    def _parts(self, view: memoryview, cells: int) -> list[memoryview]:
        sizes = [dtype.itemsize * cells for dtype in _COLUMNS]
        begins = accumulate(sizes, initial=history_bytes(self._kinds, 0))
        return [view[at : at + size] for at, size in zip(begins, sizes, strict=False)]

    def _forget(self) -> None:
        self._view[_HEADER.size :] = bytes(len(self._view) - _HEADER.size)
        self._view[_EPOCH] = struct.pack("<d", np.nan)

    def share(self, memory: memoryview) -> None:
        """Go on in this memory, with what others have learned there. It has the size that
        `history_bytes` says of some number of cells, and stays as it is."""
        rest = len(memory) - history_bytes(self._kinds, 0)
        self.shared = True
        self._lay_out(rest // _CELL_BYTES, memory)

    def leave(self) -> None:
        """Let go of memory that is shared; what was learned there is not known any more."""
        if self.shared:
            self.shared = False
            self._lay_out(_CELLS_MIN)

    def epoch(self, now: float) -> float:
        """The time that others are relative to: the first that was seen. If a clock was put back to
        before that, everything begins anew."""
        found = self._epoch[0]
        if not 0 <= now - found <= _LONGEST_S:  # it may be no number, too
            self._forget()
            self._epoch[0] = found = now
        return found

    def has_learned(self, uses: int) -> bool:
        """So many more uses were watched here; whether enough were, by all, to learn anew."""
        watched = (self._watched[0] + uses) & _WATCHED_MASK
        self._watched[0] = watched
        due = (watched - self._learned_at) & _WATCHED_MASK >= self.cells // _REFRESHES
        if due:
            self._learned_at = watched
        return due

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def resize(self, slots: int) -> None:
        """Have two cells for each slot; what was remembered stays where it still maps.

        Half as many again as before at least: a tier that grows slab by slab calls for each, and
        must not move everything each time. Memory that is shared has its size.
        """
        wanted = _CELLS_A_SLOT * slots
        if wanted <= self.cells or self.shared:
            return
        before, view, learned_at = self._columns(), self._view, self._learned_at
        self._lay_out(max(wanted, self.cells * 3 // 2))
        self._learned_at = learned_at
        unchanged = slice(_HEADER.size, history_bytes(self._kinds, 0))
        self._view[unchanged] = view[unchanged]
        tags = before[0]
        cells = np.flatnonzero(tags != _EMPTY)
        places = (tags[cells] >> _SAMPLE_BITS) % self.cells
        for old, new in zip(before, self._columns(), strict=True):
            new[places] = old[cells]

    def _columns(self) -> list[NDArray[Any]]:
        parts = self._parts(self._view, self.cells)
        return [np.frombuffer(*each) for each in zip(parts, _COLUMNS, strict=True)]

    def sample(self, prints: Iterable[int]) -> list[tuple[int, int, int]]:
        """Which of these fingerprints are watched: (index, cell, tag)."""
        mask, cells = SAMPLED_IN - 1, self.cells
        return [
            (index, (tag >> _SAMPLE_BITS) % cells, tag)
            for index, tag in enumerate(prints)
            if not tag & mask and tag != _EMPTY
        ]

    def write(self, cell: int, tag: int, time: float, kind: int, mark: int, rest: int) -> None:
        """A watched block is used now: what it was waiting for has happened, or is lost."""
        before = self.tags[cell]
        if before != _EMPTY:
            forecast = self._forecast
            ended = forecast.reused if before == tag else forecast.lost
            ended.note(self.kinds[cell], time - self.times[cell])
        self.tags[cell] = tag
        self.times[cell] = time
        self.kinds[cell] = kind
        self.marks[cell] = mark
        self.rests[cell] = rest

    def waiting(self, now: float, kinds: int) -> NDArray[np.float64]:
        """How many watched blocks wait, by kind and age; in a large table a part stands for all.

        What has waited for long counts less and less, as what was counted once is halved: else a
        table that remembers for long learns late that the workload has changed.
        """
        part = slice(self._census_at, self._census_at + self._census)
        tags, times, of_kind, *_ = (each[part] for each in self._columns())
        with np.errstate(invalid="ignore"):  # what others write may be no number
            ages = now - times.astype(np.float64)
        cell = of_kind.astype(np.intp)
        cell *= AGES
        cell += age_positions(ages).astype(np.intp)
        cell[tags == _EMPTY] = kinds * AGES
        counts = np.bincount(cell, minlength=kinds * AGES)[: kinds * AGES].reshape(kinds, AGES)
        self._census_at += self._census
        if self._census_at >= self.cells:
            self._census_at = 0
        return counts * (self._weights(now) * (self.cells / len(tags)))

    def _weights(self, now: float) -> NDArray[np.float64]:
        """How much a wait counts, by its age."""
        self._counted_at.append(now)
        passed = now - self._counted_at[0]
        if len(self._counted_at) < _CENSUSES or passed <= 0:
            return np.ones(AGES)
        weights: NDArray[np.float64] = 0.5 ** (AGE_STARTS / passed)
        return weights


NO_RUN = -1
_END = -1
_RUNS_AT_ONCE = 1 << 14


class Runs:
    """Resident blocks of one prefix that were last used together, and are evicted tail first. Every
    resident slot is in exactly one run; a run without slots is free for the next.

    Twelve bytes a slot and 30 a run. Runs are numbered densely, so that all can be ranked at once.
    """

    def __init__(self) -> None:
        self.run_of = array("i")
        self.toward_head = array("i")
        self.toward_tail = array("i")
        self.tail = array("i")
        self.size = array("i")
        self.depth = array("i")
        """How long the prefix is, from its first block to the tail of the run."""
        self.fresh = array("i")
        """How many blocks of the run are new in its last request."""
        self.before = array("i")
        """The slot before the head of the run when it was opened; another may be there now."""
        self.used_at = array("d")
        self.kind = bytearray()
        self.queued = bytearray()
        self._free: list[int] = []
        self.resident = 0

    @property
    def nbytes(self) -> int:
        return len(self.run_of) * 12 + len(self.queued) * 30 + len(self._free) * 8

    def resize(self, slots: int) -> None:
        more = slots - len(self.run_of)
        if more > 0:
            for column in (self.run_of, self.toward_head, self.toward_tail):
                column.frombytes(b"\xff" * (more * column.itemsize))

    def _reserve(self, runs: int) -> None:
        """Have at least so many free runs."""
        missing = runs - len(self._free)
        if missing > 0:
            have = len(self.queued)
            more = max(64, min(have // 4, _RUNS_AT_ONCE), missing)
            for column in (self.tail, self.size, self.depth, self.fresh, self.before):
                column.frombytes(bytes(more * column.itemsize))
            self.queued.extend(bytes(more))
            self.used_at.frombytes(bytes(more * self.used_at.itemsize))
            self.kind.extend(bytes(more))
            self._free.extend(range(have + more - 1, have - 1, -1))

    def open(
        self,
        slots: Sequence[int],
        now: float,
        kind: int,
        depth: int,
        fresh: int = 0,
        before: int = _END,
    ) -> None:
        """A new run of slots that are in none, the head of the prefix first."""
        if not self._free:
            self._reserve(1)
        run = self._free.pop()
        run_of, toward_head, toward_tail = self.run_of, self.toward_head, self.toward_tail
        above = slots[0]
        run_of[above] = run
        toward_head[above] = _END
        for slot in slots[1:]:
            run_of[slot] = run
            toward_head[slot] = above
            toward_tail[above] = slot
            above = slot
        toward_tail[above] = _END
        count = len(slots)
        self.tail[run] = above
        self.size[run] = count
        self.depth[run] = depth
        self.fresh[run] = fresh
        self.before[run] = before
        self.used_at[run] = now
        self.kind[run] = kind
        self.queued[run] = 0
        self.resident += count

    def extend(self, run: int, slots: Sequence[int], now: float, kind: int, fresh: int) -> None:
        """Put slots that are in no run behind the tail of this one, which counts as used now."""
        run_of, toward_head, toward_tail = self.run_of, self.toward_head, self.toward_tail
        above = self.tail[run]
        for slot in slots:
            run_of[slot] = run
            toward_head[slot] = above
            toward_tail[above] = slot
            above = slot
        toward_tail[above] = _END
        self.tail[run] = above
        count = len(slots)
        self.size[run] += count
        self.depth[run] += count
        self.fresh[run] += fresh
        self.resident += count
        self.renew(run, now, kind)

    def renew(self, run: int, now: float, kind: int) -> None:
        """The blocks of a run are used now, and are of this kind."""
        self.queued[run] = 0
        self.used_at[run] = now
        self.kind[run] = kind

    def unlink(self, slots: Sequence[int]) -> None:
        """Take slots out of their runs; those in none are passed over."""
        run_of, toward_head, toward_tail = self.run_of, self.toward_head, self.toward_tail
        size, depth, tail = self.size, self.depth, self.tail
        unlinked = 0
        for slot in slots:
            run = run_of[slot]
            if run == NO_RUN:
                continue
            run_of[slot] = NO_RUN
            above, below = toward_head[slot], toward_tail[slot]
            if below == _END:
                tail[run] = above
                depth[run] -= 1
            else:
                toward_head[below] = above
            if above != _END:
                toward_tail[above] = below
            unlinked += 1
            left = size[run] - 1
            size[run] = left
            if not left:
                self.queued[run] = 0
                self._free.append(run)
        self.resident -= unlinked

    def cut_tails(self, runs: Iterable[int], count: int, kept: Container[int]) -> list[int]:
        """Take up to `count` slots that are not to be kept off these runs, tail first, one run
        after the other. It is `unlink` of what `from_tail` gives, in a third of the time."""
        run_of, toward_head, size = self.run_of, self.toward_head, self.size
        cut: list[int] = []
        append = cut.append
        for run in runs:
            first = len(cut)
            slot = self.tail[run]
            for _ in range(min(size[run], count - first)):
                if slot in kept:
                    break
                append(slot)
                run_of[slot] = NO_RUN
                slot = toward_head[slot]
            taken = len(cut) - first
            if taken:
                self._shorten(run, slot, taken)
            if slot != _END and len(cut) < count:  # the rest of it has to be picked out
                some = [each for each in self.from_tail(slot) if each not in kept]
                del some[count - len(cut) :]
                self.unlink(some)
                cut += some
            if len(cut) == count:
                break
        return cut

    def _shorten(self, run: int, tail: int, taken: int) -> None:
        """So many slots behind `tail` have left a run."""
        self.tail[run] = tail
        self.depth[run] -= taken
        self.size[run] -= taken
        self.resident -= taken
        if tail != _END:
            self.toward_tail[tail] = _END
        else:
            self.queued[run] = 0
            self._free.append(run)

    def from_tail(self, slot: int) -> Iterator[int]:
        """A slot and those before it in its run; the run must not change meanwhile."""
        toward_head = self.toward_head
        while slot != _END:
            yield slot
            slot = toward_head[slot]

    def open_many(
        self,
        slots: NDArray[np.int32],
        used_at: NDArray[np.float64],
        kind: int,
        longest: int,
    ) -> None:
        """New runs of many slots at once, the head of each prefix first: a run ends where the time
        changes, or when it is `longest` blocks long."""
        count = len(slots)
        changes = np.flatnonzero(used_at[1:] != used_at[:-1]) + 1
        begins = np.unique(np.concatenate([[0], changes, np.arange(0, count, longest)]))
        ends = np.append(begins[1:], count)
        heads = np.append(0, changes)
        depths = ends - heads[np.searchsorted(heads, begins, side="right") - 1]
        self._reserve(len(begins))
        numbers = np.array([self._free.pop() for _ in range(len(begins))], dtype=np.int32)
        lengths = (ends - begins).astype(np.int32)
        for column, value in (
            (self.tail, slots[ends - 1]),
            (self.size, lengths),
            (self.depth, depths),
            (self.fresh, lengths),
            (self.before, np.full(len(numbers), _END)),
        ):
            np.frombuffer(column, dtype=np.int32)[numbers] = value
        self.times()[numbers] = used_at[begins]
        self.kinds()[numbers] = kind
        np.frombuffer(self.queued, dtype=np.uint8)[numbers] = 0
        toward_head = np.frombuffer(self.toward_head, dtype=np.int32)
        toward_tail = np.frombuffer(self.toward_tail, dtype=np.int32)
        toward_head[slots[1:]] = slots[:-1]
        toward_tail[slots[:-1]] = slots[1:]
        toward_head[slots[begins]] = _END
        toward_tail[slots[ends - 1]] = _END
        np.frombuffer(self.run_of, dtype=np.int32)[slots] = np.repeat(numbers, lengths)
        self.resident += count

    def sizes(self) -> NDArray[np.int32]:
        """The number of slots of each run; drop it before anything changes."""
        return np.frombuffer(self.size, dtype=np.int32)

    def depths(self) -> NDArray[np.int32]:
        """How deep the tail of each run is; drop it before anything changes."""
        return np.frombuffer(self.depth, dtype=np.int32)

    def times(self) -> NDArray[np.float64]:
        """When each run was used last; drop it before anything changes."""
        return np.frombuffer(self.used_at, dtype=np.float64)

    def kinds(self) -> NDArray[np.uint8]:
        """The kind of each run; drop it before anything changes."""
        return np.frombuffer(self.kind, dtype=np.uint8)

    def unqueued(self, start: int, stop: int, count: int) -> NDArray[np.intp]:
        """The first so many numbers, from `start` to `stop`, of runs that hold slots and are not
        queued, ascending. No more of all runs is looked at than it takes."""
        sizes, queued = self.sizes(), np.frombuffer(self.queued, dtype=np.bool_)
        found = [np.zeros(0, np.intp)]
        for at in range(start, stop, _RUNS_AT_ONCE):
            if count <= 0:
                break
            some = slice(at, min(at + _RUNS_AT_ONCE, stop))
            numbers = (sizes[some].astype(np.bool_) > queued[some]).nonzero()[0][:count]
            found.append(numbers + at)
            count -= len(numbers)
        return np.concatenate(found)
