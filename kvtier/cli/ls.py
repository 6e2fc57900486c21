"""`kvtier ls`: what is where, by namespace, block by block, or all of one block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Annotated, Any

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.inspect import (
    Inspectors,
    age,
    blocks_of,
    count,
    end_with_troubles,
    find_namespace,
    in_use,
    known_namespaces,
    left,
    look,
    looked_at,
    parts_of,
    provers_of,
    say_two_names,
    troubles_of,
)
from kvtier.config import load
from kvtier.errors import KVTierError
from kvtier.eviction.retention import PINNED
from kvtier.inspect import Block, Depth, Hold, Part, Prover
from kvtier.types import ANY_DEGREE, KEY_BYTES_MAX, BlockKey, Difference, Namespace, group_of

app = options.new_app()

_LIMIT = 100
_LIMIT_MAX = 10**9
_DIGITS = 16
"""Of a key: enough for `kvtier ls KEY`."""
_DIGITS_MIN = 4
_COPIES_MAX = 64


@app.command(
    epilog="Examples: kvtier ls -c stack.yaml; kvtier ls 3f2a -c stack.yaml --limit 20; "
    "kvtier ls 9c01d2e4 -c stack.yaml --json"
)
def ls(
    config: options.ConfigOption,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE|KEY",
            help="Only this namespace with its blocks, or this block; the first digits will do.",
        ),
    ] = None,
    tier: options.TierOption = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=_LIMIT_MAX, help=f"Show no more blocks than this; else {_LIMIT}."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """List what each tier holds, by namespace.

    Of one namespace it shows the facts that it stands for, those in which others of its model
    differ, and its blocks; of one block every copy, read and checked.

    The column of the layout has the type of the values, the ranks (tp, pp), and how many tokens an
    engine's block has, times how many of these are stored as one block.

    It reads from outside: a running engine does not notice. Exit code 1 if something could not be
    read, or if a copy of the block is bad.
    """
    options.only_with("NAMESPACE", what, limit=limit)
    stack = load(config, to_write=False)
    chosen = options.tier_of(tier, stack)
    if what is None:
        inspectors = look(stack, chosen, uses_of="")
        _list_namespaces(inspectors, json)
        end_with_troubles(inspectors)
        return
    text = what.lower()
    inspectors = look(stack, chosen, Depth.NAMES, text)
    ids = known_namespaces(inspectors).keys() | {part.namespace for part in parts_of(inspectors)}
    bad = False
    is_key = len(text) >= _DIGITS_MIN and not set(text) - set("0123456789abcdef")
    if is_key and not any(each.startswith(text) for each in ids):
        inspectors = look(stack, chosen, Depth.NAMES, "")
        bad = _show_copies(inspectors, text, json)
    else:
        _show_namespace(inspectors, find_namespace(inspectors, what), limit or _LIMIT, json)
    end_with_troubles(inspectors, failed=bad)


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
        for name in ("quarantined", "retained"):
            if any(getattr(part, name) for part in parts):
                columns.insert(5, name)
                for row, part in zip(rows, parts, strict=True):
                    row.insert(5, str(getattr(part, name)))
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
        amounts.size(part.bytes),
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
            words.append(sign + facts[name].replace(ANY_DEGREE, "*"))
    if {"block_tokens", "chunk_blocks"} <= facts.keys():
        words.append(f"{facts['block_tokens']}x{facts['chunk_blocks']}")
    return " ".join(words)


def _show_namespace(inspectors: Inspectors, name: str, limit: int, json: bool) -> None:
    known = known_namespaces(inspectors)
    namespace = known.get(name)
    apart = _apart(name, known)
    blocks = list(islice(blocks_of(inspectors, name), limit + 1))
    more, blocks = len(blocks) > limit, blocks[:limit]
    holds = {each.tier: each.holds(name) for each in inspectors}
    if json:
        console.print_json(
            {
                "namespace": name,
                "facts": namespace.facts if namespace else None,
                "group_bytes": namespace.group_bytes if namespace else None,
                "parts": namespace.parts if namespace else None,
                "differs": msgspec.to_builtins(apart),
                "blocks": [
                    _row_of_block(block)
                    | {"retained": [hold.session for hold in holds[block.tier].get(block.key, ())]}
                    for block in blocks
                ],
                "more": more,
                "troubles": troubles_of(inspectors),
            }
        )
        return
    console.say(f"namespace {name}")
    if namespace is None:
        console.say("its description is not here: only its digest is known")
    else:
        sizes = ", ".join(amounts.size(size) for size in namespace.group_bytes)
        console.print_values(
            {**namespace.facts, "block of each group": sizes, "parts": namespace.parts or "any"}
        )
    for other, differences in apart.items():
        console.say()
        console.say(f"the same model's namespace {other[:12]} is another, because")
        for each in differences:
            console.say_wrapped(f"  {each}", 4)
    console.say()
    _print_blocks(blocks, {(tier, key) for tier, held in holds.items() for key in held})
    if more:
        console.say(f"... and more: --limit {min(limit * 10, _LIMIT_MAX)}")


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


def _row_of_block(block: Block) -> dict[str, Any]:
    return {
        "tier": block.tier,
        "kind": block.kind,
        "namespace": block.namespace,
        "key": block.key.hex(),
        "group": group_of(block.key),
        "bytes": block.bytes,
        "stored_at": block.stored_at,
        "hits": block.hits,
        "used": block.used,
        "quarantined": block.quarantined,
        "engine": block.engine,
        "where": block.where,
    }


def _print_blocks(blocks: Sequence[Block], retained: Set[tuple[int, BlockKey]]) -> None:
    columns = ["tier", "key", "group", "size", "hits", "last hit", "age", "state"]
    table = [
        [
            f"{block.tier} {block.kind}",
            block.key.hex()[:_DIGITS],
            str(group_of(block.key)),
            amounts.size(block.bytes),
            count(block.hits),
            age(block.used),
            age(block.stored_at),
            "quarantined"
            if block.quarantined
            else "retained"
            if (block.tier, block.key) in retained
            else "",
        ]
        for block in blocks
    ]
    if not any(row[-1] for row in table):
        columns, table = columns[:-1], [row[:-1] for row in table]
    console.print_table(columns, table, numbers=columns[2:7])


def _show_copies(inspectors: Inspectors, text: str, json: bool) -> bool:
    """Show all blocks whose keys begin like this; whether one of them is bad."""
    found: list[Block] = []
    for each in inspectors:
        for block in each.blocks(begins=[text[: 2 * KEY_BYTES_MAX]]):
            if block.key.hex().startswith(text):
                found.append(block)
        if len(found) > _COPIES_MAX:
            raise KVTierError(f"many blocks begin with {text!r}: give more digits of the key")
    if not found:
        where = looked_at(inspectors)
        raise KVTierError(f"no block and no namespace {where} begins with {text!r}: see kvtier ls")
    holds = {
        (each.tier, name): each.holds(name)
        for each in inspectors
        for name in {block.namespace for block in found}
    }
    with provers_of(inspectors) as provers:
        rows = [
            _row_of_copy(
                block, provers[block.tier], holds[block.tier, block.namespace].get(block.key, ())
            )
            for block in found
        ]
    if json:
        console.print_json({"copies": rows, "troubles": troubles_of(inspectors)})
    else:
        for index, row in enumerate(rows):
            if index:
                console.say()
            _print_copy(row)
    return any(row["record"].startswith("bad") for row in rows)


def _row_of_copy(block: Block, prover: Prover, holds: Sequence[Hold]) -> dict[str, Any]:
    if block.quarantined:
        record = "quarantined: it failed its check when it was read"
    else:
        proof, why, _ = prover.prove(block)
        record = f"{proof.value}: {why}" if why else proof.value
    retained = [
        {"session": hold.session, "until": None if hold.until == math.inf else hold.until}
        for hold in holds
    ]
    return _row_of_block(block) | {"retained": retained, "record": record}


def _print_copy(row: Mapping[str, Any]) -> None:
    console.print_values(
        {
            "key": row["key"],
            "group": row["group"],
            "namespace": row["namespace"],
            "tier": f"{row['tier']} {row['kind']}",
            "where": row["where"] + f", of engine {row['engine']}" * bool(row["engine"]),
            "size": amounts.size(row["bytes"]),
            "age": age(row["stored_at"]),
            "hits": count(row["hits"]),
            "last hit": age(row["used"]),
            "retained": "; ".join(map(_said_of, row["retained"])) or "no",
            "record": row["record"],
        }
    )


def _said_of(hold: Mapping[str, Any]) -> str:
    session = hold["session"]
    who = "pinned" if session == PINNED else f"session {session}" if session else "no session"
    end = "until it is removed" if hold["until"] is None else f"for {left(hold['until'])}"
    return f"{who}, {end}"
