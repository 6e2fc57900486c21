"""`kvtier unpin`: keep what was pinned no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.inspection.inspectors import end_with_troubles, look
from kvtier.cli.inspection.namespaces import find_namespace
from kvtier.cli.inspection.pinning import look_for
from kvtier.config import load
from kvtier.errors import Unsupported
from kvtier.inspect import Depth

app = console.new_app()


@app.command(
    epilog="Examples: kvtier unpin prompts.jsonl -c stack.yaml --model ./model; "
    "kvtier unpin -c stack.yaml"
)
def unpin(
    config: options.ConfigOption,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="PROMPT_FILE", help="As for pin; without it, all that is pinned."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The model, with its tokenizer; else the namespace's."),
    ] = None,
    namespace: options.NamespaceOption = None,
    tier: options.TierOption = None,
    json: options.JsonOption = False,
) -> None:
    """Take back what `kvtier pin` has said: the blocks of these prompts, or all, are like others.

    Nothing is removed. What requests retain themselves stays retained.
    """
    options.only_with("PROMPT_FILE", file, model=model)
    stack = load(config)
    chosen = options.tier_of(tier, stack)
    if file is not None:
        wanted = look_for(stack, file, chosen, namespace, model)
        inspectors, names, keys = wanted.inspectors, [wanted.namespace.id], wanted.keys
    else:
        inspectors, keys = look(stack, chosen, Depth.NAMES), None
        names = [] if namespace is None else [find_namespace(inspectors, namespace)]
    done = 0
    for each in inspectors:
        for name in names or [part.namespace for part in each.contents.parts]:
            try:
                done += each.unpin(name, keys)
            except Unsupported as error:
                console.note(str(error))
                break
    if json:
        console.print_json({"unpinned": done})
    else:
        console.say(f"{done} blocks are not pinned any more")
    end_with_troubles(inspectors)
