"""Runs stages in their order, each within its time; one that fails is a row with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu_engine.results import Results, Row


class Deadline:
    """When something has to be over."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds until then, or so many if that is less; raises TimeoutError if it is over."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimeoutError("no time left")
        return min(left, at_most)

    def within(self, seconds: float) -> Deadline:
        """One that is over then, or with this one."""
        return Deadline(max(0.0, min(seconds, self._end - self._clock())), self._clock)


class Stage(NamedTuple):
    """Something that gives rows."""

    name: str
    least: float
    """It is not begun with fewer seconds left."""
    most: float
    run: Callable[[Deadline], None]


def run_stages(stages: list[Stage], results: Results, deadline: Deadline) -> bool:
    """Run those that are not done yet; whether all are now."""
    for stage in stages:
        if results.done(stage.name):
            print(f"== {stage.name}: done before", flush=True)
            continue
        results.begin(stage.name)
        began = time.monotonic()
        try:
            left = deadline.left()
            if left < stage.least:
                raise TimeoutError(f"{left:.0f} s left, and it takes {stage.least:.0f}: run again")
            stage.run(deadline.within(stage.most))
        except Exception as error:  # noqa: BLE001 - the others are worth as much
            reason = str(error) or type(error).__name__
            results.add(Row(stage=stage.name, what="the rest of it", failed=reason[:500]))
            how = "FAILED"
        else:
            results.end(stage.name)
            how = "whole"
        print(f"== {stage.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
    return all(results.done(stage.name) for stage in stages)
