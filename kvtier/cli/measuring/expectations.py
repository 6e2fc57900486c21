"""What a model and the speed of tiers come to: tokens, break-even lengths, times to first token."""

from __future__ import annotations

import msgspec

from kvtier.cli.inspection.inspectors import inspector_of
from kvtier.cli.measuring.tier_speeds import Measured
from kvtier.config import StackConfig
from kvtier.observe.kv_shape import KVShape
from kvtier.record.record import record_bytes

_TOKENS_MAX = 1 << 22


class Link(msgspec.Struct, frozen=True):
    """How fast blocks come from one tier, and where that is known from."""

    bytes_per_s: float
    latency_s: float
    source: str


class Outlook(msgspec.Struct, kw_only=True):
    """What to expect of one tier."""

    tier: int
    kind: str
    capacity: int
    chunks: int
    tokens: int
    link: Link | None
    load_tokens_per_s: float | None = None
    break_even_tokens: int | None = None
    """From this length on loading is quicker than recomputing; None if it never is."""
    first_token_s: float | None = None
    """For a prompt of whose whole chunks this tier has as many as it can hold."""


class Expectation(msgspec.Struct, kw_only=True):
    """The whole answer, apart from a trace."""

    shape: KVShape
    chunk_tokens: int
    chunk_bytes: int
    prompt_tokens: int
    prefill_tokens_per_s: float | None
    recompute_s: float | None
    tiers: list[Outlook]


def expect(
    config: StackConfig,
    shape: KVShape,
    links: dict[int, Link],
    device: Link | None,
    prefill: float | None,
    prompt: int,
) -> Expectation:
    """Put numbers together; `links` by tier."""
    tokens = chunk_of(config, shape)
    return Expectation(
        shape=shape,
        chunk_tokens=tokens,
        chunk_bytes=shape.token_bytes * tokens,
        prompt_tokens=prompt,
        prefill_tokens_per_s=prefill,
        recompute_s=None if prefill is None else prompt / prefill,
        tiers=[
            _tier(config, shape, tier, links.get(tier), device, prefill, prompt)
            for tier in range(len(config.tiers))
        ],
    )


def chunk_of(config: StackConfig, shape: KVShape) -> int:
    """The tokens of one stored block: no more than a window has."""
    return min(config.chunk_tokens, shape.window or config.chunk_tokens)


def _tier(
    config: StackConfig,
    shape: KVShape,
    tier: int,
    link: Link | None,
    device: Link | None,
    prefill: float | None,
    prompt: int,
) -> Outlook:
    settings = config.tiers[tier]
    step = chunk_of(config, shape)
    capacity = inspector_of(config, tier).capacity()
    chunks = capacity // record_bytes(shape.token_bytes * step)
    outlook = Outlook(
        tier=tier,
        kind=settings.kind,
        capacity=capacity,
        chunks=chunks,
        tokens=chunks * step,
        link=link,
    )
    if link is None:
        return outlook
    outlook.load_tokens_per_s = prompt / load_seconds(shape, prompt, link, device)
    if prefill is not None:
        outlook.break_even_tokens = _break_even(shape, link, device, prefill, step)
        whole = min(prompt // step, chunks) * step
        rest = max(1, prompt - whole)
        load = load_seconds(shape, whole, link, device) if whole else 0.0
        outlook.first_token_s = load + rest / prefill
    return outlook


def load_seconds(shape: KVShape, tokens: int, link: Link, device: Link | None) -> float:
    """How long so many tokens take to the engine: the slower of the two streams."""
    size = shape.load_bytes(tokens)
    seconds = link.latency_s + size / link.bytes_per_s
    if device is not None:
        seconds = max(seconds, device.latency_s + size / device.bytes_per_s)
    return seconds


def _break_even(
    shape: KVShape, link: Link, device: Link | None, prefill: float, step: int
) -> int | None:
    """The first whole number of chunks that loads in less time than it is computed in."""

    def wins(chunks: int) -> bool:
        tokens = chunks * step
        return load_seconds(shape, tokens, link, device) < tokens / prefill

    most = _TOKENS_MAX // step
    if not wins(most):
        return None
    low, high = 0, most  # the gap between both only grows with the length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high * step


def links_of(measured: list[Measured], chunk_bytes: int) -> dict[int, Link]:
    """What a measurement says of each tier; tiers that gave nothing are left out."""
    links = {}
    for tier, found in enumerate(measured):
        if found.load_bytes_per_s > 0:
            latency = max(0.0, found.block_s - chunk_bytes / found.load_bytes_per_s)
            links[tier] = Link(found.load_bytes_per_s, latency, "measured")
    return links
