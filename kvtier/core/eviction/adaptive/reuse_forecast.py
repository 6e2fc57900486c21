"""How soon a block is used again, learned while serving, and what a slot is worth by it.

Every sampled block, whether it still is resident or not, is watched from one use to the next. What
is counted is, for each kind of block and each age, how many were used again at that age and how
many were still waiting. That gives the chance of a next use at each age (a hazard curve) and from
it the rate: the most hits per second that a slot can earn by waiting, over every time that one may
plan to wait. (A block that nobody has come back to for ten minutes earns little; one of a kind that
returns after a minute or two earns much in its first minute although nothing happens in it.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

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
_SURE = 100.0
"""So many uses at an age are as good a reason for a sharp curve as for a smooth one."""


def _positions(ages: Floats) -> Floats:
    scaled: Floats = np.maximum(ages, _YOUNGEST)
    scaled /= _YOUNGEST
    np.log2(scaled, out=scaled)
    scaled *= _PER_OCTAVE
    return scaled


def age_steps(ages: Floats) -> NDArray[np.intp]:
    """The steps of the logarithmic scale that ages in seconds fall into."""
    return np.minimum(_positions(ages).astype(np.intp), AGES - 1)


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
        self._kinds = bytearray()
        self._ages = array("d")

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + 9 * len(self._ages)

    def note(self, kind: int, age: float) -> None:
        """One more."""
        self._kinds.append(kind)
        self._ages.append(age)

    def count(self) -> Floats:
        """By kind and age, all that was noted."""
        if self._ages:
            cells = age_steps(np.frombuffer(self._ages))
            cells += np.frombuffer(self._kinds, dtype=np.uint8).astype(np.intp) * AGES
            self.total += np.bincount(cells, minlength=self.total.size).reshape(self.total.shape)
            self._kinds = bytearray()
            self._ages = array("d")
        return self.total


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
        self._kinds = kinds
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

    def refresh(self, waiting: Floats) -> None:
        """Learn from what was counted; `waiting` counts the watched blocks, by kind and age."""
        reused, lost = self.reused.count(), self.lost.count()
        left = lost + waiting
        at_risk = np.cumsum((reused + left)[:, ::-1], axis=1)[:, ::-1] - 0.5 * left
        hazards = self._hazards(*_smoothed(reused, at_risk))
        # All pooled kinds that nobody has seen yet have one curve, and so have the others.
        curve = np.where(at_risk[:, 0] > 0, np.arange(2, self._kinds + 2), self._unseen)
        _, first, which = np.unique(curve, return_index=True, return_inverse=True)
        self.rates[: self._kinds] = self._best_rates(hazards[first])[which]
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
