"""What a trace's hits come to if a tier that wears may only be written so much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvtier.cli import console
from kvtier.cli.measuring.expectations import Expectation
from kvtier.cli.measuring.trace_sweep import part_of, plans_of
from kvtier.config import StackConfig
from kvtier.eviction.traces import Request
from kvtier.observe import human
from kvtier.observe.simulate import Simulation, TierPlan, Trace, simulate_all
from kvtier.record.record import record_bytes
from kvtier.settings import TierSettings, WritePolicy

SHARES = (1.0, 0.5, 0.25, 0.1)
KEPT = 0.9
"""The smallest budget is recommended with which so large a part of the hits remains."""
_EFFORT = 3
"""A budget's run takes more time than a size's: it is done with a smaller part of a long trace."""
_DAY_S = 86400.0
_GIB = 1 << 30


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


def run_budgets(
    config: StackConfig,
    expectation: Expectation,
    requests: Sequence[Request],
    block_tokens: int,
    exact: bool,
) -> list[BudgetRow]:
    """Rows for each tier of the stack that can have a budget."""
    block_bytes = record_bytes(expectation.shape.token_bytes * block_tokens)
    trace = Trace(requests)
    wearing = [at for at, settings in enumerate(config.tiers) if _wears(settings)]
    if not wearing or not trace.seconds:
        return []
    sizes = _EFFORT * (1 + (len(SHARES) - 1) * len(wearing))
    part, share = part_of(trace, len(config.tiers), sizes, exact)
    plans = plans_of(config, expectation, block_bytes, 1.0, share)
    free = [msgspec.structs.replace(plan, writes=None) for plan in plans]
    (whole,) = simulate_all([(part, free)])
    rows = []
    for tier in wearing:
        if not whole.hits or not whole.tiers[tier].written:
            continue
        rates = [share_ * whole.tiers[tier].written / trace.seconds for share_ in SHARES]
        runs = [(part, _with(free, tier, rate)) for rate in rates[1:]]
        with console.progress("simulating", len(runs) * len(plans), "budgets") as bar:
            found = [whole, *simulate_all(runs, bar.advance)]
        capacity = expectation.tiers[tier].capacity
        made = [
            _row(tier, simulation, whole, part_, rate / share * block_bytes * _DAY_S, capacity)
            for simulation, part_, rate in zip(found, SHARES, rates, strict=True)
        ]
        for row in made:
            row.written_bytes = round(row.written_bytes / share) * block_bytes
        best = min((row for row in made if row.kept >= KEPT), key=lambda row: row.share)
        best.recommended = True
        rows += made
    return rows


def _wears(settings: TierSettings) -> bool:
    return hasattr(settings, "writes_per_second") and settings.write is not WritePolicy.NEVER


def _with(plans: Sequence[TierPlan], tier: int, rate: float) -> list[TierPlan]:
    return [
        msgspec.structs.replace(plan, writes=rate) if at == tier else plan
        for at, plan in enumerate(plans)
    ]


def _row(
    tier: int, found: Simulation, whole: Simulation, share: float, per_day: float, capacity: int
) -> BudgetRow:
    return BudgetRow(
        tier=tier,
        kind=found.tiers[tier].kind,
        share=share,
        bytes_per_day=per_day,
        times_a_day=per_day / max(1, capacity),
        written_bytes=found.tiers[tier].written,
        hit_percent=100.0 * found.hits / max(1, found.references),
        kept=found.hits / whole.hits,
    )


def show_budgets(rows: Sequence[BudgetRow]) -> None:
    """A line a budget, and which one to set."""
    console.print_table(
        ["tier", "budget", "a day", "of its size", "written", "all hits", "of those"],
        [
            [
                f"{row.tier} {row.kind}",
                "none" if row.share == 1 else f"{row.share:.0%}",
                human.size(row.bytes_per_day),
                f"{human.count(row.times_a_day)} times",
                human.size(row.written_bytes),
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
    times = human.count(row.times_a_day)
    return (
        f"{said}; that is {times} times its size a day, where a usual data-centre drive endures 1 "
        "for five years (endurance: 1.0)"
    )
