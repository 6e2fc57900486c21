"""A part of a trace that stands for the whole: some of its conversations, all requests of them.

Blocks are shared along prefixes, so requests cannot be picked one by one. What begins with the
same blocks stays together, except that what very many requests begin with (everyone's system
prompt) joins nothing. A tier of a fraction of the blocks then does with the sample about what the
whole tier does with the whole trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from kvtier.eviction.traces import Request

_COMMON_SHARE = 100
"""A block that more than one request in so many asks for joins no requests together."""


def sample(requests: Sequence[Request], share: float) -> list[Request]:
    """About this share of the requests, in their order: every time the same ones."""
    talk_of = _conversations(requests)
    length: Counter[int] = Counter()
    for talk, request in zip(talk_of, requests, strict=True):
        length[talk] += len(request.blocks)
    # Evenly out of the short and of the long ones, each in the order in which they began.
    by_length = sorted(length, key=lambda talk: length[talk].bit_length())
    kept = set(by_length[-1:]) if share * len(by_length) < 1 else set()  # never nothing at all
    owed = 0.5
    for talk in by_length:
        owed += share
        if owed >= 1:
            owed -= 1
            kept.add(talk)
    return [request for talk, request in zip(talk_of, requests, strict=True) if talk in kept]


def _conversations(requests: Sequence[Request]) -> list[int]:
    """For each request a number that all requests of its conversation have."""
    uses = Counter(chain.from_iterable(request.blocks for request in requests))
    common = max(1, len(requests) // _COMMON_SHARE)
    return [
        next((block for block in blocks if uses[block] <= common), blocks[-1] if blocks else -1)
        for _, blocks in requests
    ]
