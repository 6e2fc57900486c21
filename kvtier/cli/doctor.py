"""`kvtier doctor`: what is good and what is not about this machine, for this stack."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.bench import Measured, Size, measure
from kvtier.cli.inspect import inspector_of, look
from kvtier.config import LoadPolicy, StackConfig, load
from kvtier.config.loader import rates_folder, stack_of
from kvtier.cost.rates import SavedRates
from kvtier.cost.saved_rates import rates_in
from kvtier.device.direct import probe as probe_gds
from kvtier.errors import ConfigError, KVTierError, describe_error
from kvtier.inspect import Depth, Finding, Level
from kvtier.interfaces.backend import backend
from kvtier.settings import Gds, WritePolicy
from kvtier.system.memory import Topology
from kvtier.vllm.hooks import versions
from kvtier.vllm.hooks.versions import as_data, as_lines

app = options.new_app()

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
            found = list(inspector_of(config, tier).checks())
            yield from found
            yield from check_gds(config, tier)
            if not any(finding.level is Level.BAD for finding in found):
                yield from check_contents(config, tier)
        except ConfigError as error:
            yield Finding(f"{tier} {settings.kind}", Level.BAD, error.problem, error.remedy)
        except OSError as error:  # its disk may be failing: that is no matter of the others
            what, _, remedy = describe_error(error).partition("; ")
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
            f"stores {amounts.rate(tier.store_bytes_per_s)}, loads "
            f"{amounts.rate(tier.load_bytes_per_s)}, one block of 1 MiB in "
            f"{amounts.duration(tier.block_s)}"
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


# -- the checks of the machine ---------------------------------------------------------------------


def check_machine() -> Iterator[Finding]:
    """What concerns all tiers."""
    try:
        vllm = versions.installed()
        kind = " (CPU build)" if vllm.cpu else ""
        if vllm.tested:
            yield Finding("vllm", Level.OK, f"vLLM {vllm.version}{kind} is supported")
        else:
            yield Finding(
                "vllm",
                Level.WARN,
                f"vLLM {vllm.version}{kind} was never tested, but has all that kvtier touches",
                f"tested are {versions.tested()}",
            )
    except ConfigError as error:
        known = "not installed" not in error.problem
        level = Level.BAD if known else Level.NOTE
        yield Finding("vllm", level, f"vLLM {error.problem}", error.remedy)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 1024:
        yield Finding(
            "files",
            Level.WARN,
            f"a process may open {limit} files",
            "raise it to 4096 or more: ulimit -n 4096",
        )
    topology = Topology()
    if len(topology.nodes) > 1:
        gpus = [str(node) for node in topology.gpus() if node is not None]
        where = f"GPUs are at {', '.join(gpus)}" if gpus else "no GPU says where it is"
        yield Finding("numa", Level.OK, f"{len(topology.nodes)} NUMA nodes; {where}")


def check_order(config: StackConfig) -> Iterator[Finding]:
    """What tiers get from those above them, where that may be another thing than was meant."""
    disk: int | None = None
    for tier, settings in enumerate(config.tiers):
        if settings.write is not WritePolicy.THROUGH:
            disk = None
            continue
        if tier and config.tiers[tier - 1].write is WritePolicy.ON_EVICT:
            yield Finding(
                f"{tier} {settings.kind}",
                Level.NOTE,
                f"gets what tier {tier - 1} has, and that only what the tier above it lets go",
                f"with write: through in tier {tier - 1} it gets every block at once",
            )
        in_files = backend(settings.kind).folder(settings) is not None
        if in_files and disk is not None:
            yield Finding(
                f"{tier} {settings.kind}",
                Level.NOTE,
                f"holds the same blocks as tier {disk}",
                "two disks that are joined to one file system (RAID 0, LVM) hold twice as many",
            )
        if in_files:
            disk = tier


def check_contents(config: StackConfig, tier: int) -> Iterator[Finding]:
    """What cannot be read of what lies there, as `ls` says it."""
    [inspector] = look(config, tier, Depth.NAMES)
    for trouble in inspector.contents.troubles:
        what, _, remedy = trouble.partition("; ")
        yield Finding(f"{tier} {inspector.kind}", Level.WARN, what, remedy)


def check_gds(config: StackConfig, tier: int) -> Iterator[Finding]:
    """Try what workers would: to read a tier's file straight into GPU memory."""
    settings, mode = config.tiers[tier], config.gds
    folder = backend(settings.kind).folder(settings)
    if mode is Gds.OFF or folder is None:
        return
    area = f"{tier} {settings.kind}"
    reason = probe_gds(folder)
    if reason is None:
        yield Finding(area, Level.OK, "GPUDirect Storage works here")
    elif mode is Gds.REQUIRE:
        yield Finding(
            area,
            Level.BAD,
            f"GPUDirect Storage is required, but {reason}",
            "mend that, or set gds: auto to go through pinned memory",
        )
    else:
        yield Finding(
            area,
            Level.NOTE,
            f"no GPUDirect Storage: {reason}",
            "blocks go through pinned memory, which is what most machines do",
        )


def check_rates(config: StackConfig) -> Iterator[Finding]:
    """What engines with this stack have learned of its speeds, with which the next one begins."""
    folder = rates_folder(config)
    if folder is None or config.load_policy is not LoadPolicy.COST_MODEL:
        return
    mine = (platform.node(), stack_of(config))
    known = [each for each in rates_in(folder) if (each.owner.machine, each.owner.stack) == mine]
    for kept in sorted(known, key=lambda each: -each.saved):
        whose = f"{_model_as_text(kept.owner.model)} on {kept.owner.device}"
        yield Finding("rates", Level.OK, f"{whose}: {_as_text(kept)}")
    standing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(standing, os.W_OK | os.X_OK):
        yield Finding(
            "rates",
            Level.NOTE,
            f"no right to write in {standing}: each start has to learn them anew",
            "name a folder in rates.path, or set XDG_STATE_HOME",
        )


def _model_as_text(facts: str) -> str:
    """A model's name and the type of its numbers, without what else tells it from others."""
    name, *rest = re.split(r" [0-9a-f]{32} ", facts, maxsplit=1)
    return " ".join([name, *(each.split(" ")[0].removeprefix("torch.") for each in rest)])


def _as_text(kept: SavedRates) -> str:
    """Rates, for people."""
    said = [f"{amounts.duration(max(0.0, time.time() - kept.saved))} old"]
    if (prefill := kept.rates.prefill) is not None:
        said.append(f"computes {1e3 / prefill.seconds_per_ktoken:,.0f} tokens/s")
    for name, link in sorted(kept.rates.links.items()):
        speed = f"{name} {amounts.duration(link.latency)} a load"
        if link.seconds_per_gib > 0:
            speed += f" and {amounts.rate((1 << 30) / link.seconds_per_gib)}"
        said.append(speed)
    return "; ".join(said)
