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
        spared = self._recompute(at, at + per_block)
        whole = self._recompute(start, end)
        allowed = (whole * rules.probe_size - fixed) / block
        if block > spared and link.line.steady:
            allowed = min(allowed, (whole * rules.probe_loss - fixed) / (block - spared))
        # Large enough to tell a change of bandwidth from one of latency.
        telling = 2 * fixed / block + 1
        most = run.blocks - count
        blocks = int(min(most, max(allowed, telling), max((limit - fixed) / block, 1)))
        if fixed + block * most < min(self._recompute(at, at + most * per_block), limit):
            blocks = most  # it would win, but for what it has to win back: find out if it does
        loss = fixed + block * blocks - self._recompute(at, at + blocks * per_block)
        if self._too_dear(link, loss, whole, now):
            return 0
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
        whole = self._recompute(start, offers[-1].stop)
        allowed = whole * self._settings.probe_size - fixed
        bearable = whole * self._settings.probe_loss
        known = offers[best].stop if best >= 0 else start
        chosen, loss, telling = best, 0.0, 0.0
        for at in range(best + 1, len(offers)):
            size = sum(run.bytes for run in offers[at].loads if run.link == blocking)
            seconds = fixed + each * size
            lost = seconds - self._recompute(known, offers[at].stop)
            small = each * size <= allowed and (lost <= bearable or not link.line.steady)
            telling = telling or 2 * fixed + each * size
            fits = (lost < 0 or small or each * size <= telling) and seconds <= limit
            if fits or at == best + 1:
                chosen, loss = at, lost
        loads = offers[chosen].loads
        if self._too_dear(link, loss, whole, now):
            return best
        blocks = sum(run.blocks for run in loads if run.link == blocking)
        self._note(link, blocks, loss, now)
        return chosen

    def _too_dear(self, link: LinkRate, loss: float, whole: float, now: float) -> bool:
        """Whether a probe would slow its request, which takes so long to compute as a `whole`, more
        than it may, and can still wait for a longer one."""
        rules = self._settings
        bearable = loss <= whole * rules.probe_loss or not link.line.steady
        return not bearable and now < link.probed_at + rules.probe_patience

    def _note(self, link: LinkRate, blocks: int, loss: float, now: float) -> None:
        rules = self._settings
        pause = min(max(loss / rules.probe_share, rules.probe_seconds), rules.probe_seconds_max)
        link.probed_at, link.next_probe = now, now + pause
        link.probes += 1
        link.probed += blocks
