"""The cost model: whether loading a block costs less than computing it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.cost.rates import (
    DEVICE,
    PAGEABLE,
    SECONDS_MAX,
    SIZES,
    DeviceRate,
    Line,
    LinkCosts,
    LinkRate,
    LoadRun,
    Offer,
    Rates,
    SavedLink,
    SavedPrefill,
    kinks,
)


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
    probe_loss: float = 0.08
    """A probe of a link that is as it was expected to be may make a request this share slower than
    recomputing. If it would tell nothing then, it waits for a longer hit, so many seconds after the
    last probe, or after the start."""
    probe_wait_limit: float = 60.0
    sure: float = 2.0
    """Blocks in host memory that are moved so many times as fast as computed are always loaded."""
    waiting_requests_max: float = 8.0
    """At most so many waiting requests count as spared by a load: it may take at most so many times
    as long as recomputing."""


_GIB = 1 << 30


class LoadEstimates:
    """How long loads over each link would take, by its rates and by what is queued there."""

    def __init__(self, priors: Mapping[str, Prior], regain: float) -> None:
        self._priors = {DEVICE: DEVICE_PRIOR} | dict(priors)
        self._regain = regain
        prior = self._priors[DEVICE]
        self.device = DeviceRate(prior.latency, prior.bandwidth, PAGEABLE_BANDWIDTH)
        self.links: dict[str, LinkRate] = {DEVICE: self.device}
        self.limits: dict[str, float] = {}
        """How long a load over a link may take at most."""

    def link(self, name: str) -> LinkRate:
        """What is known of a link; assumed, as long as it has not been used."""
        link = self.links.get(name)
        if link is None:
            prior = self._priors.get(name) or Prior()
            link = self.links[name] = LinkRate(prior.latency, prior.bandwidth)
        return link

    def saved(self) -> dict[str, SavedLink]:
        """What the next run is told: of those links of which something is known."""
        lines = {name: link.line for name, link in self.links.items()}
        lines |= {DEVICE: self.device.lines[True], PAGEABLE: self.device.lines[False]}
        return {name: _saved(line) for name, line in lines.items() if line.samples}

    def recall(self, saved: Mapping[str, SavedLink], now: float, unprobed: float) -> None:
        """Begin with what an earlier run knew; no link is probed for so many seconds."""
        for name, each in saved.items():
            link = self.link(DEVICE if name == PAGEABLE else name)
            line = self.device.lines[False] if name == PAGEABLE else link.line
            line.recall(each.latency, each.seconds_per_gib / _GIB, SIZES)
            link.probed_at, link.next_probe = now, now + unprobed

    def terms(self, name: str, now: float) -> tuple[float, float]:
        """A link's terms, worse than they are while it has to win back what it lost."""
        link = self.link(name)
        fixed, each = link.terms(now)
        if link.refusing:
            return fixed / self._regain, each / self._regain
        return fixed, each

    def slowest(self, loads: Sequence[LoadRun], now: float) -> tuple[float, str]:
        """How long these loads take, and the link that they wait for in the end."""
        fixed, each = self.terms(DEVICE, now)
        slowest = (fixed + each * sum(run.bytes for run in loads), DEVICE)
        for link, _, size in [run for run in loads if run.link != DEVICE]:
            fixed, each = self.terms(link, now)
            seconds = fixed + each * size
            late = seconds > self.limits.get(link, math.inf)
            slowest = max(slowest, (math.inf if late else seconds, link))
        return slowest


def _saved(line: Line) -> SavedLink:
    return SavedLink(min(line.base, SECONDS_MAX), min(line.slope * _GIB, SECONDS_MAX))


_TELLING_TOKENS = 64
"""A step of fewer tokens tells nothing of prompts."""
_SURE_TOKENS = 512
"""A step of so many is mostly computing."""
_SHORT = 4
"""A step is not believed that is so many times shorter than the longest one, and than the longest
hit asked about."""
_DOUBT = 0.25
"""The share of what they take that is believed where nothing but short steps has been seen."""
_ASKED_KEPT = 0.98
"""By how much the longest hit asked about fades with each."""
_RECALLED_AT = (512, 8192)
"""The places in a prompt that stand for what an earlier run knew, and count as much as a step of
so few tokens."""
_RECALLED_TOKENS = 64.0


