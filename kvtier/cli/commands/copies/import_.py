"""`kvtier import`: the blocks of a file, into a tier."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.copying.pace import Pace
from kvtier.cli.copying.pack_files import PackReader
from kvtier.cli.copying.report import Copied, report
from kvtier.cli.copying.sink import Piece, open_sink
from kvtier.cli.copying.targets import IntoOption, tier_to_fill
from kvtier.cli.inspection.inspectors import inspector_of
from kvtier.config import load
from kvtier.record.record import record_bytes

app = console.new_app()


@app.command(name="import", epilog="Example: kvtier import blocks.kvpack -c stack.yaml")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that kvtier export wrote.")],
    config: options.ConfigOption,
    into: IntoOption = None,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Store the blocks of a file in a tier; every one is proved first.

    An engine that shares the tier finds them at once. Nothing is stored twice. Exit code 1 if
    something could not be taken in.
    """
    target = load(config)
    tier = tier_to_fill(target, into)
    pace = Pace(rate)
    filling = inspector_of(target, tier).filling()
    pack = PackReader(file)
    result = Copied(pack.namespace.id)
    total = pack.bytes // record_bytes(pack.namespace.payload_bytes)
    with (
        open_sink(filling, pack.namespace, pack, pace) as sink,
        console.progress("importing", total, "blocks") as bar,
    ):
        sink.fill(_pieces(pack, sink.piece, result), result, bar)
        sink.carry_uses(pack.used)
    sink.check(result)
    result.bad += pack.bad
    report([result], str(file), [pack.trouble] if pack.trouble else [], json)


def _pieces(pack: PackReader, size: int, result: Copied) -> Iterator[Piece]:
    """The blocks of a file, so many at once, each key once."""
    found = pack.found()
    while piece := dict(islice(found, size)):
        result.asked += len(piece)
        yield list(piece), list(piece.values())
