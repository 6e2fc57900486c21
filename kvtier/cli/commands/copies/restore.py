"""`kvtier restore`: what a snapshot has, back into a stack."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.copying.copies import copy_all, look_to_copy
from kvtier.cli.copying.report import report
from kvtier.cli.copying.targets import IntoOption, room_in, store_of, tier_to_fill
from kvtier.cli.inspection.inspectors import troubles_of, where_of
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
    (store,) = look_to_copy(stack, [from_tier], namespace)
    found = store.contents
    if found.troubles and not found.parts:
        raise KVTierError(found.troubles[0])
    store.complete((namespace or "").lower(), room_in(target, tier, size))
    if source is not None and not any(part.blocks for part in found.parts):
        raise KVTierError(f"there are no blocks in {found.where}: see that it is the right place")
    done = copy_all(
        stack, [store], target, tier, namespace=namespace, size=size, rate=rate, hottest=hottest
    )
    report(done, where_of([store]), troubles_of([store]), json)
