"""A trace run through a stack in several sizes, as rows, a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvtier.chain.store import TOUCHES_KEPT
from kvtier.cli import console
from kvtier.cli.measuring.expectations import Expectation
from kvtier.config import StackConfig
from kvtier.eviction.traces import Request
from kvtier.observe import human
from kvtier.observe.simulate import Simulation, TierPlan, Trace, simulate_all
from kvtier.observe.svg import lines
from kvtier.observe.trace_sample import sample
from kvtier.record.record import record_bytes

_DAY_S = 86400.0
_USES_MAX = 6_000_000
"""So many uses of blocks are simulated in seven seconds on two cores."""
_SAMPLE_MIN = 250_000
"""A sample of fewer references says too little."""


class RowTier(msgspec.Struct):
    """One tier's part in one size of the stack."""

    kind: str
    capacity: int
    hit_percent: float
    loaded_bytes: int
    written_bytes: int
    writes_per_day: float | None
    """How often a day its whole capacity is written: what wears a disk. None for a trace that takes
    no time."""


class Row(msgspec.Struct):
    """What a stack of one size did with the trace."""

    scale: float
    requests: int
    references: int
    share: float
    """The part of all references that was simulated and stands for the whole."""
    hit_percent: float
    saved_tokens: int
    saved_seconds: float | None
    """Seconds of prefill, where the rate is known."""
    tiers: list[RowTier]
    sampled_hit_percent: float | None = None
    """What the sample that other sizes were run on says of this size: how far off it is."""


def run_sweep(
    config: StackConfig,
    expectation: Expectation,
    requests: Sequence[Request],
    block_tokens: int,
    factors: Sequence[float],
    exact: bool,
) -> list[Row]:
    """One row a size; every tier of the stack is scaled by the same factor."""
    block_bytes = record_bytes(expectation.shape.token_bytes * block_tokens)
    trace = Trace(requests)
    part, share = part_of(trace, len(config.tiers), len(factors), exact)
    own = min(factors, key=lambda factor: abs(math.log(factor)))
    sizes = [_Size(own, trace, 1.0)]
    sizes += [_Size(factor, part, share) for factor in factors if factor != own or share < 1]
    runs = [(size.trace, size.plans(config, expectation, block_bytes)) for size in sizes]
    with console.progress("simulating", len(runs) * len(config.tiers), "tiers") as bar:
        found = simulate_all(runs, bar.advance)
    rows: dict[float, Row] = {}
    for size, simulation in zip(sizes, found, strict=True):
        if size.factor in rows:
            said = _percent(simulation.hits, simulation.references)
            rows[own].sampled_hit_percent = said
        else:
            row = _row(simulation, size, trace, block_tokens, block_bytes, expectation)
            rows[size.factor] = row
    return [rows[factor] for factor in factors]


class _Size(NamedTuple):
    """One size of the stack, and the share of the trace that it is run on."""

    factor: float
    trace: Trace
    share: float

    def plans(
        self, config: StackConfig, expectation: Expectation, block_bytes: int
    ) -> list[TierPlan]:
        """Its tiers."""
        return plans_of(config, expectation, block_bytes, self.factor, self.share)


def part_of(trace: Trace, tiers: int, sizes: int, exact: bool) -> tuple[Trace, float]:
    """A part of a trace that so many sizes can be run on in seconds, and how large a part it is."""
    share = 1.0 if exact else _share(trace.references, tiers, sizes)
    if share == 1.0:
        return trace, share
    part = trace.of(sample(trace.requests, share))
    return part, part.references / trace.references


def plans_of(
    config: StackConfig, expectation: Expectation, block_bytes: int, factor: float, share: float
) -> list[TierPlan]:
    """The tiers of a stack, so many times as large; as a part of the requests fills only a part of
    the room, they are smaller for it, and so are their write budgets."""
    plans = []
    for settings, tier in zip(config.tiers, expectation.tiers, strict=True):
        capacity = int(tier.capacity * factor)
        whole = capacity // block_bytes
        blocks = max(1, round(whole * share)) if whole else 0
        budget = getattr(settings, "writes_per_second", None)
        rate = None if budget is None else budget(capacity)
        plans.append(
            TierPlan(
                settings.kind,
                blocks,
                settings.eviction,
                settings.write,
                settings.admission,
                remembers=round(TOUCHES_KEPT * share),
                writes=None if rate is None else rate / block_bytes * share,
            )
        )
    return plans


