"""`kvtier pin`: keep the blocks of known prompts."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import end_with_troubles
from kvtier.cli.inspection.pinning import Wanted, look_for, most_of
from kvtier.config import load
from kvtier.errors import Unsupported

app = console.new_app()


class Pinned(msgspec.Struct):
    """What one tier has pinned."""

    tier: str
    pinned: int
    """Blocks of these prompts."""
    refused: int
    """There is no place for more of them."""


@app.command(
    epilog="Examples: kvtier pin prompts.jsonl -c stack.yaml --model ./model; "
    "kvtier pin system.txt -c stack.yaml --model ./model --for 7d"
)
def pin(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPT_FILE", help="A text, or .jsonl with prompt, messages or tokens."
        ),
    ],
    config: options.ConfigOption,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The model, with its tokenizer; else the namespace's."),
    ] = None,
    namespace: options.NamespaceOption = None,
    tier: options.TierOption = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            parser=options.parse_duration,
            metavar="DURATION",
            help="Not longer than this, like 7d; else until it is unpinned.",
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Keep the blocks of these prompts: they are evicted after all others, now and when they come.

    No engine need run; one that runs heeds it within a second. What is pinned counts against the
    share of a tier that is retained (`retain` in the stack). `kvtier show` says what is. Exit code
    1 if no tier remembers it, or there is no place for all of it.
    """
    stack = load(config)
    wanted = look_for(stack, file, options.tier_of(tier, stack), namespace, model)
    until = math.inf if seconds is None else time.time() + seconds
    done = []
    for each in wanted.inspectors:
        most = most_of(each, stack.retain.share, wanted.namespace)
        try:
            count = each.pin(wanted.namespace.id, wanted.keys, until, most)
        except Unsupported as error:
            console.note(str(error))
            continue
        named = f"{each.tier} {each.kind}"
        done.append(Pinned(named, count, len(wanted.keys) - count))
    _report(done, wanted, json)
    end_with_troubles(wanted.inspectors, failed=not done or any(each.refused for each in done))


def _report(done: list[Pinned], wanted: Wanted, json: bool) -> None:
    if json:
        name = wanted.namespace.id
        console.print_json({"namespace": name, "tiers": done, "skipped": wanted.skipped})
        return
    if not done:
        console.warn("no tier of this stack remembers what is pinned: one of kind nvme does")
    for each in done:
        console.say(f"{each.tier}: {each.pinned} blocks of these prompts are pinned")
        if each.refused:
            console.warn(
                f"{each.tier}: there is no place for {each.refused} more: raise retain.share, or "
                "unpin others"
            )
    for text in wanted.skipped:
        console.warn(text)
