"""`kvtier ls`: what is where, by namespace, or block by block."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import (
    Inspectors,
    blocks_of,
    end_with_troubles,
    known_namespaces,
    look,
    parts_of,
    troubles_of,
)
from kvtier.cli.inspection.namespaces import age, count, find_namespace, in_use, say_two_names
from kvtier.config import load
from kvtier.inspect import Block, Depth, Part
from kvtier.observe import human
from kvtier.types import Namespace, group_of

app = console.new_app()

_LIMIT = 100
_LIMIT_MAX = 10**9
_DIGITS = 16
"""Of a key: enough for `kvtier show`."""


@app.command(
    epilog="Examples: kvtier ls --config stack.yaml; kvtier ls -c stack.yaml 3f2a --limit 20"
)
def ls(
    config: options.ConfigOption,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE", help="List the blocks of this one; its first digits will do."
        ),
    ] = None,
    tier: options.TierOption = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=_LIMIT_MAX, help=f"Show no more blocks than this; else {_LIMIT}."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """List what each tier holds, by namespace; or the blocks of one namespace.

    The column of the layout has the type of the values, the ranks (tp, pp), and how many tokens an
    engine's block has, times how many of these are stored as one block.

    It reads from outside: a running engine does not notice. Exit code 1 if something could not be
    read.
    """
    options.only_with("NAMESPACE", namespace, limit=limit)
    stack = load(config, to_write=False)
    uses_of = "" if namespace is None else namespace.lower()
    depth = Depth.COUNTED if namespace is None else Depth.NAMES
    inspectors = look(stack, options.tier_of(tier, stack), depth, uses_of)
    if namespace is None:
        _list_namespaces(inspectors, json)
    else:
        _list_blocks(inspectors, find_namespace(inspectors, namespace), limit or _LIMIT, json)
    end_with_troubles(inspectors)


def _list_namespaces(inspectors: Inspectors, json: bool) -> None:
    known = known_namespaces(inspectors)
    parts = parts_of(inspectors)
    if json:
        rows = [
            msgspec.to_builtins(part)
            | {"facts": known[part.namespace].facts if part.namespace in known else None}
            for part in parts
        ]
        console.print_json({"namespaces": rows, "troubles": troubles_of(inspectors)})
    elif not parts:
        unseen = bool(troubles_of(inspectors))
        console.say("nothing is stored " + ("in what can be seen" if unseen else "here yet"))
    else:
        columns = ["tier", "namespace", "model", "layout", "blocks", "size", "hits", "last hit"]
        columns += ["newest", "in use"]
        rows = [_row(part, known.get(part.namespace)) for part in parts]
        if any(part.retained for part in parts):
            columns.insert(5, "retained")
            for row, part in zip(rows, parts, strict=True):
                row.insert(5, str(part.retained))
        if console.fits(columns, rows):
            console.print_table(columns, rows, numbers=columns[4:-1])
        else:
            _print_by_namespace(columns, rows)
        say_two_names(known)


def _print_by_namespace(columns: list[str], rows: list[list[str]]) -> None:
    """A table for each namespace, under what would be the same in all of its rows."""
    by_name: dict[str, list[list[str]]] = {}
    for row in rows:
        by_name.setdefault("  ".join(row[1:4]), []).append([row[0], *row[4:]])
    for index, (name, own) in enumerate(by_name.items()):
        if index:
            console.say()
        console.say_wrapped(name, 2)
        console.print_table([columns[0], *columns[4:]], own, numbers=columns[4:-1])


def _row(part: Part, namespace: Namespace | None) -> list[str]:
    facts = namespace.facts if namespace else {}
    return [
        f"{part.tier} {part.kind}",
        part.namespace[:12],
        namespace.model or "-" if namespace else "?",
        layout_of(facts),
        str(part.blocks),
        human.size(part.bytes),
        count(part.hits),
        age(part.used),
        age(part.newest),
        in_use(part),
    ]


def layout_of(facts: Mapping[str, str]) -> str:
    """What of an engine's facts tells two layouts of one model apart, in short."""
    kind = facts.get("kv_dtype", "auto").partition(",")[0]  # the layers that it skips follow
    kind = facts.get("dtype", "-") if kind == "auto" else kind
    words = [kind.removeprefix("torch.")]
    for name, sign in (("tensor_parallel", "tp"), ("pipeline_parallel", "pp")):
        if facts.get(name, "1") != "1":
            words.append(sign + facts[name])
    if {"block_tokens", "chunk_blocks"} <= facts.keys():
        words.append(f"{facts['block_tokens']}x{facts['chunk_blocks']}")
    return " ".join(words)


def _state(block: Block, *, retained: bool) -> str:
    return "quarantined" if block.quarantined else "retained" if retained else ""


def _list_blocks(inspectors: Inspectors, namespace: str, limit: int, json: bool) -> None:
    blocks = list(islice(blocks_of(inspectors, namespace), limit + 1))
    more, blocks = len(blocks) > limit, blocks[:limit]
    holds = {each.tier: each.holds(namespace) for each in inspectors}
    if json:
        rows = [
            {
                "tier": block.tier,
                "kind": block.kind,
                "key": block.key.hex(),
                "bytes": block.bytes,
                "stored_at": block.stored_at,
                "hits": block.hits,
                "used": block.used,
                "quarantined": block.quarantined,
                "retained": [hold.session for hold in holds[block.tier].get(block.key, ())],
                "where": block.where,
            }
            for block in blocks
        ]
        troubles = troubles_of(inspectors)
        console.print_json(
            {"namespace": namespace, "blocks": rows, "more": more, "troubles": troubles}
        )
        return
    columns = ["tier", "key", "group", "size", "hits", "last hit", "age", "state"]
    table = [
        [
            f"{block.tier} {block.kind}",
            block.key.hex()[:_DIGITS],
            str(group_of(block.key)),
            human.size(block.bytes),
            count(block.hits),
            age(block.used),
            age(block.stored_at),
            _state(block, retained=block.key in holds[block.tier]),
        ]
        for block in blocks
    ]
    if not any(row[-1] for row in table):
        columns, table = columns[:-1], [row[:-1] for row in table]
    console.print_table(columns, table, numbers=columns[2:7])
    if more:
        console.say(f"... and more: --limit {min(limit * 10, _LIMIT_MAX)}")
