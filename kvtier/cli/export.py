"""`kvtier export`: the blocks of one namespace, into a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.copying import Copied, choose, describe, read_blocks
from kvtier.cli.fill import namespaces_of, report
from kvtier.cli.holdings import look
from kvtier.cli.pack import PackWriter
from kvtier.config import load
from kvtier.errors import KVTierError

app = console.new_app("Write blocks to a file.")


@app.command(epilog="Example: kvtier export blocks.kvpack -c stack.yaml --namespace 3f2a")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write.")],
    config: console.ConfigOption,
    namespace: console.NamespaceOption = None,
    tier: console.TierOption = None,
    size: console.SizeOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: console.JsonOption = False,
) -> None:
    """Write every block of a namespace to one file, each proved, the newest first.

    The stack may be in use. The file is there when it is whole, or not at all.
    """
    stack = load(config)
    places = look(stack, console.tier_of(tier, stack))
    names = namespaces_of(places, namespace)
    if len(names) != 1:
        found = f"{len(names)} namespaces here" if names else "there is nothing here to export"
        raise KVTierError(found + (": name one with --namespace" if names else ""))
    if file.exists() and not force:
        raise KVTierError(f"{file} exists; name another file, or say --force")
    described = describe(places, names[0])
    result = Copied(names[0])
    blocks = choose(places, names[0], None if size is None else console.parse_size(size))
    result.asked = len(blocks)
    with (
        PackWriter(file, described) as pack,
        console.progress("exporting", len(blocks), "blocks") as bar,
    ):
        for key, record in read_blocks(stack, places, blocks, result):
            payload = described.payload_of(key)
            pack.write(record, payload)
            result.copied += 1
            result.bytes += payload
            bar.advance(1, payload)
    report([result], places, json)
