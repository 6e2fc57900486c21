"""`kvtier gc`: remove what nobody will ask for again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import (
    Inspectors,
    end_with_troubles,
    look,
    troubles_of,
    unsupported_is_trouble,
)
from kvtier.config import load
from kvtier.errors import KVTierError
from kvtier.inspect import Depth, Garbage
from kvtier.observe import human

app = console.new_app()


class Row(msgspec.Struct):
    """Something that was found, and whether it is gone."""

    what: str
    where: str
    bytes: int
    removed: bool = False


@app.command(
    epilog="Examples: kvtier gc -c stack.yaml --dry-run; kvtier gc -c stack.yaml --idle 30d"
)
def gc(
    config: options.ConfigOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(
            parser=options.parse_duration,
            metavar="AGE",
            help="Also namespaces and this stack's CPU memory, if unused for so long.",
        ),
    ] = None,
    tier: options.TierOption = None,
    json: options.JsonOption = False,
) -> None:
    """Remove what nobody will ask for again: CPU memory that no engine will come back to,
    unfinished files of dead processes, slabs beyond the capacity, what killed measurements left on
    disks and in stores, and descriptions of namespaces of a store that have no block left.

    What a running engine uses stays, and so does what is not kvtier's. Exit code 1 if something
    could not be removed or read.
    """
    stack = load(config, to_write=False)  # each tier says what may not be done there
    # Of a store that is for what is idle alone: for all else it is listed anyway.
    depth = Depth.NAMES if idle is None else Depth.COUNTED
    inspectors = look(stack, options.tier_of(tier, stack), depth)
    rows, refused = _collect(find(inspectors, idle), dry_run)
    if json:
        troubles = troubles_of(inspectors) + refused
        console.print_json({"dry_run": dry_run, "found": rows, "troubles": troubles})
    elif rows:
        _show(rows, dry_run)
    elif not refused:
        unseen = bool(troubles_of(inspectors))
        console.say("there is nothing to remove" + (" in what can be seen" if unseen else ""))
    for said in refused:
        console.warn(said)
    end_with_troubles(inspectors, failed=bool(refused))


def find(inspectors: Inspectors, idle_s: float | None) -> Iterator[Garbage]:
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


def _collect(garbage: Iterable[Garbage], dry_run: bool) -> tuple[list[Row], list[str]]:
    """What was found and what became of it; and why some of it stays."""
    rows: list[Row] = []
    refused: list[str] = []
    kept = 0
    for each in garbage:
        rows.append(Row(each.what, each.where, each.bytes))
        try:
            rows[-1].removed = not dry_run and each.remove()
            kept += not dry_run and not rows[-1].removed
        except (KVTierError, OSError) as error:
            refused.append(console.said_of(error))
    if kept:
        refused.append(f"{kept} of them are in use again and stay")
    return rows, refused


def _show(rows: Sequence[Row], dry_run: bool) -> None:
    console.print_table(
        ["what", "where", "size"],
        [[row.what, row.where, human.size(row.bytes)] for row in rows],
        numbers=["size"],
    )
    counted = [row for row in rows if dry_run or row.removed]
    total = human.size(sum(row.bytes for row in counted))
    verb = "would be" if dry_run else "was" if len(counted) == 1 else "were"
    console.say(f"{len(counted)} {verb} removed ({total})")
