"""`kvtier snapshot`: what a stack holds, out to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console, options
from kvtier.cli.fill import copy_all, look_at, report, store_of
from kvtier.config import StackConfig, load
from kvtier.core.interfaces.backend import backend
from kvtier.core.settings import TierSettings
from kvtier.errors import ConfigError

app = console.new_app()


@app.command(
    epilog="Examples: kvtier snapshot -c stack.yaml --to s3://bucket/kv; "
    "kvtier snapshot -c stack.yaml --size 50GiB"
)
def snapshot(
    config: options.ConfigOption,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL|FILE",
            help="A store, or a stack that has one; else this stack's own.",
        ),
    ] = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy blocks of host memory and disks to an object store, the newest first.

    The stack may be in use: a running engine does not notice. Nothing is copied twice. Exit code 1
    if something could not be copied.
    """
    stack = load(config, to_write=to is None)
    target, tier = store_of(to, stack)
    _check_apart(stack, target.tiers[tier])
    kept = [index for index, settings in enumerate(stack.tiers) if settings.kind != "object"]
    places = look_at(stack, kept, namespace)
    done = copy_all(
        stack, places, target, tier, namespace=namespace, size=size, rate=rate, hottest=hottest
    )
    report(done, places, json)


def _check_apart(config: StackConfig, store: TierSettings) -> None:
    """Objects in a disk tier's folder would count there, and lose what describes them to `clear`;
    raises ConfigError."""
    where = str(backend(store.kind).identity(store))
    for tier, settings in enumerate(config.tiers):
        home = backend(settings.kind).identity(settings)
        if settings.kind != "object" and home and Path(where).is_relative_to(home):
            kept = f"lies where tier {tier} ({settings.kind}) keeps its blocks"
            raise ConfigError(where, kept, "name another")
