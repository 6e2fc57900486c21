"""Runs: resident blocks of one prefix that were last used together, and so leave tail first."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

NO_RUN = -1
_END = -1
_RUNS_AT_ONCE = 1 << 14


class Runs:
    """Every resident slot is in exactly one run; a run without slots is free for the next.

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
