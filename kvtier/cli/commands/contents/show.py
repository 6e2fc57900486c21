"""`kvtier show`: all there is to know of one namespace or of one block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import (
    Inspectors,
    Provers,
    end_with_troubles,
    known_namespaces,
    look,
    looked_at,
    parts_of,
    troubles_of,
)
from kvtier.cli.inspection.namespaces import age, count, find_namespace, in_use, left
from kvtier.config import load
from kvtier.core.retained.retained_blocks import PINNED
from kvtier.errors import KVTierError
from kvtier.inspect import Block, Depth, Hold
from kvtier.observe import human
from kvtier.types import KEY_BYTES_MAX, Difference, Namespace, group_of

app = console.new_app()

_DIGITS_MIN = 4
_BLOCKS_MAX = 64


@app.command(epilog="Examples: kvtier show 3f2a -c stack.yaml; kvtier show 9c01d2e4 --json")
def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|NAMESPACE", help="The first digits of a namespace, or of a block's key."
        ),
    ],
    config: options.ConfigOption,
    json: options.JsonOption = False,
) -> None:
    """Show the facts that a namespace stands for, and those in which others of its model differ; or
    every copy of a block, read and checked.

    It reads from outside: a running engine does not notice. Exit code 1 if nothing was found, or if
    a copy of the block is bad.
    """
    text = what.lower()
    if len(text) < _DIGITS_MIN or set(text) - set("0123456789abcdef"):
        raise typer.BadParameter(
            f"give at least {_DIGITS_MIN} hexadecimal digits", param_hint="KEY|NAMESPACE"
        )
    stack = load(config, to_write=False)
    inspectors = look(stack, depth=Depth.NAMES, uses_of="")
    known = known_namespaces(inspectors)
    ids = known.keys() | {part.namespace for part in parts_of(inspectors)}
    bad = False
    if any(each.startswith(text) for each in ids):
        name = find_namespace(inspectors, text)
        inspectors = look(stack, uses_of="")
        _show_namespace(name, known_namespaces(inspectors), inspectors, json)
    else:
        bad = _show_blocks(inspectors, known, text, json)
    end_with_troubles(inspectors, failed=bad)


def _show_namespace(
    name: str, known: Mapping[str, Namespace], inspectors: Inspectors, json: bool
) -> None:
    namespace = known.get(name)
    parts = [part for part in parts_of(inspectors) if part.namespace == name]
    apart = _apart(name, known)
    if json:
        console.print_json(
            {
                "namespace": name,
                "facts": namespace.facts if namespace else None,
                "group_bytes": namespace.group_bytes if namespace else None,
                "parts": namespace.parts if namespace else None,
                "tiers": msgspec.to_builtins(parts),
                "differs": msgspec.to_builtins(apart),
                "troubles": troubles_of(inspectors),
            }
        )
        return
    console.say(f"namespace {name}")
    if namespace is None:
        console.say("its description is not here: only its digest is known")
    else:
        sizes = ", ".join(human.size(size) for size in namespace.group_bytes)
        console.print_values(
            {**namespace.facts, "block of each group": sizes, "parts": namespace.parts}
        )
    console.say()
    console.print_table(
        ["tier", "blocks", "size", "hits", "last hit", "quarantined", "retained", "in use"],
        [
            [
                f"{part.tier} {part.kind}",
                part.blocks,
                human.size(part.bytes),
                count(part.hits),
                age(part.used),
                part.quarantined,
                part.retained,
                in_use(part),
            ]
            for part in parts
        ],
        numbers=["blocks", "size", "hits", "last hit", "quarantined", "retained"],
    )
    for other, differences in apart.items():
        console.say()
        console.say(f"the same model's namespace {other[:12]} is another, because")
        for each in differences:
            console.say_wrapped(f"  {each}", 4)


def _apart(name: str, known: Mapping[str, Namespace]) -> dict[str, list[Difference]]:
    """In what a namespace differs from the others of its model."""
    namespace = known.get(name)
    if namespace is None:
        return {}
    return {
        other: namespace.differences(each)
        for other, each in sorted(known.items())
        if other != name and each.model == namespace.model
    }


def _show_blocks(
    inspectors: Inspectors,
    known: dict[str, Namespace],
    text: str,
    json: bool,
) -> bool:
    """Show all whose keys begin like this; whether one of them is bad."""
    found: list[Block] = []
    for each in inspectors:
        for block in each.blocks(begins=[text[: 2 * KEY_BYTES_MAX]]):
            if block.key.hex().startswith(text):
                found.append(block)
        if len(found) > _BLOCKS_MAX:
            raise KVTierError(f"many blocks begin with {text!r}: give more digits of the key")
    if not found:
        where = looked_at(inspectors)
        raise KVTierError(f"no block and no namespace {where} begins with {text!r}: see kvtier ls")
    holds = {
        (each.tier, name): each.holds(name)
        for each in inspectors
        for name in {block.namespace for block in found}
    }
    with Provers(inspectors, known) as provers:
        rows = [
            _describe(block, provers, holds[block.tier, block.namespace].get(block.key, ()))
            for block in found
        ]
    if json:
        console.print_json(rows)
    else:
        for index, row in enumerate(rows):
            if index:
                console.say()
            shown = {
                **row,
                "bytes": human.size(row["bytes"]),
                "age": age(row["stored_at"]),
                "hits": count(row["hits"]),
                "last hit": age(row["used"]),
                "retained": "; ".join(map(_said_of, row["retained"])) or "no",
            }
            del shown["stored_at"], shown["used"]
            console.print_values(shown)
    return any(row["record"].startswith("bad") for row in rows)


def _said_of(hold: Mapping[str, Any]) -> str:
    session = hold["session"]
    who = "pinned" if session == PINNED else f"session {session}" if session else "no session"
    end = "until it is unpinned" if hold["until"] is None else f"for {left(hold['until'])}"
    return f"{who}, {end}"


def _describe(block: Block, provers: Provers, holds: Sequence[Hold]) -> dict[str, Any]:
    if block.quarantined:
        record = "quarantined: it failed its check when it was read"
    else:
        proof, why, _ = provers.prove(block)
        record = f"{proof.value}: {why}" if why else proof.value
    return {
        "key": block.key.hex(),
        "group": group_of(block.key),
        "namespace": block.namespace,
        "tier": f"{block.tier} {block.kind}",
        "where": block.where,
        "bytes": block.bytes,
        "stored_at": block.stored_at,
        "hits": block.hits,
        "used": block.used,
        "retained": [
            {"session": hold.session, "until": None if hold.until == math.inf else hold.until}
            for hold in holds
        ],
        "record": record,
    }
