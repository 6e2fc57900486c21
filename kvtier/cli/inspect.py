"""How commands look at a stack: the inspectors of its tiers, and namespaces as people name them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvtier import amounts
from kvtier.cli import console
from kvtier.config import StackConfig
from kvtier.errors import ConfigError, KVTierError, Unsupported
from kvtier.inspect import (
    Block,
    Depth,
    Inspector,
    InspectorContext,
    Part,
    Prover,
    Reporter,
)
from kvtier.inspect.contents import Bar
from kvtier.interfaces.backend import backend
from kvtier.types import Namespace

AnyInspector = Inspector[Any]
Inspectors = Sequence[AnyInspector]
Item = TypeVar("Item")
Result = TypeVar("Result")

BYTES_MAX = 512 << 20
"""The memory of all items that `bounded_map` works on; one that takes more than this goes alone."""
_WINDOW = 4
"""Items under way for each thread."""


class ConsoleReporter(Reporter):
    """Says what inspectors have to say."""

    def warn(self, text: str) -> None:
        console.warn(text)

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        with console.progress(what, total, unit) as bar:
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


@contextmanager
def provers_of(inspectors: Inspectors) -> Iterator[dict[int, Prover]]:
    """What reads the blocks of each tier and checks their records."""
    known = known_namespaces(inspectors)
    provers = {each.tier: each.prover(known) for each in inspectors}
    try:
        yield provers
    finally:
        for each in provers.values():
            each.close()


@contextmanager
def unsupported_is_trouble(inspector: AnyInspector) -> Iterator[None]:
    """What a kind of tier cannot do is a trouble of that tier, and ends no command."""
    try:
        yield
    except Unsupported as error:
        inspector.contents.troubles.append(str(error))


def troubles_of(inspectors: Inspectors) -> list[str]:
    """What could not be read of all these."""
    return [trouble for each in inspectors for trouble in each.contents.troubles]


def end_with_troubles(inspectors: Inspectors, *, failed: bool = False) -> None:
    """Say what could not be read; end with a failure if there is any of it, or something failed."""
    if _warn_of_troubles(inspectors) or failed:
        raise typer.Exit(console.EXIT_FAILURE)


def looked_at(inspectors: Inspectors) -> str:
    """Where something is not that was looked for: it may be in what could not be read, so that is
    said before."""
    return "in what can be seen" if _warn_of_troubles(inspectors) else "here"


def _warn_of_troubles(inspectors: Inspectors) -> bool:
    troubles = troubles_of(inspectors)
    for trouble in troubles:
        console.warn(trouble)
    return bool(troubles)


def find_namespace(inspectors: Inspectors, text: str) -> str:
    """The one namespace whose id begins so; raises KVTierError if there is none or several."""
    if not text:
        raise KVTierError("an empty text names no namespace: give its first digits, or none at all")
    ids = {part.namespace for part in parts_of(inspectors)}
    ids |= known_namespaces(inspectors).keys()
    found = sorted(each for each in ids if each.startswith(text.lower()))
    if len(found) == 1:
        return found[0]
    if not found:
        where = looked_at(inspectors)
        raise KVTierError(f"no namespace {where} begins with {text!r}: kvtier ls shows all")
    raise KVTierError(f"{len(found)} namespaces begin with {text!r}: give more of its digits")


def asked_namespace(
    inspectors: Inspectors, known: Mapping[str, Namespace], wanted: str | None, model: str | None
) -> str:
    """The namespace that is asked about: named, or of those of the model that is named the one in
    use, or with the newest block."""
    if wanted is not None:
        name = find_namespace(inspectors, wanted)
        if name not in known:
            raise KVTierError(f"nothing here says what {name} means: its namespace.json is missing")
        return name
    if model is not None:
        called = {Path(model).absolute().name, Path(model).resolve().name}
        of_it = {name: each for name, each in known.items() if each.model in called}
        if not of_it:
            console.warn(
                f"nothing here is of a model called {model}: its tokenizer is all it gives"
            )
        known = of_it or known
    parts = [part for part in parts_of(inspectors) if part.namespace in known]
    if not parts:
        return min(known)
    return max(parts, key=lambda part: (part.in_use is True, part.newest or 0.0)).namespace


def say_two_names(known: Mapping[str, Namespace]) -> None:
    """Say which namespaces are one model's that was served under several names."""
    alike: dict[tuple[object, ...], dict[str, str]] = {}
    for each, namespace in sorted(known.items()):
        facts = dict(namespace.facts)
        name = facts.pop("model", None)
        facts.pop("model_config", None)  # the name stands in it, too
        if name is not None and "weights" in facts:
            same = (tuple(sorted(facts.items())), namespace.group_bytes, namespace.parts)
            alike.setdefault(same, {})[each] = name
    for names in alike.values():
        if len(names) > 1:
            console.say()
            which = ", ".join(f"{each[:12]} ({name})" for each, name in names.items())
            console.say_wrapped(
                f"the same weights under several names: {which}; they share no blocks: serve them "
                "under one name, and kvtier clear removes the blocks of the others",
                2,
            )


def in_use(part: Part) -> str:
    """Whether an engine has it open, where that can be seen."""
    return "-" if part.in_use is None else "yes" if part.in_use else "no"


def count(hits: int | None) -> str:
    """How often something was used, where that is known."""
    return "-" if hits is None else str(hits)


def age(at: float | None) -> str:
    """How long ago something was, if it was, and the medium remembers that."""
    return "-" if not at else amounts.age(time.time() - at)


def left(until: float) -> str:
    """How long it is until something."""
    return amounts.duration(max(0.0, until - time.time()))


def bounded_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    bytes_of: Callable[[Item], int],
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in order; ends at once if it is closed or interrupted. `bytes_of`
    says what memory an item takes until its result has been handed out."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    taken = 0
    try:
        for item in items:
            size = bytes_of(item)
            while waiting and (len(waiting) >= threads * _WINDOW or taken + size > BYTES_MAX):
                first, future = waiting.popleft()
                taken -= bytes_of(first)
                yield first, future.result()
                del future  # which keeps the result
            waiting.append((item, pool.submit(function, item)))
            taken += size
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
            del future
    finally:
        pool.shutdown(cancel_futures=True)
