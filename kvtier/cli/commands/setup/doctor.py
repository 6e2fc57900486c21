"""`kvtier doctor`: what is good and what is not about this machine, for this stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import inspector_of
from kvtier.cli.inspection.machine_checks import check_gds, check_machine, check_order, check_rates
from kvtier.cli.measuring.tier_speeds import Measured, Size, measure
from kvtier.config import StackConfig, load
from kvtier.errors import ConfigError, KVTierError
from kvtier.inspect import Finding, Level
from kvtier.interfaces.backend import backend
from kvtier.observe import human
from kvtier.vllm.hooks import versions
from kvtier.vllm.hooks.source_check import as_data, as_lines

app = console.new_app()

_SIZE = Size(chunk_bytes=1 << 20, blocks=32, rounds=1)
_SLOW_BYTES_PER_S = 100e6
_INDENT = 6
_MARKS = {Level.OK: "ok  ", Level.NOTE: "note", Level.WARN: "WARN", Level.BAD: "BAD "}
_NOT_MEASURED = Finding(
    "speed", Level.NOTE, "not measured", "mend first what is BAD, and run this again"
)


@app.command(
    epilog="Examples: kvtier doctor --config stack.yaml; kvtier doctor -c stack.yaml --no-measure; "
    "kvtier doctor --vllm"
)
def doctor(
    config: options.MaybeConfigOption = None,
    do_measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure", help="Also time how fast blocks are stored and loaded."
        ),
    ] = True,
    vllm: Annotated[
        bool,
        typer.Option(
            "--vllm", help="Only look at all that kvtier touches inside the installed vLLM."
        ),
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Look at memory, disks, stores and versions, and measure every tier.

    It leaves nothing behind, and a running engine does not notice. Exit code 1 if something will
    not work; what could only be better does not count.
    """
    if vllm:
        _look_into_vllm(as_json=json)
        return
    if config is None:
        raise ConfigError("--config", "is missing", "name a stack, or look into vLLM with --vllm")
    stack = load(config, to_write=False)  # what lacks the right to write is a finding
    findings: list[Finding] = []
    measured: list[Measured] = []

    def show_all(found: Iterable[Finding]) -> bool:
        """Show what is found as it comes; whether something of all so far will not work."""
        for finding in found:
            findings.append(finding)
            if not json:
                _show(finding)
        return any(finding.level is Level.BAD for finding in findings)

    bad = show_all(_findings(stack))
    if do_measure:
        bad = show_all([_NOT_MEASURED] if bad else _measure(stack, measured))
    if json:
        console.print_json(
            {
                "ok": not bad,
                "findings": msgspec.to_builtins(findings),
                "measured": msgspec.to_builtins(measured),
            }
        )
    if bad:
        raise typer.Exit(console.EXIT_FAILURE)


def _look_into_vllm(*, as_json: bool) -> None:
    found = versions.find()
    points = versions.touch_points(found.version)
    if as_json:
        said = {"version": found.version, "tested": found.tested, "touch_points": as_data(points)}
        console.print_json(said)
    else:
        known = "tested" if found.tested else f"never tested; tested are {versions.tested()}"
        console.say(f"vLLM {found.version} ({known})")
        for line in as_lines(points):
            console.say(line)
    if any(each.moved for each in points):
        raise typer.Exit(console.EXIT_FAILURE)


def _findings(config: StackConfig) -> Iterator[Finding]:
    yield from check_machine()
    yield from check_order(config)
    yield from check_rates(config)
    for tier, settings in enumerate(config.tiers):
        try:
            backend(settings.kind).check(settings, None)
            yield from inspector_of(config, tier).checks()
            yield from check_gds(config, tier)
        except ConfigError as error:
            yield Finding(f"{tier} {settings.kind}", Level.BAD, error.problem, error.remedy)
        except OSError as error:  # its disk may be failing: that is no matter of the others
            what, _, remedy = console.said_of(error).partition("; ")
            yield Finding(f"{tier} {settings.kind}", Level.BAD, what, remedy)


def _measure(config: StackConfig, measured: list[Measured]) -> Iterator[Finding]:
    try:
        measured += measure(config, _SIZE, console.note)
    except (KVTierError, OSError) as error:
        yield Finding("speed", Level.WARN, f"could not be measured: {error}")
        return
    for index, tier in enumerate(measured):
        area = f"{index} {tier.tier}"
        if tier.note and not tier.hits:
            yield Finding(area, Level.NOTE, f"not measured: {tier.note}")
            continue
        speed = (
            f"stores {human.rate(tier.store_bytes_per_s)}, loads "
            f"{human.rate(tier.load_bytes_per_s)}, one block of 1 MiB in "
            f"{human.duration(tier.block_s)}"
        )
        if tier.wrong:
            yield Finding(area, Level.BAD, f"{tier.wrong} blocks came back wrong", "run memtest")
        elif tier.hits < tier.blocks:
            lost = tier.blocks - tier.hits
            yield Finding(
                area, Level.BAD, f"{lost} of {tier.blocks} blocks did not come back", tier.note
            )
        elif tier.load_bytes_per_s < _SLOW_BYTES_PER_S:
            yield Finding(
                area,
                Level.WARN,
                speed,
                "so slow a tier seldom beats recomputing: kvtier plan says from which length on",
            )
        else:
            yield Finding(area, Level.OK, speed)


def _show(finding: Finding) -> None:
    console.say_wrapped(f"{_MARKS[finding.level]}  {finding.area}: {finding.what}", _INDENT)
    if finding.remedy and finding.level is not Level.OK:
        console.say_wrapped(" " * _INDENT + finding.remedy, _INDENT)
