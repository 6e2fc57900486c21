"""`kvtier clear`: remove blocks, all of a stack's or one namespace's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import (
    AnyInspector,
    end_with_troubles,
    look,
    unsupported_is_trouble,
)
from kvtier.cli.inspection.namespaces import find_namespace
from kvtier.config import load
from kvtier.inspect import Cleared, Part, Reach
from kvtier.observe import human

app = console.new_app()


@app.command(
    epilog="Examples: kvtier clear -c stack.yaml; kvtier clear 3f2a -c stack.yaml --tier nvme --yes"
)
def clear(
    config: options.ConfigOption,
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="NAMESPACE", help="Only this namespace; its first digits will do."),
    ] = None,
    tier: options.TierOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Remove all blocks of a stack, of one tier, or of one namespace. It asks first.

    What a running engine uses stays: stop it first. Objects in a store are removed all the same,
    for all servers that share it, which then count misses. Exit code 1 if anything stays.
    """
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
        size = human.size(sum(part.bytes for part in every))
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
    size = human.size(sum(each.bytes for each in removed))
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
