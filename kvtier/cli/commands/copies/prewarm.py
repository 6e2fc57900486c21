"""`kvtier prewarm`: fill a tier before the first request asks for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import console
from kvtier.cli.console import options
from kvtier.cli.copying.copies import copy_all, look_to_copy
from kvtier.cli.copying.report import report
from kvtier.cli.copying.targets import IntoOption, tier_to_fill
from kvtier.cli.inspection.inspectors import known_namespaces, troubles_of, where_of
from kvtier.cli.inspection.namespaces import say_two_names
from kvtier.config import load
from kvtier.errors import KVTierError
from kvtier.vllm.identity.prompts import read_prompts

app = console.new_app()


@app.command(
    epilog="Examples: kvtier prewarm -c stack.yaml --prompts p.jsonl --model ./model; "
    "kvtier prewarm -c stack.yaml --from other.yaml --size 20GiB --rate 500MB/s"
)
def prewarm(
    config: options.ConfigOption,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Another stack; else the tiers further down."),
    ] = None,
    into: IntoOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Only what these ask for: a text, or .jsonl as for explain."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Whose tokenizer the prompts need.")
    ] = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy blocks into a tier, from the tiers below it or from another stack, the newest first.

    An engine that shares the tier finds them at once, without a restart. Nothing is copied twice,
    so you can interrupt it and run it again. Every block is proved when it is read, and again when
    it is loaded. With prompts it says how many of their blocks the source lacks, and for which
    namespaces keys cannot be computed. Exit code 1 if something could not be copied.
    """
    options.only_with("--prompts", prompts, model=model)
    if source is not None and re.match(r"\w+:/", str(source)):
        problem = "names a stack file; what copies from a url is kvtier restore --from URL"
        raise typer.BadParameter(problem, param_hint="--from")
    target = load(config)
    tier = tier_to_fill(target, into)
    if source is None:
        if tier + 1 == len(target.tiers):
            raise KVTierError("there is no tier further down: name another stack with --from")
        stack = target
        inspectors = look_to_copy(stack, range(tier + 1, len(stack.tiers)), namespace)
    else:
        stack = load(source, to_write=False)
        inspectors = look_to_copy(stack, range(len(stack.tiers)), namespace)
    asked = None
    if prompts is not None:
        console.note("reading the prompts")
        asked = read_prompts(prompts, model)
    done = copy_all(
        stack,
        inspectors,
        target,
        tier,
        namespace=namespace,
        size=size,
        rate=rate,
        hottest=hottest,
        prompts=None if asked is None else asked.known,
    )
    if asked is not None:
        asked.say_skipped(console.warn)
    if not json:
        say_two_names(known_namespaces(inspectors))
    report(done, where_of(inspectors), troubles_of(inspectors), json, may_skip=asked is not None)
