"""How soon a block is used again, learned while serving, and what a slot is worth by it.

Every sampled block, whether it still is resident or not, is watched from one use to the next. What
is counted is, for each kind of block and each age, how many were used again at that age and how
many were still waiting. That gives the chance of a next use at each age (a hazard curve) and from
it the rate: the most hits per second that a slot can earn by waiting, over every time that one may
plan to wait. (A block that nobody has come back to for ten minutes earns little; one of a kind that
returns after a minute or two earns much in its first minute although nothing happens in it.)
"""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AGES = 60
_STEPS_PER_OCTAVE = 3
_YOUNGEST_S = 0.125
_PRIOR_HAZARD = 0.05
"""The same chance in every step of a logarithmic scale: then the rate falls as 1 / age, and blocks
are ordered as LRU does. What is learned moves away from that."""
_PRIOR_WEIGHT = 8.0
_POOL_WEIGHT = 100.0
_LEVEL_WEIGHT = 10.0
"""So many observations a kind needs before its own curve, and its own level, count more than those
of all kinds together."""
_SMOOTHINGS = 2
_AGES_AT_ONCE = 10
"""So that what is computed at a time stays in the processor's cache."""


def age_step(age: float) -> int:
    """The step of the logarithmic scale that an age in seconds falls into."""
    if age <= _YOUNGEST_S:
        return 0
    return min(int(math.log2(age / _YOUNGEST_S) * _STEPS_PER_OCTAVE), AGES - 1)


def age_positions(ages: Floats) -> Floats:
    """Where ages in seconds lie on the scale, between the steps."""
    octaves: Floats = np.log2(np.maximum(ages, _YOUNGEST_S) / _YOUNGEST_S)
    return np.minimum(octaves * _STEPS_PER_OCTAVE, AGES - 1.001)


def _smooth(counts: Floats) -> Floats:
    for _ in range(_SMOOTHINGS):
        padded = np.hstack([counts[:, :1], counts, counts[:, -1:]])
        counts = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return counts


class Forecast:
    """Counts of what happened at each age, and the rates that follow, for `kinds` kinds of block.

    The first `pooled` kinds lean on each other where they have seen little, the others stand alone.
    A kind in `heads` is never worth less than the one in `tails` that follows it in a prefix.
    """

    def __init__(
        self, kinds: int, pooled: int, heads: slice = slice(0), tails: slice = slice(0)
    ) -> None:
        self._kinds = kinds
        self._pooled = pooled
        self._heads, self._tails = heads, tails
        self.memory = 1 << 14
        """When so many uses were counted, all counts are halved: the old count less and less."""
        self._reused = array("d", bytes(8 * kinds * AGES))
        self._lost = array("d", bytes(8 * kinds * AGES))
        edges = _YOUNGEST_S * 2 ** (np.arange(AGES + 1) / _STEPS_PER_OCTAVE)
        edges[0] = 0.0
        self._width: Floats = np.diff(edges)
        self.rates: Floats = np.zeros((kinds + 1, AGES))
        """By kind and age; the last row is of what is worth nothing."""
        self.refresh(np.zeros((kinds, AGES)))

    @property
    def nbytes(self) -> int:
        return 3 * 8 * self._kinds * AGES

    def reused(self, kind: int, age: float) -> None:
        """A watched block was used again."""
        self._reused[kind * AGES + age_step(age)] += 1.0

    def lost(self, kind: int, age: float) -> None:
        """A watched block was given up, at this age not used again yet."""
        self._lost[kind * AGES + age_step(age)] += 1.0

    def refresh(self, waiting: Floats) -> None:
        """Learn from what was counted; `waiting` counts the watched blocks, by kind and age."""
        shape = (self._kinds, AGES)
        reused = np.frombuffer(self._reused).reshape(shape)
        lost = np.frombuffer(self._lost).reshape(shape)
        left = lost + waiting
        at_risk = np.cumsum((reused + left)[:, ::-1], axis=1)[:, ::-1] - 0.5 * left
        self.rates[: self._kinds] = self._best_rates(
            self._hazards(_smooth(reused), _smooth(at_risk))
        )
        self.rates[self._heads] = np.maximum(self.rates[self._heads], self.rates[self._tails])
        if reused.sum() + lost.sum() > self.memory:
            reused *= 0.5
            lost *= 0.5

    def _hazards(self, reused: Floats, at_risk: Floats) -> Floats:
        alone = slice(self._pooled, None)
        prior = _PRIOR_WEIGHT * _PRIOR_HAZARD
        together = (reused[: self._pooled].sum(0) + prior) / (
            at_risk[: self._pooled].sum(0) + _PRIOR_WEIGHT
        )
        expected = (at_risk * together).sum(axis=1, keepdims=True)
        level = (reused.sum(axis=1, keepdims=True) + _LEVEL_WEIGHT) / (expected + _LEVEL_WEIGHT)
        leaned = np.minimum(together * level, 0.9)
        hazard = (reused + _POOL_WEIGHT * leaned) / (at_risk + _POOL_WEIGHT)
        hazard[alone] = (reused[alone] + prior) / (at_risk[alone] + _PRIOR_WEIGHT)
        result: Floats = np.minimum(hazard, 0.95)
        return result

    def _best_rates(self, hazard: Floats) -> Floats:
        """For each kind and age, the best over all ages to wait for of hits / time spent."""
        surviving = np.cumprod(1 - hazard, axis=1) / (1 - hazard)
        gained = np.cumsum(surviving * hazard, axis=1)
        spent = np.cumsum(surviving * (1 - hazard / 2) * self._width, axis=1)
        nothing = np.zeros((len(hazard), 1))
        gained_before = np.hstack([nothing, gained[:, :-1]])
        spent_before = np.hstack([nothing, spent[:, :-1]])
        rates = np.empty_like(hazard)
        for first in range(0, AGES, _AGES_AT_ONCE):
            ages = slice(first, first + _AGES_AT_ONCE)
            # By kind, age, and age to wait for; where that has passed, no hits are left to gain.
            hits = gained[:, None, first:] - gained_before[:, ages, None]
            time = spent[:, None, first:] - spent_before[:, ages, None]
            hits /= np.maximum(time, 1e-300, out=time)
            hits.max(axis=2, out=rates[:, ages])
        return rates

    def rate(self, kinds: NDArray[np.uint8], ages: Floats) -> Floats:
        """Hits per second that slots of these kinds and ages are worth."""
        position = age_positions(ages)
        step = position.astype(np.intp)
        part = position - step
        step += kinds.astype(np.intp) * AGES
        rates = self.rates.ravel()
        found: Floats = (1 - part) * rates.take(step) + part * rates.take(step + 1)
        return found
