"""What `doctor` looks at beside tiers: versions, limits, GPUs, and the order of tiers."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterator

from kvtier.config import LoadPolicy, StackConfig
from kvtier.config.loader import machine, rates_folder, stack_of
from kvtier.cost.rates import SavedRates
from kvtier.cost.saved_rates import rates_in
from kvtier.device.direct.kvikio_driver import probe as probe_gds
from kvtier.errors import ConfigError
from kvtier.inspect import Finding, Level
from kvtier.interfaces.backend import backend
from kvtier.observe import human
from kvtier.settings import Gds, WritePolicy
from kvtier.system.numa import Topology
from kvtier.vllm.hooks.versions import installed, tested


def check_machine() -> Iterator[Finding]:
    """What concerns all tiers."""
    try:
        vllm = installed()
        kind = " (CPU build)" if vllm.cpu else ""
        if vllm.tested:
            yield Finding("vllm", Level.OK, f"vLLM {vllm.version}{kind} is supported")
        else:
            yield Finding(
                "vllm",
                Level.WARN,
                f"vLLM {vllm.version}{kind} was never tested, but has all that kvtier touches",
                f"tested are {tested()}",
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
    machine = Topology()
    if len(machine.nodes) > 1:
        gpus = [str(node) for node in machine.gpus() if node is not None]
        where = f"GPUs are at {', '.join(gpus)}" if gpus else "no GPU says where it is"
        yield Finding("numa", Level.OK, f"{len(machine.nodes)} NUMA nodes; {where}")


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
    mine = (machine(), stack_of(config))
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
    said = [f"{human.duration(max(0.0, time.time() - kept.saved))} old"]
    if (prefill := kept.rates.prefill) is not None:
        said.append(f"computes {1e3 / prefill.seconds_per_ktoken:,.0f} tokens/s")
    for name, link in sorted(kept.rates.links.items()):
        speed = f"{name} {human.duration(link.latency)} a load"
        if link.seconds_per_gib > 0:
            speed += f" and {human.rate((1 << 30) / link.seconds_per_gib)}"
        said.append(speed)
    return "; ".join(said)
