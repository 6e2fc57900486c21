"""The inspectors of a stack's tiers, and what they have found together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import typer

from kvtier.cli.console.exits import EXIT_FAILURE
from kvtier.cli.console.output import warn
from kvtier.cli.console.progress import progress
from kvtier.config import StackConfig
from kvtier.errors import ConfigError, Unsupported
from kvtier.inspect import (
    Block,
    Depth,
    Inspector,
    InspectorContext,
    Part,
    Prover,
    Reporter,
    Verdict,
)
from kvtier.inspect.contents import Bar
from kvtier.interfaces.backend import backend
from kvtier.types import Namespace

AnyInspector = Inspector[Any]
Inspectors = Sequence[AnyInspector]


class ConsoleReporter(Reporter):
    """Says what inspectors have to say."""

    def warn(self, text: str) -> None:
        warn(text)

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        with progress(what, total, unit) as bar:
            yield bar


def inspector_of(config: StackConfig, tier: int) -> AnyInspector:
    """The inspector of one tier, which has not looked yet."""
    settings = config.tiers[tier]
    return backend(settings.kind).open_inspector(
        settings, InspectorContext(tier, config.name, ConsoleReporter(), config.retain.share)
    )


def look(
    config: StackConfig,
    tiers: int | Iterable[int] | None = None,
    depth: Depth = Depth.COUNTED,
    uses_of: str | None = None,
) -> list[AnyInspector]:
    """Every tier of a stack, or some, looked at as far as they can be seen: a disk that is dead
    hides no other. How often blocks were used is read of namespaces that begin with `uses_of`."""
    if tiers is None:
        tiers = range(len(config.tiers))
    chosen = [tiers] if isinstance(tiers, int) else tiers
    inspectors = [inspector_of(config, tier) for tier in chosen]
    for each in inspectors:
        each.look(depth, uses_of)
    return inspectors


def unusable_here(config: StackConfig) -> list[ConfigError]:
    """Why this user cannot open tiers whose settings are right: an engine would not start. Makes no
    request."""
    every = (inspector_of(config, tier).unusable() for tier in range(len(config.tiers)))
    return [error for error in every if error is not None]


def parts_of(inspectors: Inspectors) -> list[Part]:
    """What all of them hold."""
    return [part for each in inspectors for part in each.contents.parts]


def blocks_of(
    inspectors: Inspectors, namespace: str = "", begins: Sequence[str] = ("",)
) -> Iterator[Block]:
    """The blocks that all of them hold."""
    for each in inspectors:
        yield from each.blocks(namespace, begins)


def known_namespaces(inspectors: Inspectors) -> dict[str, Namespace]:
    """All namespaces whose description lies somewhere."""
    return {name: each for one in inspectors for name, each in one.contents.namespaces.items()}


class Provers:
    """Reads blocks of several tiers and checks their records."""

    def __init__(self, inspectors: Inspectors, namespaces: Mapping[str, Namespace]) -> None:
        self._by_tier: dict[int, Prover] = {
            each.tier: each.prover(namespaces) for each in inspectors
        }

    def prove(self, block: Block) -> Verdict:
        """Read a block's record; what it is worth."""
        return self._by_tier[block.tier].prove(block)

    def bytes_of(self, block: Block) -> int:
        """The memory that a block's proof takes, its record included."""
        return self._by_tier[block.tier].bytes_of(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._by_tier.values():
            each.close()


@contextmanager
def unsupported_is_trouble(inspector: AnyInspector) -> Iterator[None]:
    """What a kind of tier cannot do is a trouble of that tier, and ends no command."""
    try:
        yield
    except Unsupported as error:
        inspector.contents.troubles.append(str(error))


def where_of(inspectors: Inspectors) -> str:
    """Where all these look."""
    return ", ".join(each.contents.where for each in inspectors)


def troubles_of(inspectors: Inspectors) -> list[str]:
    """What could not be read of all these."""
    return [trouble for each in inspectors for trouble in each.contents.troubles]


def end_with_troubles(inspectors: Inspectors, *, failed: bool = False) -> None:
    """Say what could not be read; end with a failure if there is any of it, or something failed."""
    if _warn_of_troubles(inspectors) or failed:
        raise typer.Exit(EXIT_FAILURE)


def looked_at(inspectors: Inspectors) -> str:
    """Where something is not that was looked for: it may be in what could not be read, so that is
    said before."""
    return "in what can be seen" if _warn_of_troubles(inspectors) else "here"


def _warn_of_troubles(inspectors: Inspectors) -> bool:
    troubles = troubles_of(inspectors)
    for trouble in troubles:
        warn(trouble)
    return bool(troubles)
