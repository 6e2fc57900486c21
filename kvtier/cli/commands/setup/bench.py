"""`kvtier bench`: how fast the tiers of a stack store and load, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options, plots
from kvtier.cli.measuring.tier_speeds import Measured, Size, measure
from kvtier.config import load
from kvtier.observe import human
from kvtier.observe.svg import bars
from kvtier.record.record import record_bytes

app = console.new_app()


@app.command(
    epilog="Examples: kvtier bench --config stack.yaml; "
    "kvtier bench -c stack.yaml --chunk 4MiB --blocks 64 --svg bench.svg"
)
def bench(
    config: options.ConfigOption,
    chunk: Annotated[
        int,
        typer.Option(
            parser=options.parse_block,
            metavar="SIZE",
            help="Payload of one block.",
            show_default="1MiB",
        ),
    ] = 1 << 20,
    blocks: Annotated[int, typer.Option(min=1, max=65536, help="Blocks in each round.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds, of which medians are shown.")
    ] = 3,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot of the rates, as SVG.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Store, load and check synthetic blocks in every tier.

    It does not touch the stack's data or an engine that runs on it: its blocks go to memory and
    folders of their own, which are removed afterwards. A store is timed from the call until the
    last block is in that tier, a load until it is in host memory and proved. Exit code 1 if a block
    did not come back, or came with other bytes.
    """
    stack = load(config, record_bytes=record_bytes(chunk))
    plots.check(svg)
    found = measure(stack, Size(chunk, blocks, rounds), console.note)
    good = all(tier.good for tier in found)
    if json:
        tiers = [msgspec.to_builtins(tier) | {"good": tier.good} for tier in found]
        console.print_json({"ok": good, "chunk_bytes": chunk, "rounds": rounds, "tiers": tiers})
    else:
        _show(found, chunk, blocks, rounds)
    if svg is not None:
        plots.write(svg, _plot(found, chunk))
    if not good:
        raise typer.Exit(console.EXIT_FAILURE)


def _show(found: list[Measured], chunk: int, blocks: int, rounds: int) -> None:
    console.say(f"rounds: {rounds}, of {blocks} blocks of {human.size(chunk)}; medians")
    columns = ["tier", "store", "load", "one block", "worst", "hits"]
    rows = [
        [
            tier.tier,
            human.rate(tier.store_bytes_per_s) if tier.hits else "-",
            human.rate(tier.load_bytes_per_s) if tier.hits else "-",
            human.duration(tier.block_s) if tier.hits else "-",
            human.duration(tier.block_worst_s) if tier.hits else "-",
            f"{tier.hits}/{tier.blocks}",
        ]
        for tier in found
    ]
    console.print_table(columns, rows, numbers=columns[1:])
    for tier in found:  # below the table: a store's own words are too long for a column
        if note := f"{tier.wrong} blocks came back WRONG" if tier.wrong else tier.note:
            console.say_wrapped(f"{tier.tier}: {note}", 2)


def _plot(found: list[Measured], chunk: int) -> str:
    return bars(
        f"Blocks of {human.size(chunk)}",
        "MB/s",
        {
            f"{index}: {tier.tier}": {
                "store": tier.store_bytes_per_s / 1e6,
                "load": tier.load_bytes_per_s / 1e6,
            }
            for index, tier in enumerate(found)
        },
    )
