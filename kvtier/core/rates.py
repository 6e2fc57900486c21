"""Estimates that follow a rate which changes: robust against one outlier, quick after two."""

from __future__ import annotations


class Line:
    """y = base + slope * x, from samples that fade; an outlier alone does not move it.

    A decayed least-squares fit, in relative terms, gives the shape. The median of the last three
    samples against that shape gives the scale: one wild sample changes nothing, a second one like
    it is believed in full. Ridge terms decide what samples of one size leave open.
    """

    _DECAY = 0.9
    _WILD = 4.0
    _RECENT = 3

    def __init__(self, *, ridge_base: float = 0.0, ridge_slope: float = 0.0) -> None:
        self._ridge_base = 1 + ridge_base
        self._ridge_slope = 1 + ridge_slope
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._recent: list[tuple[float, float]] = []
        self.base = 0.0
        self.slope = 0.0
        self.samples = 0

    def at(self, x: float) -> float:
        """The y expected at x."""
        return self.base + self.slope * x

    def suppose(self, x: float, y: float) -> None:
        """Shape the line before the first sample."""
        self._add(x, y, 1 / (y * y))
        self.base, self.slope = self._solve()

    def observe(self, x: float, y: float, weight: float = 1.0) -> None:
        """Learn from one sample; both are above zero."""
        expected = self.at(x) or y
        tame = min(max(y, expected / self._WILD), expected * self._WILD)
        self._add(x, tame, weight / (tame * expected))
        self.samples += 1
        self._recent = [*self._recent[1 - self._RECENT :], (x, y)]
        base, slope = self._solve()
        ratios = sorted(sample / max(base + slope * at, 1e-12) for at, sample in self._recent)
        scale = ratios[len(ratios) // 2]
        self.base, self.slope = base * scale, slope * scale

    def _add(self, x: float, y: float, weight: float) -> None:
        keep = self._DECAY
        self._w = self._w * keep + weight
        self._x = self._x * keep + weight * x
        self._y = self._y * keep + weight * y
        self._xx = self._xx * keep + weight * x * x
        self._xy = self._xy * keep + weight * x * y

    def _solve(self) -> tuple[float, float]:
        """Base and slope, neither below zero."""
        w, xx = self._w * self._ridge_base, self._xx * self._ridge_slope
        determinant = w * xx - self._x * self._x
        if determinant <= 0:
            return self._y / self._w, 0.0
        base = (self._y * xx - self._x * self._xy) / determinant
        slope = (w * self._xy - self._x * self._y) / determinant
        if base < 0:
            return 0.0, self._xy / self._xx
        if slope < 0:
            return self._y / self._w, 0.0
        return base, slope


class Drain:
    """Bytes a second that a link moves in all, however many loads share it."""

    _KEEP = 0.9

    def __init__(self) -> None:
        self._bytes = self._busy = self._until = 0.0
        self.rate = 0.0

    def observe(self, size: int, seconds: float, now: float) -> None:
        """A load of `size` bytes that took `seconds` ended now."""
        busy = min(seconds, now - self._until)
        self._until = now
        self._bytes = self._bytes * self._KEEP + size
        self._busy = self._busy * self._KEEP + busy
        self.rate = self._bytes / self._busy if self._busy > 0 else 0.0
