"""How far a request's hit may reach, what each reach takes, and which of them is worth it.

A group with a window needs only the last chunks before the end of the hit, a recurrent state only
the very last, and a hit ends where every group has what it needs. So a longer hit is not a shorter
one and something more, and each is an offer of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvtier.core.chain.plan import HOST, JOINING
from kvtier.core.costs.chunk_spans import Span, last_stop
from kvtier.core.costs.load_runs import DEVICE, Offer, Run
from kvtier.types import BlockKey

OFFERS_MAX = 32
"""How finely the cost model looks at a long prompt."""


class Room(NamedTuple):
    """What host memory and the mover can take in."""

    slots: int
    promised: Container[BlockKey]
    """Keys whose slots are taken off `slots` already."""
    slotless: Container[int]
    """Tiers whose blocks do not come through host memory."""
    queues: Mapping[int, int]
    """How many more blocks of each lower tier may be under way."""

    def takes(self, key: BlockKey, origin: int) -> bool:
        """Whether a block needs one more slot, be it the one that it lies in."""
        return origin >= HOST and origin not in self.slotless and key not in self.promised


def stops(
    spans: Sequence[Span],
    origins: Sequence[Sequence[int]],
    start: int,
    limit: int,
    room: Room,
) -> tuple[list[int], bool]:
    """Where a hit that begins at `start` may end: at `limit` tokens at most, with all that it needs
    at hand, and with room for it. And whether with more room it could reach further."""
    step = max(span.shape.tokens for span in spans)
    end = last_stop(spans, limit)
    missing = [_sums(at < HOST and at != JOINING for at in column) for column in origins]
    taking = [
        _sums(map(room.takes, span.keys, column))
        for span, column in zip(spans, origins, strict=True)
    ]
    queued = [
        (most, [_sums(takes) for takes in _from(tier, spans, origins, room)])
        for tier, most in room.queues.items()
        if any(tier in column for column in origins)
    ]
    found: list[int] = []
    for stop in range(start // step * step + step, end + 1, step):
        ranges = [span.needed(start, stop) for span in spans]
        if _count(missing, ranges) == 0:
            crowded = any(_count(sums, ranges) > most for most, sums in queued)
            if crowded or _count(taking, ranges) > room.slots:
                return found, True
            found.append(stop)
    return found, False


def _from(
    tier: int, spans: Sequence[Span], origins: Sequence[Sequence[int]], room: Room
) -> Iterable[list[bool]]:
    """Group by group, which blocks would have to be moved in from a tier."""
    for span, column in zip(spans, origins, strict=True):
        yield [
            at == tier and room.takes(key, at) for key, at in zip(span.keys, column, strict=True)
        ]


def thin(values: list[int]) -> list[int]:
    """At most `OFFERS_MAX` of them, evenly spread, the last among them."""
    if len(values) <= OFFERS_MAX:
        return values
    return [values[(at + 1) * len(values) // OFFERS_MAX - 1] for at in range(OFFERS_MAX)]


def offers(
    spans: Sequence[Span],
    places: Sequence[Sequence[int]],
    names: Sequence[str],
    start: int,
    found: Sequence[int],
) -> list[Offer]:
    """What a hit takes that ends at each of these stops, link by link; `names` has each tier's."""
    by_link = [_by_link(column, names) for column in places]
    made = []
    for stop in found:
        blocks: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for span, column in zip(spans, by_link, strict=True):
            chunks = span.needed(start, stop)
            for link, sums in column.items():
                count = sums[chunks.stop] - sums[chunks.start]
                if count:
                    blocks[link] = blocks.get(link, 0) + count
                    sizes[link] = sizes.get(link, 0) + count * span.bytes
        made.append(Offer(stop, [Run(link, blocks[link], sizes[link]) for link in blocks]))
    return made


def _by_link(column: Sequence[int], names: Sequence[str]) -> Mapping[str, list[int]]:
    """For every link, how many of the first so many chunks would cross it."""
    links = {origin: names[origin] if origin > HOST else DEVICE for origin in set(column)}
    return {
        link: _sums(links[at] == link for at in column)
        for link in dict.fromkeys(links[at] for at in links if at >= HOST)
    }


def _sums(values: Iterable[bool]) -> list[int]:
    return list(accumulate(values, initial=0))


def _count(sums: Sequence[list[int]], ranges: Sequence[range]) -> int:
    return sum(
        each[where.stop] - each[where.start] for each, where in zip(sums, ranges, strict=True)
    )
