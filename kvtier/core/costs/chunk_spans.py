"""Which chunks of a prompt each cache group needs for a hit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from kvtier.core.chain.plan import COMING, NOWHERE
from kvtier.types import BlockKey


class Shape(NamedTuple):
    """How a cache group keeps a prompt."""

    tokens: int
    """Of one chunk."""
    window: int | None = None
    """How many chunks before its end a hit needs; None for all."""
    recurrent: bool = False
    """A chunk is a state after its last token, and of no use to a hit that ends within it."""


class Span(NamedTuple):
    """The chunks of a request in one cache group, from its first token on."""

    shape: Shape
    keys: Sequence[BlockKey]
    bytes: int
    """Of one chunk."""

    def needed(self, start: int, stop: int) -> range:
        """The chunks that have to be loaded for a hit on tokens `start:stop`."""
        tokens, window, _ = self.shape
        first, last = start // tokens, -(-stop // tokens)
        return range(first if window is None else max(first, last - window), last)


def asked(spans: Sequence[Span], start: int) -> list[BlockKey]:
    """All keys of a request from token `start` on, group by group."""
    return [key for span in spans for key in span.keys[start // span.shape.tokens :]]


def columns(spans: Sequence[Span], start: int, found: Sequence[int]) -> list[list[int]]:
    """What was found for `asked`, by group and chunk; nothing is known of earlier chunks."""
    places = iter(found)
    firsts = [start // span.shape.tokens for span in spans]
    return [
        [NOWHERE] * first + list(islice(places, max(0, len(span.keys) - first)))
        for span, first in zip(spans, firsts, strict=True)
    ]


def needed(
    spans: Sequence[Span], origins: Sequence[Sequence[int]], start: int, stop: int
) -> tuple[list[BlockKey], list[int]]:
    """The keys that a hit on tokens `start:stop` takes, and where they are."""
    keys: list[BlockKey] = []
    places: list[int] = []
    for span, column in zip(spans, origins, strict=True):
        if stop > start:
            chunks = span.needed(start, stop)
            keys += span.keys[chunks.start : chunks.stop]
            places += column[chunks.start : chunks.stop]
    return keys, places


def last_stop(spans: Sequence[Span], limit: int) -> int:
    """Where the longest hit ends that there could be."""
    step = max(span.shape.tokens for span in spans)
    recurrent = any(span.shape.recurrent for span in spans)
    return min(whole(spans), (limit - recurrent) // step * step)


def junction(
    spans: Sequence[Span], origins: Sequence[Sequence[int]], start: int, limit: int
) -> int:
    """Up to which token a prompt is known, though no hit can end there: all groups without a window
    have it, one with a window or a state does not. Prompts part there; 0 if they do not."""
    unbounded = [span.shape.window is None for span in spans]
    if all(unbounded) or not any(unbounded):
        return 0
    step = max(span.shape.tokens for span in spans)
    end = min(limit - 1, whole(spans))
    for span, column, each in zip(spans, origins, unbounded, strict=True):
        if each:
            first = start // span.shape.tokens
            known = sum(1 for _ in takewhile(lambda at: at != NOWHERE, column[first:]))
            end = min(end, (first + known) * span.shape.tokens)
    end = end // step * step
    _, places = needed(spans, origins, start, end)
    return end if NOWHERE in places else 0


def whole(spans: Sequence[Span]) -> int:
    """Where a prompt's last whole chunks end: its windows and states are kept there."""
    step = max(span.shape.tokens for span in spans)
    return min(len(span.keys) * span.shape.tokens for span in spans) // step * step


def windowed(spans: Sequence[Span]) -> list[Span]:
    """Those that keep less than the whole prompt."""
    return [span for span in spans if span.shape.window is not None]


def kept_within(spans: Sequence[Span], origins: Sequence[Sequence[int]], stop: int) -> int:
    """The last token up to `stop` at which these windows are kept, so that a hit could end there;
    0 if there is none."""
    step = max(span.shape.tokens for span in spans)
    for end in range(min(stop, whole(spans)) // step * step, 0, -step):
        _, places = needed(spans, origins, 0, end)
        if NOWHERE not in places and COMING not in places:
            return end
    return 0


def woven(spans: Sequence[Span], ends: Collection[int]) -> list[BlockKey]:
    """A prompt's keys as one prefix: all groups in turn, token by token, and of windows what hits
    take that end at one of `ends`.

    None of a prompt's groups is of use without the others: used and evicted as one prefix, tail
    first, they stay and go together.
    """
    grown: list[tuple[int, bool, BlockKey]] = []
    for span in spans:
        tokens, window, _ = span.shape
        chunks: Iterable[int] = range(len(span.keys))
        if window is not None:
            chunks = {at for end in ends for at in span.needed(0, end) if at < len(span.keys)}
        grown += [((at + 1) * tokens, window is not None, span.keys[at]) for at in chunks]
    grown.sort()
    return [key for _, _, key in grown]
