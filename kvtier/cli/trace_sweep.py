"""A trace run through a stack of several sizes, and with several write budgets, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvtier import amounts
from kvtier.cli import console
from kvtier.cli.expectations import Expectation
from kvtier.cli.trace_simulation import Request, Simulation, TierPlan, Trace, simulate_all
from kvtier.config import StackConfig
from kvtier.record.record import record_bytes
from kvtier.settings import TierSettings, WritePolicy

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Budgets to try, of what is written without one."""
KEPT = 0.9
"""The smallest budget is recommended with which so large a part of the hits remains."""
_DAY_S = 86400.0
_GIB = 1 << 30


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


class SizeRow(msgspec.Struct):
    """What a stack of one size did with the trace."""

    scale: float
    requests: int
    references: int
    hit_percent: float
    saved_tokens: int
    saved_seconds: float | None
    """Seconds of prefill, where the rate is known."""
    tiers: list[RowTier]


class BudgetRow(msgspec.Struct):
    """What one write budget of one tier leaves of the hits."""

    tier: int
    kind: str
    share: float
    """The budget as a part of what is written without one."""
    bytes_per_day: float
    times_a_day: float
    """The same as a number of times that the capacity may be written."""
    written_bytes: int
    """What was written of it, while the trace lasted."""
    hit_percent: float
    """By all tiers."""
    kept: float
    """The part of the hits that there are without a budget."""
    recommended: bool = False


class Sweep:
    """A stack, what is expected of it, and a trace whose blocks have so many tokens."""

    def __init__(
        self,
        config: StackConfig,
        expectation: Expectation,
        requests: Sequence[Request],
        block_tokens: int,
    ) -> None:
        self._config = config
        self._expectation = expectation
        self._trace = Trace(requests)
        self._block_tokens = block_tokens
        self._block_bytes = record_bytes(expectation.shape.token_bytes * block_tokens)

    def sizes(self, factors: Sequence[float]) -> list[SizeRow]:
        """One row a size; every tier of the stack is scaled by the same factor."""
        runs = [(self._trace, self.plans(factor)) for factor in factors]
        with console.progress("simulating", len(runs) * len(self._config.tiers), "tiers") as bar:
            found = simulate_all(runs, bar.advance)
        return [self._size_row(*each) for each in zip(found, factors, strict=True)]

    def plans(self, factor: float) -> list[TierPlan]:
        """The tiers of the stack, so many times as large."""
        plans = []
        for settings, tier in zip(self._config.tiers, self._expectation.tiers, strict=True):
            capacity = int(tier.capacity * factor)
            budget = getattr(settings, "writes_per_second", None)
            rate = None if budget is None else budget(capacity)
            plans.append(
                TierPlan(
                    settings.kind,
                    capacity // self._block_bytes,
                    settings.eviction,
                    settings.write,
                    settings.admission,
                    writes=None if rate is None else rate / self._block_bytes,
                )
            )
        return plans

    def _size_row(self, found: Simulation, factor: float) -> SizeRow:
        size = self._block_bytes
        saved = found.hits * self._block_tokens
        rate = self._expectation.prefill_tokens_per_s
        days = self._trace.seconds / _DAY_S
        return SizeRow(
            scale=factor,
            requests=len(self._trace.requests),
            references=found.references,
            hit_percent=_percent(found.hits, found.references),
            saved_tokens=saved,
            saved_seconds=None if rate is None else saved / rate,
            tiers=[
                RowTier(
                    kind=tier.kind,
                    capacity=tier.blocks * size,
                    hit_percent=_percent(tier.hits, found.references),
                    loaded_bytes=tier.hits * size,
                    written_bytes=tier.written * size,
                    writes_per_day=tier.written / max(1, tier.blocks) / days if days else None,
                )
                for tier in found.tiers
            ],
        )

    def budgets(self) -> list[BudgetRow]:
        """Rows for each tier of the stack that can have a write budget."""
        wearing = [at for at, settings in enumerate(self._config.tiers) if _wears(settings)]
        if not wearing or not self._trace.seconds:
            return []
        free = [msgspec.structs.replace(plan, writes=None) for plan in self.plans(1.0)]
        (whole,) = simulate_all([(self._trace, free)])
        rows: list[BudgetRow] = []
        for tier in wearing:
            if whole.hits and whole.tiers[tier].written:
                rows += self._budgets_of(tier, free, whole)
        return rows

    def _budgets_of(
        self, tier: int, free: Sequence[TierPlan], whole: Simulation
    ) -> list[BudgetRow]:
        """The rows of one tier, the best of them recommended."""
        rates = [share * whole.tiers[tier].written / self._trace.seconds for share in SHARES]
        runs = [(self._trace, _with_budget(free, tier, rate)) for rate in rates[1:]]
        with console.progress("simulating", len(runs) * len(free), "budgets") as bar:
            found = [whole, *simulate_all(runs, bar.advance)]
        capacity = self._expectation.tiers[tier].capacity
        rows = [
            BudgetRow(
                tier=tier,
                kind=each.tiers[tier].kind,
                share=share,
                bytes_per_day=rate * self._block_bytes * _DAY_S,
                times_a_day=rate * self._block_bytes * _DAY_S / max(1, capacity),
                written_bytes=each.tiers[tier].written * self._block_bytes,
                hit_percent=_percent(each.hits, each.references),
                kept=each.hits / whole.hits,
            )
            for each, share, rate in zip(found, SHARES, rates, strict=True)
        ]
        best = min((row for row in rows if row.kept >= KEPT), key=lambda row: row.share)
        best.recommended = True
        return rows


