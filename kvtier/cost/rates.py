"""Measured rates of links, and their form in a file."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvtier.errors import UNREADABLE

DEVICE = "device"
"""The link that every loaded byte crosses: host memory to the engine's own."""
PAGEABLE = "device pageable"
"""The same while host memory is not pinned."""


class LoadRun(NamedTuple):
    """Consecutive blocks of a prefix that would be loaded over one link.

    `link` is the medium of the tier that holds them; blocks that lie in host memory already name
    `DEVICE`, because that is all they have to cross.
    """

    link: str
    blocks: int
    bytes: int


class Offer(NamedTuple):
    """One way to serve a request: load this, one run a link, and compute what is after `stop`."""

    stop: int
    loads: list[LoadRun]


def kinks(
    own: float, own_block: float, others: float, device: float, device_block: float, blocks: int
) -> list[int]:
    """The block counts beside which another stream becomes the slowest: the run's own (seconds so
    far, and for each block), the other links', or the device's."""
    crossings = []
    if own_block > 0:
        crossings.append((others - own) / own_block)
    if device_block > 0:
        crossings.append((others - device) / device_block)
    if own_block != device_block:
        crossings.append((device - own) / (own_block - device_block))
    beside = [int(at) + side for at in crossings if 0 < at < blocks for side in (0, 1)]
    return [count for count in beside if 0 < count < blocks]


GRACE_S = 0.1
"""Word of a load's end takes a moment to arrive."""
_LEAST_S = 1e-9
SIZES = (1 << 12, 1 << 26)
"""The loads that stand for what is assumed of a link, or was known of it before."""


class Line:
    """y = base + slope * x, from samples that fade; an outlier alone does not move it.

    A decayed least-squares fit in relative terms. A sample far from the line counts as if it were
    less far, and is set aside: if the next one is far off on the same side, the world has changed,
    and both count for more than all that was before. Ridge terms decide what samples of one size
    leave open.
    """

    _KEEP = 0.9
    _KEEP_ON_CHANGE = 0.05
    _WILD = 2.0
    _STEADY = 8

    def __init__(self, *, ridge_base: float = 0.0, ridge_slope: float = 0.0) -> None:
        self._ridge_base = 1 + ridge_base
        self._ridge_slope = 1 + ridge_slope
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._aside: tuple[float, float, float] | None = None
        self._aside_above = False
        self._expected = 0
        """How many samples in a row were no surprise."""
        self.base = 0.0
        self.slope = 0.0
        self.samples = 0

    def at(self, x: float) -> float:
        """The y expected at x."""
        return self.base + self.slope * x

    @property
    def steady(self) -> bool:
        """Whether nothing surprising was seen of late, nor when an earlier run ended."""
        return self._expected >= self._STEADY

    def suppose(self, x: float, y: float) -> None:
        """Shape the line before the first sample."""
        self._add(x, y, 1.0, y)
        self._solve()

    def recall(self, base: float, slope: float, xs: Sequence[float], weight: float = 1.0) -> None:
        """Begin with the line of an earlier run, which counts as one sample: at these x, so much
        each. It may be wrong by now, so two new samples far from it replace it."""
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        if base + slope * min(xs) < _LEAST_S:
            base = _LEAST_S
        for x in xs:
            y = base + slope * x
            self._add(x, y, weight, y)
        self.base, self.slope, self.samples = base, slope, 1
        self._expected = self._STEADY

    def observe(self, x: float, y: float, weight: float = 1.0) -> None:
        """Learn from one sample; both are above zero."""
        self.samples += 1
        expected = self.at(x) or y
        aside, above = self._aside, y > expected
        self._aside = None
        self._expected += 1
        if expected / self._WILD <= y <= expected * self._WILD:
            self._add(x, y, weight, expected)
            self._solve()
            return
        self._expected = 0
        if self.samples == 1:
            self._rescale(y / expected)
            self._add(x, y, weight, y)
        elif aside is None or self._aside_above != above:
            self._aside, self._aside_above = (x, y, weight), above
            tame = expected * (self._WILD if above else 1 / self._WILD)
            self._add(x, tame, weight, expected)
        else:
            scale = math.sqrt(y / expected * aside[1] / self.at(aside[0]))
            self._rescale(scale)
            self._add(*aside, aside[1])
            self._add(x, y, weight, y)
        self._solve()

    def _rescale(self, scale: float) -> None:
        """Keep the shape of what was learned, but little of its weight, at a new scale."""
        shrink = self._KEEP_ON_CHANGE / scale
        self._w *= shrink / scale
        self._x *= shrink / scale
        self._y *= shrink
        self._xx *= shrink / scale
        self._xy *= shrink

    def _add(self, x: float, y: float, weight: float, expected: float) -> None:
        keep, weight = self._KEEP, weight / (expected * expected)
        self._w = self._w * keep + weight
        self._x = self._x * keep + weight * x
        self._y = self._y * keep + weight * y
        self._xx = self._xx * keep + weight * x * x
        self._xy = self._xy * keep + weight * x * y

    def _solve(self) -> None:
        """Base and slope, neither below zero."""
        w, xx = self._w * self._ridge_base, self._xx * self._ridge_slope
        determinant = w * xx - self._x * self._x
        self.base, self.slope = self._y / self._w, 0.0
        if determinant <= 0:
            return
        base = (self._y * xx - self._x * self._xy) / determinant
        slope = (w * self._xy - self._x * self._y) / determinant
        if base < 0:
            self.base, self.slope = 0.0, self._xy / self._xx
        elif slope >= 0:
            self.base, self.slope = base, slope


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


