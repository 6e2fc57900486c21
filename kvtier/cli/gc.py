"""`kvtier gc`: remove what nobody will ask for again."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.holdings import look
from kvtier.cli.rubbish import find
from kvtier.config import load
from kvtier.observe import human

app = console.new_app("Remove what nobody will ask for again.")


@app.command(
    epilog="Examples: kvtier gc -c stack.yaml --dry-run; kvtier gc -c stack.yaml --idle 30d"
)
def gc(
    config: console.ConfigOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(
            parser=console.parse_duration,
            metavar="AGE",
            help="Also namespaces and CPU memory of this stack that no engine used for so long.",
        ),
    ] = None,
    tier: console.TierOption = None,
    json: console.JsonOption = False,
) -> None:
    """Remove regions that nobody will come back to, files that dead processes were making, slabs
    beyond the capacity, folders of measurements that were killed, and what told of namespaces of
    a store that have no block left.

    What a running engine uses stays, and so does what is not kvtier's. Exit code 1 if something
    could not be removed or read.
    """
    stack = load(config)
    places = look(stack, console.tier_of(tier, stack), blocks=False)
    rows = []
    kept = 0
    for each in find(stack, places, idle):
        gone = not dry_run and each.remove()
        kept += not dry_run and not gone
        rows.append({"what": each.what, "where": each.where, "bytes": each.bytes, "removed": gone})
    if json:
        troubles = [trouble for place in places for trouble in place.troubles]
        console.print_json({"dry_run": dry_run, "found": rows, "troubles": troubles})
    elif not rows:
        console.say("there is nothing to remove")
    else:
        console.print_table(
            ["what", "where", "size"],
            [[row["what"], row["where"], human.size(float(str(row["bytes"])))] for row in rows],
            numbers=["size"],
        )
        counted = [row for row in rows if dry_run or row["removed"]]
        total = human.size(sum(int(str(row["bytes"])) for row in counted))
        verb = "would be" if dry_run else "was" if len(counted) == 1 else "were"
        console.say(f"{len(counted)} {verb} removed ({total})")
    if kept:
        console.warn(f"{kept} of them are in use again and stay")
        raise typer.Exit(console.EXIT_FAILURE)
    console.end_with_troubles(places)
