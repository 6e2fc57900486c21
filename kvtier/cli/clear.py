"""`kvtier clear` and `kvtier gc`: remove blocks, and what nobody will ask for again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.inspect import (
    AnyInspector,
    Inspectors,
    end_with_troubles,
    find_namespace,
    look,
    troubles_of,
    unsupported_is_trouble,
)
from kvtier.config import load
from kvtier.errors import KVTierError, describe_error
from kvtier.inspect import Cleared, Depth, Garbage, Part, Reach

app = options.new_app()


@app.command(
    epilog="Examples: kvtier clear -c stack.yaml; kvtier clear 3f2a -c stack.yaml --tier nvme "
    "--yes; kvtier gc -c stack.yaml --dry-run; kvtier gc -c stack.yaml --idle 30d"
)
def clear(
    config: options.ConfigOption,
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="NAMESPACE", help="Only this namespace; its first digits will do."),
    ] = None,
    tier: options.TierOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    garbage: Annotated[
        bool, typer.Option("--garbage", help="Only what nobody will ask for again: `kvtier gc`.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of garbage: only show what would be removed.")
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(
            parser=options.parse_duration,
            metavar="AGE",
            help="Of garbage: also namespaces and this stack's CPU memory, if unused for so long.",
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Remove all blocks of a stack, of one tier, or of one namespace. It asks first.

    What a running engine uses stays: stop it first. Objects in a store are removed all the same,
    for all servers that share it, which then count misses. Exit code 1 if anything stays.

    `kvtier gc` (the same as `clear --garbage`) removes only what nobody will ask for again: CPU
    memory that no engine will come back to, unfinished files of dead processes, slabs beyond the
    capacity, what killed measurements left on disks and in stores, and descriptions of namespaces
    of a store that have no block left. It does not ask. Exit code 1 if something could not be
    removed or read.
    """
    options.only_with("--garbage", garbage or None, dry_run=dry_run, idle=idle)
    if garbage:
        if namespace is not None:
            raise typer.BadParameter("garbage is of no namespace: leave it out")
        _collect_garbage(config, tier, idle, dry_run=dry_run, json=json)
        return
    stack = load(config, to_write=False)  # each tier says what may not be done there
    inspectors = look(stack, options.tier_of(tier, stack))
    chosen = "" if namespace is None else find_namespace(inspectors, namespace)
    found = [
        (each, parts)
        for each in inspectors
        if (parts := [part for part in each.contents.parts if part.namespace.startswith(chosen)])
    ]
    if found:
        every = [part for _, parts in found for part in parts]
        blocks = sum(part.blocks for part in every)
        size = amounts.size(sum(part.bytes for part in every))
        tiers = ", ".join(_named(each) for each, _ in found)
        console.confirm(f"Remove {blocks} blocks ({size}) from {tiers}?", yes)
    done = [cleared for each, parts in found for cleared in _clear(each, parts)]
    if json:
        console.print_json(done)
    else:
        _say_removed([each for each in done if not each.kept], [each for each, _ in found])
    kept = [each for each in done if each.kept]
    for each in kept:
        console.warn(each.kept)
    end_with_troubles(inspectors, failed=bool(kept))


def _say_removed(removed: Sequence[Cleared], inspectors: Sequence[AnyInspector]) -> None:
    """Also from which tiers: with --yes nobody was told that a store is emptied, too."""
    size = amounts.size(sum(each.bytes for each in removed))
    said = f"{sum(each.blocks for each in removed)} blocks ({size}) were removed"
    emptied = {each.tier for each in removed if each.blocks}
    tiers = ", ".join(_named(each) for each in inspectors if each.tier in emptied)
    console.say_wrapped(f"{said} from {tiers}" if tiers else said)


def _named(inspector: AnyInspector) -> str:
    named = f"{inspector.tier} {inspector.kind}"
    if inspector.reach is not Reach.SHARED:
        return named
    return f"{named} ({inspector.contents.where}, which other servers may share)"


def _clear(inspector: AnyInspector, parts: Sequence[Part]) -> Iterator[Cleared]:
    with unsupported_is_trouble(inspector):
        for part in parts:
            yield from inspector.clear(part)


class GarbageRow(msgspec.Struct):
    """Something that was found, and whether it is gone."""

    what: str
    where: str
    bytes: int
    removed: bool = False


def _collect_garbage(
    config: Path, tier: str | None, idle: float | None, *, dry_run: bool, json: bool
) -> None:
    """`kvtier clear --garbage`."""
    stack = load(config, to_write=False)  # each tier says what may not be done there
    # Of a store that is for what is idle alone: for all else it is listed anyway.
    depth = Depth.NAMES if idle is None else Depth.COUNTED
    inspectors = look(stack, options.tier_of(tier, stack), depth)
    rows, refused = _collect(find_garbage(inspectors, idle), dry_run)
    if json:
        troubles = troubles_of(inspectors) + refused
        console.print_json({"dry_run": dry_run, "found": rows, "troubles": troubles})
    elif rows:
        _show_garbage(rows, dry_run)
    elif not refused:
        unseen = bool(troubles_of(inspectors))
        console.say("there is nothing to remove" + (" in what can be seen" if unseen else ""))
    for said in refused:
        console.warn(said)
    end_with_troubles(inspectors, failed=bool(refused))


def find_garbage(inspectors: Inspectors, idle_s: float | None) -> Iterator[Garbage]:
    """All garbage of these tiers, of what is idle for `idle_s` seconds too. Two tiers may find one
    and the same in a folder that both are in."""
    seen: set[tuple[str, str]] = set()
    for inspector in inspectors:
        if inspector.contents.unseen:  # why is said already
            continue
        with unsupported_is_trouble(inspector):
            for each in inspector.garbage(idle_s):
                if (each.what, each.where) not in seen:
                    seen.add((each.what, each.where))
                    yield each


def _collect(garbage: Iterable[Garbage], dry_run: bool) -> tuple[list[GarbageRow], list[str]]:
    """What was found and what became of it; and why some of it stays."""
    rows: list[GarbageRow] = []
    refused: list[str] = []
    kept = 0
    for each in garbage:
        rows.append(GarbageRow(each.what, each.where, each.bytes))
        try:
            rows[-1].removed = not dry_run and each.remove()
            kept += not dry_run and not rows[-1].removed
        except (KVTierError, OSError) as error:
            refused.append(describe_error(error))
    if kept:
        refused.append(f"{kept} of them are in use again and stay")
    return rows, refused


def _show_garbage(rows: Sequence[GarbageRow], dry_run: bool) -> None:
    console.print_table(
        ["what", "where", "size"],
        [[row.what, row.where, amounts.size(row.bytes)] for row in rows],
        numbers=["size"],
    )
    counted = [row for row in rows if dry_run or row.removed]
    total = amounts.size(sum(row.bytes for row in counted))
    verb = "would be" if dry_run else "was" if len(counted) == 1 else "were"
    console.say(f"{len(counted)} {verb} removed ({total})")
