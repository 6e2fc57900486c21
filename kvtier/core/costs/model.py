"""What a load would cost and what it would save, from what links and engine did lately.

Pure bookkeeping: no I/O, no threads, a clock that is given. docs/how_it_works/costs.md tells why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.core.costs.cost_settings import CostSettings, Prior
from kvtier.core.costs.kept_rates import Rates
from kvtier.core.costs.link_rates import LinkCosts
from kvtier.core.costs.load_estimates import LoadEstimates
from kvtier.core.costs.load_runs import DEVICE, Offer, Run, in_memory, kinks
from kvtier.core.costs.prefill_rate import Prefill
from kvtier.core.costs.probes import Probes

_HEAD_TOKENS = 1024
_PUBLISHED_S = 1.0


class CostModel:
    """Predicts load and recompute, and decides how much of a hit is worth loading.

    For one thread (the engine's scheduler). `admit` takes a few microseconds.
    """

    def __init__(
        self,
        settings: CostSettings | None = None,
        priors: Mapping[str, Prior] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or CostSettings()
        self._clock = clock
        self._loads = LoadEstimates(priors or {}, self._settings.regain)
        self._link = self._loads.link
        self._device = self._loads.device
        self._links = self._loads.links
        self._prefill = Prefill()
        self._doubt = 1.0
        self._probes = Probes(self._loads, self._settings, self._recompute)
        self._waiting, self._crowd, self._ahead = 0, 1.0, 0.0
        self.latest, self._published = Rates(), 0.0
        """What the next run may begin with, for other threads: a second old at most."""

    def publish(self) -> None:
        """Let other threads see what was learned so far."""
        self.latest = Rates(self._loads.kept(), self._prefill.kept())

    def recall(self, rates: Rates) -> None:
        """Begin with what an earlier run has learned, before anything is observed."""
        self._loads.recall(rates.links, self._clock(), self._settings.probe_patience)
        if rates.prefill is not None:
            self._prefill.recall(rates.prefill)

    def limit(self, link: str, seconds: float) -> None:
        """No load over this link is to be begun that would take longer."""
        self._loads.limits[link] = min(seconds, self._loads.limits.get(link, seconds))

    def started(self, link: str, token: int, size: int) -> float:
        """A load of `size` bytes was queued; `token` is the caller's name for it, used once.
        Answers with the time at which it is expected to end."""
        return self._link(link).start(token, size, self._clock())

    def ended(
        self, link: str, token: int, complete: bool, seconds: float, size: int | None = None
    ) -> None:
        """It ended, after bytes had moved for `seconds` (the wait in the queue not counted): `size`
        of them, if these are others than were announced.

        A load that failed early teaches nothing about speed; one that failed late (a deadline)
        teaches that it would have taken at least so long.
        """
        announced = self._link(link).end(token)
        self.observe_load(link, announced if size is None else size, seconds, complete)

    def collected(self) -> None:
        """All loads that have ended by now were reported: what is still under way may be late.

        Between two such calls, an engine's step apart, loads end and nobody knows.
        """
        now = self._clock()
        for link in self._links.values():
            link.collected = now
        if now >= self._published + _PUBLISHED_S:
            self._published = now
            self.publish()

    def observe_load(self, link: str, size: int, seconds: float, complete: bool = True) -> None:
        """`size` bytes crossed a link in `seconds`, or have not by then if the load is not
        `complete`; for links whose loads are not announced."""
        state = self._link(link)
        if size > 0 and (complete or seconds > state.line.at(size)):
            state.observe(size, seconds, self._clock(), self._settings.probe_seconds)

    def observe_prefetch(self, link: str, size: int, seconds: float) -> None:
        """As `observe_load`, of what had a share of a link only: it is at least so fast."""
        line = self._link(link).line
        if not line.samples or seconds < line.at(size):
            self.observe_load(link, size, seconds)

    def observe_prefill(self, tokens: int, seconds: float, context: int = 0) -> None:
        """The engine computed `tokens` in `seconds`, with `context` tokens before them."""
        if tokens > 0 and seconds > 0:
            self._prefill.observe(tokens, seconds, context)

    def observe_waiting(self, requests: int) -> None:
        """So many requests wait for the engine's time behind whoever is asked about next."""
        self._waiting = requests

    def observe_memory(self, pinned: bool) -> None:
        """Whether the device reaches host memory directly now; else the link is another one."""
        self._device.pinned(pinned, self._clock())

    def observe_queue(self, under_way: float, queued: float) -> None:
        """How long the engine computes before whoever is asked about next: what its device is at,
        for which copies to it wait, too, and what it will be given besides."""
        self._ahead = under_way + queued
        self._device.held(self._clock() + under_way)

    def recompute_seconds(self, start: int, stop: int) -> float | None:
        """How long the engine would take to compute tokens `start:stop`; None while unknown."""
        return self._prefill.seconds(start, stop) if self._prefill.known else None

    def spared_seconds(self, start: int, stop: int) -> float:
        """How long all who wait for the engine are kept from it by computing tokens `start:stop`;
        0 while unknown."""
        seconds = self._prefill.seconds(start, stop)
        return seconds * self._spares((), seconds, self._clock()) if seconds else 0.0

    def load_seconds(self, link: str, size: int) -> float:
        """How long a load over one link would take if it were queued now."""
        fixed, each = self._link(link).terms(self._clock())
        return fixed + each * size

    def drain_seconds(self) -> float:
        """How long until the first of the busy links has nothing queued any more."""
        now = self._clock()
        links = self._links.items()
        busy = [link for name, link in links if link.in_flight and name != DEVICE]
        return min((link.terms(now)[0] for link in busy), default=0.0)

    def admit(self, runs: Sequence[Run], tokens_per_block: int, start: int = 0) -> int:
        """How many leading blocks of a hit to load: as many as make the request fastest, and those
        that its computing keeps waiting.

        `runs` are the hit's blocks in prefix order, the first of them at token `start`. Every run
        must be part of a load that starts if its blocks are counted in the answer.
        """
        blocks = sum(run.blocks for run in runs)
        if not blocks or not self._prefill.known:
            self._count(runs, blocks)
            return blocks
        now = self._clock()
        self._doubt = self._prefill.doubt(blocks * tokens_per_block)
        spared = self._recompute(start, start + blocks * tokens_per_block)
        self._crowd = self._spares(runs, spared, now)
        count = self._fastest(runs, tokens_per_block, start, blocks, now)
        count = max(count, self._sure_blocks(runs, tokens_per_block, start))
        self._count(runs, count)
        if count < blocks:
            self._prefill.tried((blocks - count) * tokens_per_block)
            count += self._probes.more_blocks(runs, count, tokens_per_block, start, now)
        return count

    def choose(self, offers: Sequence[Offer], start: int) -> int:
        """Which of these, in the order of their stops, is best for a request that is known up to
        token `start`; -1 if recomputing is. As `admit`, for hits that are no leading runs."""
        best = len(offers) - 1
        if best < 0:
            return -1
        if not self._prefill.known:
            self._book(offers, best)
            return best
        now = self._clock()
        self._doubt = self._prefill.doubt(offers[-1].stop - start)
        spared = self._recompute(start, offers[-1].stop)
        self._crowd = self._spares(offers[-1].loads, spared, now)
        gains = [
            self._worth(start, stop) - max(0.0, self._loads.slowest(loads, now)[0] - self._ahead)
            for stop, loads in offers
        ]
        sure = self._sure_offer(offers, start)
        best = max(range(max(sure, 0), len(offers)), key=gains.__getitem__)
        if gains[best] <= 0:
            best = sure
        self._book(offers, best)
        if best == len(offers) - 1:
            return best
        self._prefill.tried(offers[-1].stop - (offers[best].stop if best >= 0 else start))
        return self._probes.longer_offer(offers, best, start, now)

    @property
    def prefill_rate(self) -> float:
        """Tokens that the engine computes in a second at the head of a prompt; 0 while unknown."""
        seconds = self.recompute_seconds(0, _HEAD_TOKENS)
        return _HEAD_TOKENS / seconds if seconds else 0.0

    def stats(self) -> dict[str, LinkCosts]:
        """Each link's rates and decisions so far."""
        return {name: link.costs() for name, link in self._links.items()} | self._device.besides()

    def _recompute(self, start: int, stop: int) -> float:
        return self._doubt * self._prefill.seconds(start, stop)

    def _spares(self, loads: Sequence[Run], seconds: float, now: float) -> float:
        """How many requests are spared so many seconds if the engine need not compute for so long:
        the one asked about, those behind it, and those whose loads end meanwhile, in part."""
        if not all(self._link(run.link).line.samples for run in loads):
            return 1.0  # who knows what they would wait for instead
        crowd, most = 1.0 + self._waiting, self._settings.crowd_max
        for link in self._links.values():
            for flight in link.in_flight.values():
                if crowd >= most:
                    return most
                # What is late may be as late again: one that hangs ends nobody's wait.
                left = flight.since + flight.expected - now
                left = max(left - self._ahead, 0.0) if left > 0 else -left
                if left < seconds:
                    crowd += 1 - left / seconds
        return min(crowd, most)

    def _worth(self, start: int, stop: int) -> float:
        """What it is worth to all that these tokens need not be computed."""
        return self._recompute(start, stop) * self._crowd

    def _fastest(
        self, runs: Sequence[Run], per_block: int, start: int, end: int, now: float
    ) -> int:
        """The number of leading blocks for which load, then recompute of the rest, costs least.

        Links work side by side, and everything crosses the device link meanwhile, so a load takes
        as long as its slowest stream. That is linear but for kinks: only they need to be tried.
        """
        stop = start + end * per_block
        best, best_count = self._ahead + self._worth(start, stop), 0
        device_fixed, device_each = self._loads.terms(DEVICE, now)
        streams: dict[str, tuple[float, float]] = {}  # link -> (seconds so far, seconds a byte)
        device, done = device_fixed, 0
        for link, blocks, size in runs:
            if not blocks:
                continue
            own, each = streams.get(link) or self._loads.terms(link, now)
            own_block, device_block = each * size / blocks, device_each * size / blocks
            others = max(self._ahead, *(took for took, _ in streams.values()), 0.0)
            in_time = (self._loads.limits.get(link, math.inf) - own) / max(own_block, 1e-12)
            fitting = int(max(0, min(blocks, in_time)))
            beside = kinks(own, own_block, others, device, device_block, fitting)
            for count in (fitting, *beside):
                load = max(others, own + own_block * count, device + device_block * count)
                total = load + self._worth(start + (done + count) * per_block, stop)
                if total < best:
                    best, best_count = total, done + count
            if fitting < blocks:
                break
            done += blocks
            device += device_each * size
            streams[link] = own + each * size, each
        return best_count

    def _sure(self, size: int, start: int, stop: int) -> bool:
        """Whether so many bytes in host memory are moved several times as fast as computed: then,
        whatever is queued on either side, computing them wastes what all others wait for, too."""
        moving = self._device.line.at(size)
        return moving * self._settings.sure <= self._recompute(start, stop)

    def _sure_offer(self, offers: Sequence[Offer], start: int) -> int:
        """The longest hit of which all is so; -1 if there is none."""
        for at, (stop, loads) in reversed(list(enumerate(offers))):
            near = all(run.link == DEVICE for run in loads)
            if near and self._sure(sum(run.bytes for run in loads), start, stop):
                return at
        return -1

    def _sure_blocks(self, runs: Sequence[Run], per_block: int, start: int) -> int:
        """How many leading blocks are so."""
        blocks, size = in_memory(runs)
        return blocks if self._sure(size, start, start + blocks * per_block) else 0

    def _count(self, runs: Sequence[Run], count: int) -> None:
        """Book the decision; the link that ended the prefix is refusing from now on."""
        for run in runs:
            link = self._link(run.link)
            taken = min(run.blocks, max(count, 0))
            link.taken += taken
            link.refused += run.blocks - taken
            if taken == run.blocks:
                link.refusing = self._link(DEVICE).refusing = False
            elif count == 0:
                link.refusing = True
            count -= run.blocks

    def _book(self, offers: Sequence[Offer], best: int) -> None:
        """Book a choice; what the next longer hit would wait for is refusing from now on."""
        taken = {run.link: run.blocks for run in offers[best].loads} if best >= 0 else {}
        for run in offers[-1].loads:
            link, count = self._link(run.link), taken.get(run.link, 0)
            link.taken += count
            link.refused += max(0, run.blocks - count)
            if count >= run.blocks:
                link.refusing = self._link(DEVICE).refusing = False
        if best < len(offers) - 1:
            _, blocking = self._loads.slowest(offers[best + 1].loads, self._clock())
            if blocking not in taken:
                self._link(blocking).refusing = True
