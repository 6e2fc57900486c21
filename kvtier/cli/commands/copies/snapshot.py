"""`kvtier snapshot`: what a stack holds, out to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.copying.copies import copy_all, look_to_copy
from kvtier.cli.copying.report import report
from kvtier.cli.copying.targets import store_of
from kvtier.cli.inspection.inspectors import inspector_of, troubles_of, where_of
from kvtier.config import StackConfig, load
from kvtier.errors import ConfigError
from kvtier.inspect import Reach
from kvtier.interfaces.backend import backend
from kvtier.settings import TierSettings

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
    inspectors = look_to_copy(stack, _own_tiers(stack), namespace)
    done = copy_all(
        stack, inspectors, target, tier, namespace=namespace, size=size, rate=rate, hottest=hottest
    )
    report(done, where_of(inspectors), troubles_of(inspectors), json)


def _check_apart(config: StackConfig, store: TierSettings) -> None:
    """Objects in a disk tier's folder would count there, and lose what describes them to `clear`;
    raises ConfigError."""
    where = str(backend(store.kind).identity(store))
    for tier in _own_tiers(config):
        settings = config.tiers[tier]
        home = backend(settings.kind).identity(settings)
        if home and Path(where).is_relative_to(home):
            kept = f"lies where tier {tier} ({settings.kind}) keeps its blocks"
            raise ConfigError(where, kept, "name another")


def _own_tiers(config: StackConfig) -> list[int]:
    """All but stores: what would be lost with this machine."""
    every = range(len(config.tiers))
    return [tier for tier in every if inspector_of(config, tier).reach is not Reach.SHARED]
