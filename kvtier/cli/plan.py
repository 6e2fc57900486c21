"""`kvtier plan`: what a stack is worth for a model, and what it would have served of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.bench import Size, measure
from kvtier.cli.expectations import (
    Expectation,
    Link,
    Outlook,
    chunk_of,
    expect,
    links_of,
    read_shape,
)
from kvtier.cli.inspect import inspector_of
from kvtier.cli.trace_simulation import Request, Simulation, TierPlan, read_trace, simulate
from kvtier.config import StackConfig, load
from kvtier.cost.rates import DEVICE
from kvtier.record.record import record_bytes

app = options.new_app()

_MEASURED_BYTES = 64 << 20
_BLOCK_BYTES_MAX = 32 << 20
_SIZES = "0.25,0.5,1,2,4"
_BLOCK_TOKENS = 512
_DAY_S = 86400.0
_Prompt = Annotated[
    int, typer.Option(min=1, max=10**9, help="Length of the prompt that times are for.")
]


@app.command(
    epilog="Examples: kvtier plan ./model -c stack.yaml --prefill 8000; "
    "kvtier plan ./model -c stack.yaml --no-measure --bandwidth nvme=3GB/s --trace trace.jsonl"
)
def plan(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model's folder, or its config.json.")
    ],
    config: options.ConfigOption,
    prefill: Annotated[
        float | None,
        typer.Option(min=1, max=1e12, help="How many prompt tokens a second the engine computes."),
    ] = None,
    prompt: _Prompt = 8192,
    kv_dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="vLLM's --kv-cache-dtype, like fp8; or a --dtype.")
    ] = "auto",
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Tensor parallel ranks.")] = 1,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=RATE[,LATENCY]",
            help="A rate to use unmeasured, like nvme=3GB/s,1ms; device is the copy to the GPU.",
        ),
    ] = None,
    do_measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure tiers whose rate is not given.")
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Requests to simulate: JSON lines with timestamp and hash_ids."
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(hidden=True, min=1, help="Tokens that a hash_id of the trace stands for."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(hidden=True, metavar="LIST", help="Multiples of the stack's sizes to try."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Say how many tokens each tier holds, from which length on loading beats recomputing, and how
    long the first token takes; with a trace, hits by tier for several sizes of the stack.

    The answer is computed from rates that are measured or given, and says what it leaves out.
    """
    factors = _factors(_SIZES if scale is None else scale)
    options.only_with("--trace", trace, scale=scale, block_tokens=block_tokens)
    stack = _read(config, here=do_measure)
    shape = read_shape(model, kv_dtype, ranks)
    requests = None if trace is None else read_trace(trace)
    links = _links(stack, shape.token_bytes * chunk_of(stack, shape), bandwidth or [], do_measure)
    device = links.pop(-1, None)
    expectation = expect(stack, shape, links, device, prefill, prompt)
    rows: list[SizeRow] = []
    if requests is not None:
        rows = Sweep(stack, expectation, requests, block_tokens or _BLOCK_TOKENS).sizes(factors)
    if json:
        console.print_json({"model": expectation, "trace": rows})
        return
    _show(expectation)
    if rows:
        console.say()
        _show_sizes(rows)


def _read(file: Path, *, here: bool) -> StackConfig:
    """The stack; if nothing is measured, it may be another machine's."""
    config = load(file, here=here)
    for tier, settings in enumerate(config.tiers):
        folder = inspector_of(config, tier).folder()
        if settings.capacity.share is None or folder is None or folder.parent.exists():
            continue
        console.warn(
            f"tier {tier}: {folder.parent} is not here: {settings.capacity} is taken of the disk "
            "that would hold it on this machine"
        )
    return config


def _factors(text: str) -> list[float]:
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor <= 1e6 for factor in factors):
        raise typer.BadParameter(f"{text!r}: write numbers like 0.5,1,2", param_hint="--scale")
    return sorted(set(factors))


