"""`kvtier clear`: remove blocks, all of a stack's or one namespace's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console, options
from kvtier.cli.hold import remove_region
from kvtier.cli.holdings import Part, Place, look
from kvtier.cli.namespaces import find_namespace
from kvtier.cli.rubbish import remove_home
from kvtier.config import StackConfig, load
from kvtier.core.slab.layout import committed
from kvtier.errors import KVTierError, MediumInUse
from kvtier.observe import human

app = console.new_app()


class Cleared(msgspec.Struct):
    """What became of one tier's part of a namespace, or of one region of host memory; `kept` says
    why it stays."""

    tier: int
    kind: str
    namespace: str
    blocks: int
    bytes: int = 0
    kept: str = ""


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
    places = look(stack, options.tier_of(tier, stack))
    chosen = "" if namespace is None else find_namespace(places, namespace)
    parts = [
        (place, part)
        for place in places
        for part in place.parts
        if part.namespace.startswith(chosen)
    ]
    if parts:
        blocks = sum(part.blocks for _, part in parts)
        size = human.size(sum(part.bytes for _, part in parts))
        tiers = ", ".join(dict.fromkeys(_named(place) for place, _ in parts))
        console.confirm(f"Remove {blocks} blocks ({size}) from {tiers}?", yes)
    done = [each for place, part in parts for each in _clear(stack, place, part)]
    if json:
        console.print_json(done)
    else:
        removed = [each for each in done if not each.kept]
        size = human.size(sum(each.bytes for each in removed))
        console.say(f"{sum(each.blocks for each in removed)} blocks ({size}) were removed")
    kept = [each for each in done if each.kept]
    for each in kept:
        console.warn(each.kept)
    console.end_with_troubles(places, failed=bool(kept))


def _named(place: Place) -> str:
    shared = f" ({place.where}, which other servers may share)" if place.kind == "object" else ""
    return f"{place.tier} {place.kind}{shared}"


def _clear(config: StackConfig, place: Place, part: Part) -> Iterator[Cleared]:
    if place.kind == "cpu":  # one region may be in use, and another not
        for slab in place.slabs:
            if slab.namespace == part.namespace:
                blocks = len(committed(slab.entries()))
                done = Cleared(part.tier, part.kind, part.namespace, blocks)
                done.bytes = blocks * slab.header.slot_bytes
                yield _tried(done, partial(remove_region, slab.table))
    else:
        done = Cleared(part.tier, part.kind, part.namespace, part.blocks, part.bytes)
        yield _tried(done, partial(_remove, config, place, part.namespace))


def _tried(done: Cleared, remove: Callable[[], None]) -> Cleared:
    try:
        remove()
    except (KVTierError, OSError) as error:
        done.kept = console.said_of(error)
    return done


def _remove(config: StackConfig, place: Place, namespace: str) -> None:
    if place.kind == "nvme":
        home = Path(place.where) / namespace
        if not remove_home(home.parent, home):
            raise MediumInUse(f"{home} is in use: stop its engines first")
        if not home.exists():
            _went_too(place, f"{home}/")
    elif place.kind == "object":
        from kvtier.cli.look_objects import closed, remove_namespace

        remove_namespace(config.tiers[place.tier], namespace)
        _went_too(place, closed(place, namespace))


def _went_too(place: Place, begins: str) -> None:
    """What could not be read of what is gone is no trouble any more."""
    place.troubles = [said for said in place.troubles if not said.startswith(begins)]
