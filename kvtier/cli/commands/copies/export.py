"""`kvtier export`: the blocks of one namespace, into a single file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.copying.copies import description, first_of, look_to_copy, namespaces_of
from kvtier.cli.copying.pack_files import PackWriter
from kvtier.cli.copying.report import Copied, report
from kvtier.cli.copying.selection import choose
from kvtier.cli.inspection.inspectors import (
    Inspectors,
    Provers,
    end_with_troubles,
    known_namespaces,
    troubles_of,
    where_of,
)
from kvtier.cli.inspection.parallel import bounded_map
from kvtier.config import load
from kvtier.errors import KVTierError
from kvtier.inspect import Block, Proof
from kvtier.record.record import record_bytes
from kvtier.types import BlockKey

app = console.new_app()

_THREADS = 8


@app.command(epilog="Example: kvtier export blocks.kvpack -c stack.yaml --namespace 3f2a")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    config: options.ConfigOption,
    namespace: options.NamespaceOption = None,
    tier: options.TierOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Write every block of a namespace to one file, each proved, the newest first.

    The stack may be in use. The file appears when it is complete, or not at all.
    """
    stack = load(config, to_write=False)
    _check_target(file, force)
    chosen = options.tier_of(tier, stack)
    tiers = range(len(stack.tiers)) if chosen is None else [chosen]
    inspectors = look_to_copy(stack, tiers, namespace)
    names = namespaces_of(inspectors, namespace)
    if len(names) != 1:
        end_with_troubles(inspectors)
        found = f"{len(names)} namespaces here" if names else "there is nothing here to export"
        raise KVTierError(found + (": name one with --namespace" if names else ""))
    described = description(stack, inspectors, names[0])
    result = Copied(names[0])
    choice = choose(inspectors, names[0], hottest=hottest)
    wanted = len(choice)
    if size is not None:
        choice = first_of(choice, size, [record_bytes(each) for each in described.group_bytes])
    result.asked = len(choice)
    result.left = wanted - len(choice)
    start = time.monotonic()
    with (
        console.naming(file),
        PackWriter(file, described, replace=force) as pack,
        console.progress("exporting", len(choice), "blocks") as bar,
    ):
        for key, record in _proved(inspectors, choice.blocks(), result):
            payload = described.payload_of(key)
            pack.write(record, payload)
            del record  # there may be room for one only
            result.copied += 1
            result.bytes += payload
            bar.advance(1, payload)
        pack.used = choice.used()
    result.seconds = time.monotonic() - start
    report([result], where_of(inspectors), troubles_of(inspectors), json)


def _check_target(file: Path, force: bool) -> None:
    if file.exists():
        if not file.is_file():  # a device, say, which must not be replaced
            raise KVTierError(f"{file} is no ordinary file; name another")
        if not force:
            raise KVTierError(f"{file} exists; name another file, or say --force")
    if not file.parent.is_dir():
        raise KVTierError(f"{file.parent} is not a folder; make it, or name one that exists")


def _proved(
    inspectors: Inspectors, blocks: Iterable[Block], result: Copied
) -> Iterator[tuple[BlockKey, memoryview]]:
    """The proved records of these blocks, in their order."""
    with Provers(inspectors, known_namespaces(inspectors)) as provers:
        proved = bounded_map(provers.prove, blocks, _THREADS, provers.bytes_of)
        for block, (proof, _, record) in proved:
            if record is not None:
                yield block.key, record
                del record
            elif proof is Proof.GONE:
                result.gone += 1
            elif proof is Proof.UNREAD:
                result.unread += 1
            else:
                result.bad += 1
