"""Which tier a copy fills, or comes from, and how much may go there."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import inspector_of
from kvtier.config import StackConfig, load
from kvtier.errors import BackendError, ConfigError, KVTierError, NotWritable
from kvtier.inspect import Reach
from kvtier.interfaces.backend import backend, kinds
from kvtier.settings import TierSettings

IntoOption = Annotated[
    str | None,
    typer.Option("--into", metavar="TIER", help="The tier to fill; else the first on a disk."),
]
_FILL_SHARE = 0.95
"""Of a tier's capacity: beyond it, the last blocks would push out the first."""


def tier_to_fill(config: StackConfig, into: str | None) -> int:
    """The tier that an option names, or the first one on a disk of this machine."""
    tier = options.tier_of(into, config, "--into")
    if tier is None:
        disks = tiers_of(config, Reach.MACHINE)
        if not disks:
            raise KVTierError("this stack has no nvme tier to fill: name one with --into")
        tier = disks[0]
    inspector = inspector_of(config, tier)
    if not inspector.filling().keeps():
        raise KVTierError(
            f"tier {tier} ({inspector.kind}) keeps nothing when a process ends, and so nothing of "
            "what this one copies: name another with --into, or set its persistence: keep"
        )
    return tier


def store_of(
    text: str | None, config: StackConfig, *, to_write: bool = True
) -> tuple[StackConfig, int]:
    """The store that a url, another stack file, or the stack itself names."""
    if text is not None and "://" in text:
        settings = _store_at(text)
        try:
            backend(settings.kind).check(settings, None)
        except ConfigError as error:
            if to_write or not isinstance(error, NotWritable):
                shown = "this url" if re.search("[@?]", text) else text  # a password, a signature
                raise ConfigError(shown, error.problem, error.remedy) from error
        found = msgspec.structs.replace(config, tiers=(config.tiers[0], settings))
        folder = inspector_of(found, 1).folder()
        if not to_write and folder is not None and not folder.exists():
            raise ConfigError(text, "there is no such folder", "name one that holds a snapshot")
        return found, 1
    if text is not None and Path(text).is_dir():
        raise ConfigError(text, "is a folder", f"write {Path(text).resolve().as_uri()}")
    if text is not None and not Path(text).exists():
        remedy = "write s3://bucket/prefix or file:///folder, or name a stack with a store"
        raise ConfigError(text, "neither a url nor a stack file", remedy)
    other = config if text is None else load(Path(text), to_write=to_write)
    stores = tiers_of(other, Reach.SHARED)
    if len(stores) == 1:
        return other, stores[0]
    where = "this stack" if text is None else text
    count = f"{len(stores)} object tiers" if stores else "no object tier"
    raise KVTierError(f"{where} has {count}: name a url, like s3://bucket/prefix")


def _store_at(url: str) -> TierSettings:
    """The store at a url, of the kind of another package that takes it, or of a built-in one."""
    ours = kinds(built_in=True)
    for kind in [*(each for each in kinds() if each not in ours), *ours]:
        with suppress(BackendError):  # a package that is broken is none of this command's
            settings: TierSettings | None = backend(kind).at_url(url)
            if settings is not None:
                return settings
    raise ConfigError(url, "no kind of tier takes this url", "name a store, like s3://bucket/kv")


def tiers_of(config: StackConfig, reach: Reach) -> list[int]:
    """The tiers whose medium is host memory, a disk of this machine, or a store, as asked."""
    every = range(len(config.tiers))
    return [tier for tier in every if inspector_of(config, tier).reach is reach]


def room_in(target: StackConfig, tier: int, size: int | None) -> int:
    """How many bytes may be copied into a tier, at most so many."""
    most = int(inspector_of(target, tier).capacity() * _FILL_SHARE)
    return most if size is None else min(most, size)
