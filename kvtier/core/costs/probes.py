"""Loads that are expected to lose, made now and then to learn whether a refused link is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvtier.core.costs.cost_settings import CostSettings
from kvtier.core.costs.link_rates import LinkRate
from kvtier.core.costs.load_estimates import LoadEstimates
from kvtier.core.costs.load_runs import Offer, Run


class Probes:
    """Decides when a refused link is tried, and with how much. `recompute` says how long the engine
    takes to compute the tokens between two places of a prompt."""

    def __init__(
        self,
        loads: LoadEstimates,
        settings: CostSettings,
        recompute: Callable[[int, int], float],
    ) -> None:
        self._loads = loads
        self._settings = settings
        self._recompute = recompute

    def more_blocks(
        self, runs: Sequence[Run], count: int, per_block: int, start: int, now: float
    ) -> int:
        """How many blocks to load beyond the fastest prefix, only to learn; mostly 0."""
        end = start + sum(run.blocks for run in runs) * per_block
        at = start + count * per_block
        for run in runs:
            if count < run.blocks:
                break
            count -= run.blocks
        link, rules = self._loads.link(run.link), self._settings
        if now < link.next_probe:
            return 0
        fixed, each = link.terms(now)
        block = max(each * run.bytes / run.blocks, 1e-12)
        limit = self._loads.limits.get(run.link, math.inf)
        allowed = (self._recompute(start, end) * rules.probe_size - fixed) / block
        # Large enough to tell a change of bandwidth from one of latency.
        telling = 2 * fixed / block + 1
        most = run.blocks - count
        blocks = int(min(most, max(allowed, telling), max((limit - fixed) / block, 1)))
        if fixed + block * most < min(self._recompute(at, at + most * per_block), limit):
            blocks = most  # it would win, but for what it has to win back: find out if it does
        loss = fixed + block * blocks - self._recompute(at, at + blocks * per_block)
        self._note(link, blocks, loss, now)
        return blocks

    def longer_offer(self, offers: Sequence[Offer], best: int, start: int, now: float) -> int:
        """A longer hit than the best, taken only to learn; mostly the best."""
        _, blocking = self._loads.slowest(offers[best + 1].loads, now)
        link = self._loads.link(blocking)
        if now < link.next_probe:
            return best
        fixed, each = link.terms(now)
        limit = self._loads.limits.get(blocking, math.inf)
        allowed = self._recompute(start, offers[-1].stop) * self._settings.probe_size - fixed
        most = max(allowed, 2 * fixed)
        chosen = best + 1
        known = offers[best].stop if best >= 0 else start
        for at in range(chosen + 1, len(offers)):
            size = sum(run.bytes for run in offers[at].loads if run.link == blocking)
            seconds = fixed + each * size
            wins = seconds < self._recompute(known, offers[at].stop)
            if (wins or each * size <= most) and seconds <= limit:
                chosen = at
        stop, loads = offers[chosen]
        loss = self._loads.slowest(loads, now)[0] - self._recompute(known, stop)
        blocks = sum(run.blocks for run in loads if run.link == blocking)
        self._note(link, blocks, loss, now)
        return chosen

    def _note(self, link: LinkRate, blocks: int, loss: float, now: float) -> None:
        rules = self._settings
        pause = min(max(loss / rules.probe_share, rules.probe_seconds), rules.probe_seconds_max)
        link.next_probe = now + pause
        link.probes += 1
        link.probed += blocks
