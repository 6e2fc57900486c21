"""Namespaces as people name them, and what is shown of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kvtier.cli import console
from kvtier.cli.inspection.inspectors import Inspectors, known_namespaces, looked_at, parts_of
from kvtier.errors import KVTierError
from kvtier.inspect import Part
from kvtier.observe import human
from kvtier.types import Namespace


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
    """How long ago something was, if it was."""
    return "-" if at is None else human.duration(max(0.0, time.time() - at))


def left(until: float) -> str:
    """How long it is until something."""
    return human.duration(max(0.0, until - time.time()))
