"""A trace run through a stack in several sizes, as rows, a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.cli import console
from kvtier.cli.outlook import Expectation
from kvtier.config import StackConfig
from kvtier.core.eviction.trace import Request
from kvtier.core.record import record_bytes
from kvtier.observe import human
from kvtier.observe.simulate import Simulation, TierPlan, simulate_all
from kvtier.observe.svg import lines

_DAY_S = 86400.0


class RowTier(msgspec.Struct):
    """One tier's part in one size of the stack."""

    kind: str
    capacity: int
    hit_percent: float
    loaded_bytes: int
    written_bytes: int
    writes_per_day: float
    """How often a day its whole capacity is written: what wears a disk."""


class Row(msgspec.Struct):
    """What a stack of one size did with the trace."""

    scale: float
    requests: int
    references: int
    hit_percent: float
    saved_tokens: int
    saved_seconds: float | None
    """Seconds of prefill, where the rate is known."""
    tiers: list[RowTier]


def run_sweep(
    config: StackConfig,
    expectation: Expectation,
    requests: Sequence[Request],
    block_tokens: int,
    factors: Sequence[float],
) -> list[Row]:
    """One row a size; every tier of the stack is scaled by the same factor."""
    block_bytes = record_bytes(expectation.shape.token_bytes * block_tokens)
    stacks = [
        [
            TierPlan(
                settings.kind,
                max(1, int(tier.capacity * factor) // block_bytes),
                settings.eviction,
                settings.write,
                settings.admission,
            )
            for settings, tier in zip(config.tiers, expectation.tiers, strict=True)
        ]
        for factor in factors
    ]
    with console.progress("simulating", sum(map(len, stacks)), "tiers") as bar:
        found = simulate_all(requests, stacks, bar.advance)
    return [
        _row(each, factor, block_tokens, block_bytes, expectation)
        for each, factor in zip(found, factors, strict=True)
    ]


def _row(
    found: Simulation, factor: float, block_tokens: int, block_bytes: int, model: Expectation
) -> Row:
    saved = found.hits * block_tokens
    rate = model.prefill_tokens_per_s
    days = found.seconds / _DAY_S
    return Row(
        scale=factor,
        requests=found.requests,
        references=found.references,
        hit_percent=_percent(found.hits, found.references),
        saved_tokens=saved,
        saved_seconds=None if rate is None else saved / rate,
        tiers=[
            RowTier(
                kind=tier.kind,
                capacity=tier.blocks * block_bytes,
                hit_percent=_percent(tier.hits, found.references),
                loaded_bytes=tier.hits * block_bytes,
                written_bytes=tier.written * block_bytes,
                writes_per_day=tier.written / tier.blocks / days if days else 0.0,
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
                f"{human.count(tier.writes_per_day)} times",
            ]
            for row in rows
            for kind, tier in zip(kinds, row.tiers, strict=True)
        ],
        numbers=["size", "capacity", "loaded", "written", "written a day"],
    )


def plot(rows: Sequence[Row]) -> str:
    """Hits over sizes: a line a tier, and their sum."""
    series: dict[str, list[tuple[float, float]]] = {
        "all": [(row.scale, row.hit_percent) for row in rows]
    }
    for index, tier in enumerate(rows[0].tiers):
        series[f"{index} {tier.kind}"] = [(row.scale, row.tiers[index].hit_percent) for row in rows]
    return lines("Hits by size of the stack", "size", "% of blocks", series, logarithmic=True)