def _share(references: int, tiers: int, sizes: int) -> float:
    """How much of a trace to simulate for all sizes but the stack's own, to take seconds only."""
    uses = references * tiers
    if uses * sizes <= _USES_MAX:
        return 1.0
    # A short trace in very many sizes is less than the least sample: then it is run as it is.
    return min(1.0, max((_USES_MAX - uses) / (uses * sizes), _SAMPLE_MIN / references))


def _row(
    found: Simulation,
    size: _Size,
    whole: Trace,
    block_tokens: int,
    block_bytes: int,
    model: Expectation,
) -> Row:
    saved = round(found.hits / size.share) * block_tokens
    rate = model.prefill_tokens_per_s
    days = whole.seconds / _DAY_S
    return Row(
        scale=size.factor,
        requests=len(whole.requests),
        references=whole.references,
        share=size.share,
        hit_percent=_percent(found.hits, found.references),
        saved_tokens=saved,
        saved_seconds=None if rate is None else saved / rate,
        tiers=[
            RowTier(
                kind=tier.kind,
                capacity=round(tier.blocks / size.share) * block_bytes,
                hit_percent=_percent(tier.hits, found.references),
                loaded_bytes=round(tier.hits / size.share) * block_bytes,
                written_bytes=round(tier.written / size.share) * block_bytes,
                writes_per_day=tier.written / max(1, tier.blocks) / days if days else None,
            )
            for tier in found.tiers
        ],
    )


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def show_sweep(rows: Sequence[Row]) -> None:
    """A line a size, then the moves of each tier."""
    first = rows[0]
    console.say(f"{first.requests} requests, {first.references} blocks asked for")
    kinds = [f"{index} {tier.kind}" for index, tier in enumerate(first.tiers)]
    columns = ["size", *(f"{kind} hits" for kind in kinds), "all hits", "prefill saved"]
    console.print_table(
        columns,
        [
            [
                f"x{row.scale:g}",
                *(f"{tier.hit_percent:.1f}%" for tier in row.tiers),
                f"{row.hit_percent:.1f}%",
                f"{human.count(row.saved_tokens)} tokens"
                + (f", {human.duration(row.saved_seconds)}" if row.saved_seconds else ""),
            ]
            for row in rows
        ],
        numbers=columns[:-1],
    )
    if sampled := said_of_sample(rows):
        console.say_wrapped(sampled)
    console.say()
    console.print_table(
        ["size", "tier", "capacity", "loaded", "written", "written a day"],
        [
            [
                f"x{row.scale:g}",
                kind,
                human.size(tier.capacity),
                human.size(tier.loaded_bytes),
                human.size(tier.written_bytes),
                "-" if tier.writes_per_day is None else f"{human.count(tier.writes_per_day)} times",
            ]
            for row in rows
            for kind, tier in zip(kinds, row.tiers, strict=True)
        ],
        numbers=["size", "capacity", "loaded", "written", "written a day"],
    )


def said_of_sample(rows: Sequence[Row]) -> str:
    """What to know of rows that do not come from the whole trace; nothing if all do."""
    for own in rows:
        if own.sampled_hit_percent is not None:
            share = min(row.share for row in rows)
            return (
                f"all sizes but x{own.scale:g} are of a sample, {share:.0%} of what was asked for: "
                f"of x{own.scale:g} it says {own.sampled_hit_percent:.1f}% hits instead of "
                f"{own.hit_percent:.1f}%; --exact takes longer and leaves nothing out"
            )
    return ""


def plot(rows: Sequence[Row]) -> str:
    """Hits over sizes: a line a tier, and their sum."""
    series: dict[str, list[tuple[float, float]]] = {
        "all": [(row.scale, row.hit_percent) for row in rows]
    }
    for index, tier in enumerate(rows[0].tiers):
        series[f"{index} {tier.kind}"] = [(row.scale, row.tiers[index].hit_percent) for row in rows]
    title = "Hits by size of the stack"
    share = min(row.share for row in rows)
    if share < 1:
        title += f", of a sample of {share:.0%}"
    return lines(title, "size", "% of blocks", series, logarithmic=True)
