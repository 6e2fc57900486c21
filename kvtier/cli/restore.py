"""`kvtier restore`: what a snapshot has, back into a stack."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli import console, options
from kvtier.cli.fill import (
    IntoOption,
    copy_all,
    look_at,
    report,
    room_in,
    store_of,
    tier_to_fill,
)
from kvtier.cli.told import take_in_untold
from kvtier.config import load
from kvtier.errors import KVTierError

app = console.new_app()


@app.command(
    epilog="Examples: kvtier restore -c stack.yaml --from s3://bucket/kv; "
    "kvtier restore -c stack.yaml --size 50GiB --rate 1GB/s"
)
def restore(
    config: options.ConfigOption,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL|FILE",
            help="A store, or a stack that has one; else this stack's own.",
        ),
    ] = None,
    into: IntoOption = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy blocks from an object store into a tier, the newest first.

    Unlike prewarm it also lists the store, to find what was stored there by a command that was cut
    off before it wrote that down. Exit code 1 if something could not be copied, or if there is
    nothing where --from says.
    """
    target = load(config)
    stack, from_tier = store_of(source, target, to_write=False)
    tier = tier_to_fill(target, into)
    places = look_at(stack, [from_tier], namespace)
    if places[0].troubles and not places[0].parts:
        raise KVTierError(places[0].troubles[0])
    take_in_untold(stack, places, (namespace or "").lower(), room_in(target, tier, size))
    if source is not None and not any(part.blocks for place in places for part in place.parts):
        where = places[0].where
        raise KVTierError(f"there are no blocks in {where}: see that it is the right place")
    done = copy_all(
        stack, places, target, tier, namespace=namespace, size=size, rate=rate, hottest=hottest
    )
    report(done, places, json)