class Prefill:
    """Seconds that the engine computes a token, growing with the tokens before it.

    Only computing corrects a wrong estimate. One that makes recomputing look expensive would be
    kept for ever, because what is loaded is not computed: so `doubt` favours recomputing.
    """

    def __init__(self) -> None:
        self._line = Line(ridge_slope=0.01)
        self._longest = 0
        """The longest step that the line rests on."""
        self._asked = 0.0
        """The longest hit asked about of late."""
        self._tried = 0
        """The longest hit that was to be recomputed since the line is what it is."""

    @property
    def known(self) -> bool:
        """Whether a step has been seen yet."""
        return bool(self._line.samples)

    def saved(self) -> SavedPrefill | None:
        """What the next run is told; None while nothing is known."""
        each, more = 1e3 * self._line.base, 1e6 * self._line.slope
        if not self.known or each <= 0:
            return None
        return SavedPrefill(min(each, SECONDS_MAX), min(more, SECONDS_MAX), max(1, self._longest))

    def recall(self, saved: SavedPrefill) -> None:
        """Begin with what an earlier run knew: as one short step, so that the first ones of this
        run count for more."""
        each, more = saved.seconds_per_ktoken / 1e3, saved.more_per_ktoken / 1e6
        self._line.recall(each, more, _RECALLED_AT, _RECALLED_TOKENS)
        self._longest = saved.longest

    def seconds(self, start: int, stop: int) -> float:
        """How long tokens `start:stop` take to compute."""
        return (stop - start) * self._line.at((start + stop) / 2)

    def observe(self, tokens: int, seconds: float, context: int) -> None:
        """A step computed so many tokens after so many others."""
        middle, each = context + tokens / 2, seconds / tokens
        if not self.known or each < self._line.at(middle) / 2:
            # So fast is no matter of overhead: what longer steps told before was wrong.
            self._longest, self._tried = tokens, 0
        elif tokens < max(
            min(self._longest, self._asked or self._longest) / _SHORT, _TELLING_TOKENS
        ):
            return
        self._longest = max(self._longest, tokens)
        self._line.observe(middle, each, weight=tokens)

    def doubt(self, tokens: int) -> float:
        """The share of `seconds` that a hit of so many tokens is held to take: less than all of it
        while only shorter steps have been seen, until such a hit was recomputed."""
        self._asked = max(self._asked * _ASKED_KEPT, tokens)
        unsure = max(self._longest, self._tried) < min(tokens, _SURE_TOKENS)
        return _DOUBT if unsure else 1.0

    def tried(self, tokens: int) -> None:
        """So many tokens of a hit are recomputed, which will show how long it takes."""
        self._tried = max(self._tried, tokens)


class Probes:
    """Decides when a refused link is tried, and with how much: loads that are expected to lose, and
    show whether the link has become faster. `recompute` estimates the seconds that the engine takes
    to compute the tokens between two places of a prompt."""

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
        self, runs: Sequence[LoadRun], count: int, per_block: int, start: int, now: float
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
        return not bearable and now < link.probed_at + rules.probe_wait_limit

    def _note(self, link: LinkRate, blocks: int, loss: float, now: float) -> None:
        rules = self._settings
        pause = min(max(loss / rules.probe_share, rules.probe_seconds), rules.probe_seconds_max)
        link.probed_at, link.next_probe = now, now + pause
        link.probes += 1
        link.probed += blocks


_HEAD_TOKENS = 1024
_PUBLISHED_S = 1.0


class CostModel:
    """Predicts load and recompute, and decides how much of a hit is worth loading.

    Pure bookkeeping on a given clock, without I/O or threads, for the engine's scheduler alone;
    `admit` takes a few microseconds. docs/how_it_works/costs.md explains the decisions.
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
        self._queued_requests, self._waiting_requests, self._ahead = 0, 1.0, 0.0
        self.latest, self._published = Rates(), 0.0
        """What the next run may begin with, for other threads: a second old at most."""

    def publish(self) -> None:
        """Let other threads see what was learned so far."""
        self.latest = Rates(self._loads.saved(), self._prefill.saved())

    def recall(self, rates: Rates) -> None:
        """Begin with what an earlier run has learned, before anything is observed."""
        self._loads.recall(rates.links, self._clock(), self._settings.probe_wait_limit)
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
        self._queued_requests = requests

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

    def admit(self, runs: Sequence[LoadRun], tokens_per_block: int, start: int = 0) -> int:
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
        self._waiting_requests = self._spares(runs, spared, now)
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
        self._waiting_requests = self._spares(offers[-1].loads, spared, now)
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

    def weigh(self, loads: Sequence[LoadRun], start: int, stop: int) -> tuple[float, float]:
        """How long these loads are expected to take, and computing tokens `start:stop` instead, as
        the last decision took them."""
        return self._loads.slowest(loads, self._clock())[0], self._recompute(start, stop)

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

    def _spares(self, loads: Sequence[LoadRun], seconds: float, now: float) -> float:
        """How many requests are spared so many seconds if the engine need not compute for so long:
        the one asked about, those behind it, and those whose loads end meanwhile, in part."""
        if not all(self._link(run.link).line.samples for run in loads):
            return 1.0  # nobody knows what they would wait for instead
        waiting, most = 1.0 + self._queued_requests, self._settings.waiting_requests_max
        for link in self._links.values():
            for flight in link.in_flight.values():
                if waiting >= most:
                    return most
                # What is late may be as late again: one that hangs ends nobody's wait.
                left = flight.since + flight.expected - now
                left = max(left - self._ahead, 0.0) if left > 0 else -left
                if left < seconds:
                    waiting += 1 - left / seconds
        return min(waiting, most)

    def _worth(self, start: int, stop: int) -> float:
        """What it is worth to all that these tokens need not be computed."""
        return self._recompute(start, stop) * self._waiting_requests

    def _fastest(
        self, runs: Sequence[LoadRun], per_block: int, start: int, end: int, now: float
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

    def _sure_blocks(self, runs: Sequence[LoadRun], per_block: int, start: int) -> int:
        """How many leading blocks are so."""
        blocks = size = 0
        for run in runs:
            if run.link != DEVICE:
                break
            blocks, size = blocks + run.blocks, size + run.bytes
        if not blocks:
            return 0
        return blocks if self._sure(size, start, start + blocks * per_block) else 0

    def _count(self, runs: Sequence[LoadRun], count: int) -> None:
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