def _wears(settings: TierSettings) -> bool:
    return hasattr(settings, "writes_per_second") and settings.write is not WritePolicy.NEVER


def _with_budget(plans: Sequence[TierPlan], tier: int, rate: float) -> list[TierPlan]:
    return [
        msgspec.structs.replace(plan, writes=rate) if at == tier else plan
        for at, plan in enumerate(plans)
    ]


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def show_sizes(rows: Sequence[SizeRow]) -> None:
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
                f"{amounts.count(row.saved_tokens)} tokens"
                + (f", {amounts.duration(row.saved_seconds)}" if row.saved_seconds else ""),
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
                amounts.size(tier.capacity),
                amounts.size(tier.loaded_bytes),
                amounts.size(tier.written_bytes),
                "-"
                if tier.writes_per_day is None
                else f"{amounts.count(tier.writes_per_day)} times",
            ]
            for row in rows
            for kind, tier in zip(kinds, row.tiers, strict=True)
        ],
        numbers=["size", "capacity", "loaded", "written", "written a day"],
    )


def show_budgets(rows: Sequence[BudgetRow]) -> None:
    """A line a budget, and which one to set."""
    console.print_table(
        ["tier", "budget", "a day", "of its size", "written", "all hits", "of those"],
        [
            [
                f"{row.tier} {row.kind}",
                "none" if row.share == 1 else f"{row.share:.0%}",
                amounts.size(row.bytes_per_day),
                f"{amounts.count(row.times_a_day)} times",
                amounts.size(row.written_bytes),
                f"{row.hit_percent:.1f}%",
                f"{row.kept:.1%}",
            ]
            for row in rows
        ],
        numbers=["budget", "a day", "of its size", "written", "all hits", "of those"],
    )
    for row in rows:
        if row.recommended:
            console.say_wrapped(_advice(row))


def _advice(row: BudgetRow) -> str:
    budget = f"writes: {max(1, math.ceil(row.bytes_per_day / _GIB))}GiB/day"
    if row.share == 1:
        said = f"tier {row.tier}: no smaller budget keeps {KEPT:.0%} of the hits"
    else:
        said = f"tier {row.tier}: {budget} keeps {row.kept:.0%} of the hits"
    times = amounts.count(row.times_a_day)
    return (
        f"{said}; that is {times} times its size a day, where a usual data-centre drive endures 1 "
        "for five years (endurance: 1.0)"
    )
