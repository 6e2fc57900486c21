"""What a chain counts of its loads, and what it tells of itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from kvtier.chain.ledger import SettledMove
from kvtier.chain.plan import JOINING
from kvtier.interfaces.mover import MoverStats, TransferResult
from kvtier.interfaces.write_budget import WriteStats
from kvtier.types import BlockKey, Namespace, Outcome, TierStats

SAMPLES_KEPT = 4096


def name_links(media: Sequence[str]) -> list[str]:
    """What the cost model calls the way up from each tier: its medium, with a number if that is not
    the first of its kind below host memory, because one folder is not as fast as the next."""
    counts = [media[1:at].count(medium) for at, medium in enumerate(media)]
    return [
        f"{name} {count + 1}" if count else name for name, count in zip(media, counts, strict=True)
    ]


def direct(link: str) -> str:
    """The link by which workers read a tier's files themselves."""
    return f"{link} direct"


class Sample(msgspec.Struct, frozen=True):
    """One transfer that ended, for a histogram."""

    source: str
    target: str
    seconds: float


class Moved(msgspec.Struct):
    """What transfers over one way have moved, and how long they were at it, all together."""

    bytes: int = 0
    seconds: float = 0.0


class LinkStats(msgspec.Struct):
    """Counters and gauges of the way into one tier, in blocks."""

    target: str
    offered: int = 0
    admitted: int = 0
    written: int = 0
    bytes_written: int = 0
    waiting: int = 0
    in_flight: int = 0
    behind: int = 0
    """Blocks above that outlived an earlier process, and that this tier may lack: they are looked
    at, and written, in the background."""
    drops: dict[str, int] = {}
    """Not written, by reason: "full" (too many waiting), "gone" (evicted first), "down" (the tier
    is failing), "refused" (by the mover), "budget" (others are worth more of what may be
    written)."""
    failures: dict[str, int] = {}
    """Blocks whose transfer failed, by outcome."""


class PrefetchStats(msgspec.Struct):
    """Counters of what was brought into host memory ahead of time; blocks, by the tier below that
    they came from."""

    arrived: list[int]
    """While their request waited."""
    used: list[int]
    """The part of these that a load took."""
    wasted: list[int]
    """The part that nobody waits for any more, and nobody has used."""
    cancelled: list[int]
    """Begun, and given up before they had come."""
    warmed: list[int]
    """After the start, before anybody asked."""
    saved_seconds: float = 0.0
    """By how much loads were shorter, all together, as far as known."""
    blocks: int = 0
    """A gauge: how many may be held now until they are used."""

    @classmethod
    def of(cls, tiers: int) -> PrefetchStats:
        """All at nothing."""
        one, two, three, four, five = ([0] * tiers for _ in range(5))
        return cls(one, two, three, four, five)


class ChainStats(msgspec.Struct):
    """What a chain knows of itself; lists have one entry a tier, in their order."""

    tiers: list[TierStats]
    links: list[LinkStats]
    mover: MoverStats
    hits: list[int]
    """Blocks that loads found in each tier."""
    hit_bytes: list[int]
    misses: list[int]
    """Blocks that requests asked for and a tier did not hold, nor any above it; once a request."""
    failures: list[dict[str, int]]
    """Blocks that could not be loaded from each tier, by outcome."""
    down: list[bool]
    """Whether each tier is left alone, because it failed again and again, or is unwell."""
    prefetch: PrefetchStats
    reads: list[Moved] = []
    """From each tier into host memory."""
    writes: list[Moved] = []
    """Into each tier."""
    budgets: list[WriteStats | None] = []
    """Of each tier what may be written to it, and was; None of one without a budget."""


class ChainCounters:
    """Counters of a chain's loads, by tier, and samples of all its transfers."""

    def __init__(self, media: Sequence[str], namespace: Namespace) -> None:
        self.media = media
        self.moved = name_links(media)
        """The links from each tier to host memory."""
        self.links = self.moved
        """Those on which its blocks come to the device: files may be read there."""
        self._namespace = namespace
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self.hits = [0] * len(media)
        self.hit_bytes = [0] * len(media)
        self.misses = [0] * len(media)
        self.failures: list[dict[str, int]] = [{} for _ in media]
        self.reads, self.writes = [Moved() for _ in media], [Moved() for _ in media]

    def sizes(self, keys: Sequence[BlockKey]) -> list[int]:
        """The payload of each key."""
        sizes = self._namespace.group_bytes
        if len(sizes) == 1:
            return [sizes[0]] * len(keys)
        return [self._namespace.payload_of(key) for key in keys]

    def looked_up(self, origins: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """A request asks for blocks; a tier is asked for those that none above it holds. One that
        was asked about `before` counts only for what is missed beyond that. Answers with the most
        that each tier has missed, to be given as `before` the next time."""
        missing = len(origins) - origins.count(JOINING)
        most = list(before) or [0] * len(self.misses)
        for tier, known in enumerate(most):
            missing -= origins.count(tier)
            most[tier] = max(known, missing)
            self.misses[tier] += most[tier] - known
        return most

    def found(self, tier: int, keys: Sequence[BlockKey]) -> int:
        """A load takes these from a tier; answers with their bytes."""
        size = sum(self.sizes(keys))
        self.hits[tier] += len(keys)
        self.hit_bytes[tier] += size
        return size

    def failed(self, tier: int, outcomes: Iterable[Outcome]) -> None:
        """Blocks could not be loaded from a tier."""
        failures = self.failures[tier]
        for outcome in outcomes:
            failures[outcome.value] = failures.get(outcome.value, 0) + 1

    def ended(self, settled: SettledMove, result: TransferResult) -> None:
        """A transfer has ended, be it good or bad."""
        transfer = settled.move.transfer
        source, target = self.media[transfer.source], self.media[transfer.target]
        self._samples.append(Sample(source, target, result.seconds))
        upward = transfer.target < transfer.source
        moved = self.reads[transfer.source] if upward else self.writes[transfer.target]
        moved.bytes += sum(self.sizes(settled.committed))
        moved.seconds += result.busy_seconds

    def take_samples(self) -> list[Sample]:
        """Transfers that ended since the last call; the most recent if they were many."""
        samples = list(self._samples)
        self._samples.clear()
        return samples
