"""A trace run through a stack of several sizes, and with several write budgets, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import msgspec

from kvtier.cli import console
from kvtier.cli.expectations import Expectation
from kvtier.cli.trace_simulation import (
    Request,
    Simulation,
    TierPlan,
    Trace,
    sample,
    simulate_all,
)
from kvtier.config import StackConfig
from kvtier.core import amounts
from kvtier.core.chain.writes.write_links import TOUCHES_KEPT
from kvtier.core.records.record import record_bytes
from kvtier.core.settings import TierSettings, WritePolicy

_DAY_S = 86400.0
_GIB = 1 << 30
_USES_MAX = 6_000_000
"""So many uses of blocks are simulated in seven seconds on two cores."""
_SAMPLE_MIN = 250_000
"""A sample of fewer references says too little."""
_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 50, 60
_COLOURS = ("#3366cc", "#dc7633", "#2e8b57", "#8e44ad", "#c0392b", "#7f8c8d", "#b7950b", "#17a2b8")
SHARES = (1.0, 0.5, 0.25, 0.1)
"""Of what is written without a budget."""
KEPT = 0.9
"""The smallest budget is recommended with which so large a part of the hits remains."""
_EFFORT = 3
"""A budget's run takes more time than a size's: it is done with a smaller part of a long trace."""


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


class SweepRow(msgspec.Struct):
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
) -> list[SweepRow]:
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
    rows: dict[float, SweepRow] = {}
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
) -> SweepRow:
    saved = round(found.hits / size.share) * block_tokens
    rate = model.prefill_tokens_per_s
    days = whole.seconds / _DAY_S
    return SweepRow(
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


def show_sweep(rows: Sequence[SweepRow]) -> None:
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
    if sampled := said_of_sample(rows):
        console.say_wrapped(sampled)
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


def said_of_sample(rows: Sequence[SweepRow]) -> str:
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


def sweep_plot(rows: Sequence[SweepRow]) -> str:
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
    return _lines(title, "size", "% of blocks", series, logarithmic=True)


# -- its plot --------------------------------------------------------------------------------------


def _lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = False,
) -> str:
    """Lines through points; `logarithmic` concerns the axis across."""
    points = [point for line in series.values() for point in line]
    if not points:
        return _page(title, _HEIGHT, [], [])
    xs = [x for x, _ in points]
    low, high = min(xs), max(xs)
    top = max(y for _, y in points) or 1.0
    if logarithmic and low <= 0:
        raise ValueError("a logarithmic axis needs values above zero")
    scale = math.log if logarithmic else float
    span = (scale(high) - scale(low)) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + width * (scale(x) - scale(low)) / span,
            _TOP + height * (1 - y / top),
        )

    body = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" '
        'stroke="#999"/>'
    ]
    for step in range(5):
        _, y = place(low, top * step / 4)
        body.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        )
        body.append(_text(_LEFT - 6, y + 4, f"{top * step / 4:.3g}", "end"))
    for x in _ticks(sorted(set(xs))):
        body.append(_text(place(x, 0)[0], _TOP + height + 18, f"{x:.4g}", "middle"))
    body.append(_text(_LEFT + width / 2, _HEIGHT - 14, across, "middle"))
    body.append(_text(_LEFT, _TOP - 8, up))
    for index, line in enumerate(series.values()):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(line))
        colour = _COLOURS[index % len(_COLOURS)]
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return _page(title, _HEIGHT, body, list(series))


def _ticks(values: Sequence[float]) -> Sequence[float]:
    """At most seven of them, evenly chosen."""
    return values[:: max(1, -(-len(values) // 7))]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(title: str, height: float, body: Sequence[str], legend: Sequence[str]) -> str:
    keys = []
    for index, name in enumerate(legend):
        y = _TOP + 20 * index
        colour = _COLOURS[index % len(_COLOURS)]
        keys.append(f'<rect x="{_WIDTH - _RIGHT + 20}" y="{y}" width="12" height="12" ')
        keys[-1] += f'fill="{colour}"/>'
        keys.append(_text(_WIDTH - _RIGHT + 38, y + 11, name))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>',
            f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
            *body,
            *keys,
            "</svg>",
            "",
        ]
    )


# -- write budgets ---------------------------------------------------------------------------------


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
            _budget_row(
                tier, simulation, whole, part_, rate / share * block_bytes * _DAY_S, capacity
            )
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


def _budget_row(
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
