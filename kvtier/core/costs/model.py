"""What a load would cost and what it would save, from what links and engine did lately.

Pure bookkeeping: no I/O, no threads, a clock that is given. docs/how_it_works/costs.md tells why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.core.costs.link_rates import DeviceRate, LinkCosts, LinkRate
from kvtier.core.costs.load_runs import DEVICE, Offer, Run, in_memory, kinks
from kvtier.core.costs.prefill_rate import Prefill

_HEAD_TOKENS = 1024


class Prior(msgspec.Struct, frozen=True):
    """What is assumed of a link until it has been used: better rather too good than too bad."""

    latency: float = 0.001
    bandwidth: float = 2e9


DEVICE_PRIOR = Prior(latency=20e-6, bandwidth=25e9)
PAGEABLE_BANDWIDTH = 8e9
"""What is assumed of memory that is not pinned."""


class CostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How bold the model is; the defaults suit every medium that was measured."""

    regain: float = 0.8
    """A link that was refused is taken again when it costs at most this share of recomputing."""
    probe_seconds: float = 5.0
    """The shortest time between two probes of a refused link."""
    probe_seconds_max: float = 300.0
    """The longest: the floor of probes by which a link that recovered is found out."""
    probe_share: float = 0.02
    """At most this share of time is spent on probes that are expected to lose."""
    probe_size: float = 0.25
    """A probe may take this share of recomputing, and more only where it would not tell enough."""
    sure: float = 2.0
    """Blocks in host memory that are moved so many times as fast as computed are always loaded."""
    crowd_max: float = 8.0
    """A load that spares those who wait behind may take at most so many times as long as
    recomputing."""


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
        self._priors = {DEVICE: DEVICE_PRIOR} | dict(priors or {})
        self._clock = clock
        prior = self._priors[DEVICE]
        self._device = DeviceRate(prior.latency, prior.bandwidth, PAGEABLE_BANDWIDTH)
        self._links: dict[str, LinkRate] = {DEVICE: self._device}
        self._prefill = Prefill()
        self._doubt = 1.0
        self._limits: dict[str, float] = {}
        self._waiting, self._crowd, self._ahead = 0, 1.0, 0.0

    def limit(self, link: str, seconds: float) -> None:
        """No load over this link is to be begun that would take longer."""
        self._limits[link] = min(seconds, self._limits.get(link, seconds))

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

    def observe_load(self, link: str, size: int, seconds: float, complete: bool = True) -> None:
        """`size` bytes crossed a link in `seconds`, or have not by then if the load is not
        `complete`; for links whose loads are not announced."""
        state = self._link(link)
        if size > 0 and (complete or seconds > state.line.at(size)):
            state.observe(size, seconds, self._clock(), self._settings.probe_seconds)

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
            count += self._probe(runs, count, tokens_per_block, start, now)
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
            self._worth(start, stop) - max(0.0, self._loading(loads, now)[0] - self._ahead)
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
        return self._probe_offer(offers, best, start, now)

    @property
    def prefill_rate(self) -> float:
        """Tokens that the engine computes in a second at the head of a prompt; 0 while unknown."""
        seconds = self.recompute_seconds(0, _HEAD_TOKENS)
        return _HEAD_TOKENS / seconds if seconds else 0.0

    def stats(self) -> dict[str, LinkCosts]:
        """Each link's rates and decisions so far."""
        return {name: link.costs() for name, link in self._links.items()} | self._device.besides()

    def _link(self, name: str) -> LinkRate:
        link = self._links.get(name)
        if link is None:
            prior = self._priors.get(name) or Prior()
            link = self._links[name] = LinkRate(prior.latency, prior.bandwidth)
        return link

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

    def _terms(self, name: str, now: float) -> tuple[float, float]:
        """A link's terms, worse than they are while it has to win back what it lost."""
        link = self._link(name)
        fixed, each = link.terms(now)
        if link.refusing:
            return fixed / self._settings.regain, each / self._settings.regain
        return fixed, each

    def _fastest(
        self, runs: Sequence[Run], per_block: int, start: int, end: int, now: float
    ) -> int:
        """The number of leading blocks for which load, then recompute of the rest, costs least.

        Links work side by side, and everything crosses the device link meanwhile, so a load takes
        as long as its slowest stream. That is linear but for kinks: only they need to be tried.
        """
        stop = start + end * per_block
        best, best_count = self._ahead + self._worth(start, stop), 0
        device_fixed, device_each = self._terms(DEVICE, now)
        streams: dict[str, tuple[float, float]] = {}  # link -> (seconds so far, seconds a byte)
        device, done = device_fixed, 0
        for link, blocks, size in runs:
            if not blocks:
                continue
            own, each = streams.get(link) or self._terms(link, now)
            own_block, device_block = each * size / blocks, device_each * size / blocks
            others = max(self._ahead, *(took for took, _ in streams.values()), 0.0)
            in_time = (self._limits.get(link, math.inf) - own) / max(own_block, 1e-12)
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

    def _loading(self, loads: Sequence[Run], now: float) -> tuple[float, str]:
        """How long these loads take, and the link that they wait for in the end."""
        fixed, each = self._terms(DEVICE, now)
        slowest = (fixed + each * sum(run.bytes for run in loads), DEVICE)
        for link, _, size in [run for run in loads if run.link != DEVICE]:
            fixed, each = self._terms(link, now)
            seconds = fixed + each * size
            late = seconds > self._limits.get(link, math.inf)
            slowest = max(slowest, (math.inf if late else seconds, link))
        return slowest

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
            _, blocking = self._loading(offers[best + 1].loads, self._clock())
            if blocking not in taken:
                self._link(blocking).refusing = True

    def _probe_offer(self, offers: Sequence[Offer], best: int, start: int, now: float) -> int:
        """A longer hit than the best, taken only to learn; mostly the best."""
        _, blocking = self._loading(offers[best + 1].loads, now)
        link = self._link(blocking)
        if now < link.next_probe:
            return best
        fixed, each = link.terms(now)
        limit = self._limits.get(blocking, math.inf)
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
        loss = self._loading(loads, now)[0] - self._recompute(known, stop)
        blocks = sum(run.blocks for run in loads if run.link == blocking)
        self._note_probe(link, blocks, loss, now)
        return chosen

    def _note_probe(self, link: LinkRate, blocks: int, loss: float, now: float) -> None:
        rules = self._settings
        pause = min(max(loss / rules.probe_share, rules.probe_seconds), rules.probe_seconds_max)
        link.next_probe = now + pause
        link.probes += 1
        link.probed += blocks

    def _probe(
        self, runs: Sequence[Run], count: int, per_block: int, start: int, now: float
    ) -> int:
        """How many blocks to load beyond the fastest prefix, only to learn; mostly 0."""
        end = start + sum(run.blocks for run in runs) * per_block
        at = start + count * per_block
        for run in runs:
            if count < run.blocks:
                break
            count -= run.blocks
        link, rules = self._link(run.link), self._settings
        if now < link.next_probe:
            return 0
        fixed, each = link.terms(now)
        block = max(each * run.bytes / run.blocks, 1e-12)
        limit = self._limits.get(run.link, math.inf)
        allowed = (self._recompute(start, end) * rules.probe_size - fixed) / block
        # Large enough to tell a change of bandwidth from one of latency.
        telling = 2 * fixed / block + 1
        most = run.blocks - count
        blocks = int(min(most, max(allowed, telling), max((limit - fixed) / block, 1)))
        if fixed + block * most < min(self._recompute(at, at + most * per_block), limit):
            blocks = most  # it would win, but for what it has to win back: find out if it does
        loss = fixed + block * blocks - self._recompute(at, at + blocks * per_block)
        self._note_probe(link, blocks, loss, now)
        return blocks