def _links(
    config: StackConfig, chunk_bytes: int, given: list[str], do_measure: bool
) -> dict[int, Link]:
    """By tier, given or measured; under -1 the way to the device."""
    links: dict[int, Link] = {}
    for text in given:
        name, _, value = text.partition("=")
        rate, _, latency = value.partition(",")
        tier = -1 if name == DEVICE else options.tier_of(name, config, "--bandwidth")
        assert tier is not None
        try:
            seconds = options.parse_duration(latency) if latency else 0.0
            link = Link(float(options.parse_rate(rate)), seconds, "given")
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{text}: {error}", param_hint="--bandwidth") from None
        if links.setdefault(tier, link) is not link:
            raise typer.BadParameter(f"{name} stands twice: name one", param_hint="--bandwidth")
    if links.keys() == {-1} and not do_measure:
        problem = f"{DEVICE} alone says nothing: give the rate of a tier, too, or --measure"
        raise typer.BadParameter(problem, param_hint="--bandwidth")
    if do_measure and not links.keys() >= set(range(len(config.tiers))):
        block = min(record_bytes(chunk_bytes) - 4096, _BLOCK_BYTES_MAX)
        size = Size(block, max(4, _MEASURED_BYTES // block), 1)
        links = links_of(measure(config, size, console.note, links), block) | links
    return links


def _show(found: Expectation) -> None:
    shape = found.shape
    layers = ", ".join(f"{count} {name}" for name, count in shape.layers.items() if count)
    console.print_values(
        {
            "model": shape.model,
            "attention": f"{shape.attention}, layers: {layers}"
            + (f", window of {shape.window} tokens" if shape.window else ""),
            "KV cache": f"{shape.dtype}, {amounts.size(shape.token_bytes)} a token"
            + (f", {amounts.size(shape.prompt_bytes)} a prompt" if shape.prompt_bytes else ""),
            "chunk": f"{found.chunk_tokens} tokens, {amounts.size(found.chunk_bytes)}",
        }
    )
    for each in shape.unknown:
        console.say_wrapped(f"not counted: {each}", 2)
    console.say()
    columns = ["tier", "capacity", "tokens", "loads", "loads tokens/s"]
    timed = found.prefill_tokens_per_s is not None
    if timed:
        columns += ["break-even", "first token"]
    rows = [_row(tier, timed) for tier in found.tiers]
    console.print_table(columns, rows, numbers=columns[1:])
    if found.recompute_s is not None:
        console.say_wrapped(
            f"a prompt of {found.prompt_tokens} tokens takes "
            f"{amounts.duration(found.recompute_s)} to compute; first token: as many of its whole "
            "chunks as that tier holds are loaded, the rest is computed"
        )
    else:
        console.say_wrapped(
            "loading wins where the engine computes fewer tokens a second than a tier loads; "
            "--prefill RATE says from which length on"
        )


def _row(tier: Outlook, timed: bool) -> list[str]:
    link = tier.link
    cells = [
        f"{tier.tier} {tier.kind}",
        amounts.size(tier.capacity),
        amounts.count(tier.tokens),
        amounts.rate(link.bytes_per_s) if link else "unknown",
        amounts.count(tier.load_tokens_per_s) if tier.load_tokens_per_s else "-",
    ]
    if timed:
        even = "-" if link is None else "never"
        cells += [
            str(tier.break_even_tokens) if tier.break_even_tokens else even,
            amounts.duration(tier.first_token_s) if tier.first_token_s else "-",
        ]
    return cells


# -- what it would have served of a trace ----------------------------------------------------------


class TierRow(msgspec.Struct):
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
    tiers: list[TierRow]


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
        self._requests = requests
        self._block_tokens = block_tokens
        self._block_bytes = record_bytes(expectation.shape.token_bytes * block_tokens)

    def sizes(self, factors: Sequence[float]) -> list[SizeRow]:
        """One row a size; every tier of the stack is scaled by the same factor."""
        rows = []
        with console.progress("simulating", len(factors), "sizes") as bar:
            for factor in factors:
                found = simulate(self._requests, self._plans(factor))
                rows.append(self._row(found, factor))
                bar.advance(1)
        return rows

    def _plans(self, factor: float) -> list[TierPlan]:
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

    def _row(self, found: Simulation, factor: float) -> SizeRow:
        size = self._block_bytes
        saved = found.hits * self._block_tokens
        rate = self._expectation.prefill_tokens_per_s
        days = (self._requests[-1].time - self._requests[0].time) / _DAY_S
        return SizeRow(
            scale=factor,
            requests=len(self._requests),
            references=found.references,
            hit_percent=_percent(found.hits, found.references),
            saved_tokens=saved,
            saved_seconds=None if rate is None else saved / rate,
            tiers=[
                TierRow(
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


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def _show_sizes(rows: Sequence[SizeRow]) -> None:
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
