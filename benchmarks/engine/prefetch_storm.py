"""Honest requests beside hostile ones, each of which names another cold prefix and is aborted.

A part of `make bench-prefetch`. The hostile requests wait behind the honest ones: what they cost is
their place in the queue, and what is prefetched for them. The contestants take turns in one engine:
no hostile requests, and storms with prefetching and without. First with honest prompts that are to
be computed. Then with such that lie on the same disk, where vLLM begins to serve hostile requests,
too, while honest ones load: only with a storm without prefetching can that be compared.
"""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import mean, median
from typing import Any, NamedTuple

from engines.engine import Engine

from benchmarks.engine.served import Served
from benchmarks.report import Report

HONEST, ANSWER_TOKENS = 16, 16
SHORT_TOKENS = 192
"""Less than a block: no tier ever has anything of such a prompt."""
HOSTILE = 64
EVERY = tuple(map(int, os.environ.get("STORM_EVERY", "4 1").split()))
"""A hostile request comes with every so many steps of the honest ones: storms of several speeds."""
LIFE_STEPS = 8
"""A hostile request is aborted so many steps after it came."""
AT_MOST = 1.03
"""How long honest requests may take beside those that nobody disturbs."""
_WARM_ROUNDS = 1


class Storm(NamedTuple):
    """A contestant: how often hostile requests come (0: never), and what is done for them."""

    every: int = 0
    prefetching: bool = True

    def __str__(self) -> str:
        if not self.every:
            return "no storm"
        return f"every {self.every}" + ("" if self.prefetching else ", no prefetching")


_QUIET = Storm()
_Figures = dict[Storm, list[tuple[float, float]]]


def compare_storm(
    served: Served, report: Report, engine: Engine, tokens: int, rounds: int, running: int
) -> None:
    """Rounds of both kinds of honest prompts; hostile prompts have so many `tokens`."""
    hostile = [served.prompt(tokens) for _ in range(HOSTILE)]
    known = [served.prompt(tokens) for _ in range(HONEST)]
    engine.burst(prompts=hostile + known)
    engine.settle()
    for case, stored, speeds in (("computed", None, EVERY), ("on the disk", known, EVERY[:1])):
        storms = [Storm(every, on) for every in speeds for on in (True, False)]
        order = [_QUIET, *storms] if stored is None else storms
        found: _Figures = defaultdict(list)
        rates = defaultdict[int, list[float]](list)
        for turn in range(_WARM_ROUNDS + rounds):
            honest = stored or [served.prompt(SHORT_TOKENS) for _ in range(HONEST)]
            at = turn % len(order)
            answers = []
            for contestant in order[at:] + order[:at]:
                told = _besiege(engine, contestant, honest, hostile, running + 2)
                answers.append(told["answers"])
                if turn >= _WARM_ROUNDS:
                    found[contestant].append((mean(told["seconds"]), told["own"]))
                    rates[contestant.every].append(told["hostile"] / told["whole"])
            assert all(each == answers[0] for each in answers), "answers differ"
        _report(report, f"storm, honest prompts {case}", found, rates)
    counted = engine.facts()["chain"]["prefetch"]
    for name in ("arrived", "used", "wasted", "cancelled"):
        report.add(f"storm: blocks {name}", counted[name][1], "")


def _besiege(
    engine: Engine,
    storm: Storm,
    honest: list[list[int]],
    hostile: list[list[int]],
    at_once: int,
) -> dict[str, Any]:
    engine.settle()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    engine.prefetch(on=storm.prefetching)
    told: dict[str, Any] = engine.besieged(
        honest=honest,
        hostile=hostile if storm.every else [],
        tokens=ANSWER_TOKENS,
        life=LIFE_STEPS,
        priority=1,
        at_once=at_once,
        every=storm.every,
    )
    return told


def _report(report: Report, what: str, found: _Figures, rates: dict[int, list[float]]) -> None:
    for contestant, figures in found.items():
        middle = median(seconds for seconds, _ in figures)
        report.add(f"{what}: {contestant}, mean time of a request", middle, "s")
    for every in filter(None, rates):
        report.add(f"{what}: every {every}: hostile requests", median(rates[every]), "/s")
    for ours in filter(lambda each: each.every and each.prefetching, found):
        for other in (ours._replace(prefetching=False), _QUIET):
            for at, name in enumerate(("time of a request", "processor's time of the engine")):
                if other in found:
                    pairs = zip(found[ours], found[other], strict=True)
                    ratio = median(mine[at] / theirs[at] for mine, theirs in pairs)
                    report.at_most(f"{what}: {name}, {ours} / {other}", ratio, "x", AT_MOST)