class LinkCosts(msgspec.Struct):
    """What is known of a link, and what was decided about it; blocks, but for `probes`."""

    latency: float
    bandwidth: float
    refusing: bool
    samples: int = 0
    taken: int = 0
    refused: int = 0
    probes: int = 0
    probed: int = 0


class InFlight(NamedTuple):
    """A load under way."""

    bytes: int
    since: float
    expected: float


def _supposed(latency: float, bandwidth: float) -> Line:
    line = Line(ridge_base=0.01)
    for size in SIZES:
        line.suppose(size, latency + size / bandwidth)
    return line


class LinkRate:
    """One link: its line (seconds by bytes), what is under way on it, and what was decided."""

    _OVERDUE = 2.0
    _ABANDONED = 300.0
    """No load lives so long: whoever started it will not report its end."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.line = _supposed(latency, bandwidth)
        self.in_flight: dict[int, InFlight] = {}
        self.queued = 0
        self.collected = 0.0
        """When it was last asked which loads have ended: what is in flight had not by then."""
        self.drain = Drain()
        self.refusing = False
        self.next_probe = 0.0
        self.probed_at = -math.inf
        """When it was last tried, or recalled: a trial that costs much comes long after that."""
        self.taken = self.refused = self.probes = self.probed = 0

    def costs(self) -> LinkCosts:
        """What is known of it, for people."""
        line = self.line
        return LinkCosts(
            latency=line.base,
            bandwidth=1 / line.slope if line.slope > 0 else 0.0,
            refusing=self.refusing,
            samples=line.samples,
            taken=self.taken,
            refused=self.refused,
            probes=self.probes,
            probed=self.probed,
        )

    def terms(self, now: float) -> tuple[float, float]:
        """Seconds before the first byte of a new load, and seconds a byte."""
        line = self.line
        if not self.in_flight:
            return line.base, line.slope
        wait = self.queued * min(1 / (self.drain.rate or 1e-9), line.slope)
        factor = self._overdue(now)
        return (line.base + wait) * factor, line.slope * factor

    def _overdue(self, now: float) -> float:
        """How many times slower than expected the oldest load is for certain, if it is late."""
        oldest = self._oldest(now)
        if oldest is None:
            return 1.0
        age = self.collected - oldest.since
        if age <= oldest.expected * self._OVERDUE + GRACE_S:
            return 1.0
        return age / oldest.expected

    def _oldest(self, now: float) -> InFlight | None:
        """The load that is under way for longest, unless that is for too long: then it goes."""
        token, oldest = next(iter(self.in_flight.items()))
        if now - oldest.since <= self._ABANDONED:
            return oldest
        self.end(token)
        return None

    def start(self, token: int, size: int, now: float) -> float:
        """A load of so many bytes was queued; when it is expected to end."""
        fixed, each = self.terms(now)
        expected = max(fixed + each * size, 1e-6)
        self.in_flight[token] = InFlight(size, now, expected)
        self.queued += size
        return now + expected

    def end(self, token: int) -> int:
        """Forget a load in flight; its size, 0 if it is not known."""
        flight = self.in_flight.pop(token, None)
        if flight is None:
            return 0
        self.queued -= flight.bytes
        return flight.bytes

    def observe(self, size: int, seconds: float, now: float, probe_seconds: float) -> None:
        """So many bytes have crossed it."""
        surprise = seconds < 0.5 * self.line.at(size)
        self.line.observe(size, max(seconds, _LEAST_S))
        self.drain.observe(size, seconds, now)
        # A good surprise on a refused link is worth asking about again at once.
        self.next_probe = now if surprise else max(self.next_probe, now + probe_seconds)
        if surprise:
            self.probed_at = -math.inf


class DeviceRate(LinkRate):
    """The device link. Word of a load's end comes with the output of the engine's steps, long after
    it, so time alone tells how much is still queued. Memory that is not pinned yet is a link of its
    own: it is slower, and says nothing of how fast the other one will be."""

    _SETTLES_S = 1.0
    """Loads that end so soon after memory was pinned began before that."""

    def __init__(self, latency: float, bandwidth: float, pageable: float) -> None:
        super().__init__(latency, bandwidth)
        self.lines = {True: self.line, False: _supposed(latency, pageable)}
        """Of pinned memory, and of memory that is not."""
        self._pinned_at = -math.inf
        self._owed = self._since = 0.0
        """So many bytes were still to be moved then, which may be yet to come."""

    def pinned(self, pinned: bool, now: float) -> None:
        """Whether copies go through pinned memory now."""
        if pinned and self.line is not self.lines[True]:
            self._pinned_at = now
        self.line = self.lines[pinned]

    def besides(self) -> dict[str, LinkCosts]:
        """What is known of memory that is not pinned, if any was used."""
        line = self.lines[False]
        if not line.samples:
            return {}
        bandwidth = 1 / line.slope if line.slope > 0 else 0.0
        return {PAGEABLE: LinkCosts(line.base, bandwidth, False, line.samples)}

    def held(self, until: float) -> None:
        """No copy begins before: the device has to end what it computes."""
        if until > self._since:
            self._owed, self._since = self._left(until), until

    def _left(self, now: float) -> float:
        """What is still to be moved then, if nothing is added; `now` is not before `_since`."""
        return max(0.0, self._owed - (now - self._since) / max(self.line.slope, 1e-15))

    def terms(self, now: float) -> tuple[float, float]:
        begins = max(now, self._since)
        queued = 0.0
        if self.in_flight and self._oldest(now):
            queued = self._left(begins)
        line = self.line
        return line.base + begins - now + queued * line.slope, line.slope

    def start(self, token: int, size: int, now: float) -> float:
        due = super().start(token, size, now)
        begins = max(now, self._since)
        self._owed, self._since = self._left(begins) + size, begins
        return due

    def end(self, token: int) -> int:
        size = super().end(token)
        if not self.in_flight:
            self._owed = 0.0
        return size

    def observe(self, size: int, seconds: float, now: float, probe_seconds: float) -> None:
        if now >= self._pinned_at + self._SETTLES_S:
            super().observe(size, seconds, now, probe_seconds)


VERSION: Literal[1] = 1
BYTES_MAX = 64 << 10
"""A larger file is none of ours."""
LINKS_MAX = 32
SECONDS_MAX = 3600.0

Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
LinkName = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,80}$(?!\n)")]


class Owner(msgspec.Struct, frozen=True):
    """Whose rates these are: they hold for this machine, device, model and stack."""

    machine: Text
    device: Text
    model: Text
    stack: Text


class SavedLink(msgspec.Struct, frozen=True):
    """What a load over a link takes."""

    latency: Seconds
    seconds_per_gib: Seconds


class SavedPrefill(msgspec.Struct, frozen=True):
    """What computing a prompt takes."""

    seconds_per_ktoken: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
    """At the head of a prompt."""
    more_per_ktoken: Seconds
    """How much longer that takes behind so many tokens more."""
    longest: Tokens
    """The longest step that this rests on."""


class Rates(msgspec.Struct, frozen=True):
    """What one cost model tells the next."""

    links: Annotated[dict[LinkName, SavedLink], msgspec.Meta(max_length=LINKS_MAX)] = {}
    prefill: SavedPrefill | None = None


class SavedRates(msgspec.Struct, frozen=True):
    """The file in which one engine leaves its rates to the next.

    Anybody may have written it: every number has a range, and what is out of it is not taken.
    """

    version: Literal[1]
    owner: Owner
    saved: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """When it was written, in seconds of the epoch."""
    rates: Rates


def encode(owner: Owner, rates: Rates) -> bytes:
    """What is to be written, now."""
    saved = SavedRates(VERSION, owner, time.time(), rates)
    return msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"


def decode(text: bytes) -> SavedRates:
    """Read what `encode` wrote; raises ValueError on anything else."""
    if len(text) > BYTES_MAX:
        raise ValueError(f"more than {BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(text, type=SavedRates)
    except UNREADABLE as error:
        raise ValueError(f"not what kvtier writes: {error}") from None
