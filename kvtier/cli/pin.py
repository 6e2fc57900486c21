"""`kvtier pin`: keep the blocks of known prompts, or no longer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console, options
from kvtier.cli.inspect import (
    Inspectors,
    asked_namespace,
    end_with_troubles,
    find_namespace,
    known_namespaces,
    look,
)
from kvtier.config import StackConfig, load
from kvtier.errors import KVTierError, Unsupported
from kvtier.inspect import Depth
from kvtier.record.record import record_bytes
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.identity.prompts import chunk_keys, read_prompts

app = options.new_app()


class Pinned(msgspec.Struct):
    """What one tier has pinned."""

    tier: str
    pinned: int
    """Blocks of these prompts."""
    refused: int
    """There is no place for more of them."""


@app.command(
    epilog="Examples: kvtier pin -c stack.yaml --prompts prompts.jsonl --model ./model; "
    "kvtier pin -c stack.yaml --prompts system.txt --model ./model --for 7d; "
    "kvtier pin -c stack.yaml --remove"
)
def pin(
    config: options.ConfigOption,
    prompts: options.PromptsOption = None,
    model: options.ModelOption = None,
    namespace: options.NamespaceOption = None,
    tier: options.TierOption = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            parser=options.parse_duration,
            metavar="DURATION",
            help="Not longer than this, like 7d; else until it is removed.",
        ),
    ] = None,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Pin them no longer; without --prompts, all that is pinned."),
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Keep the blocks of these prompts: they are evicted after all others, now and when they come.

    No engine need run; one that runs heeds it within a second. What is pinned counts against the
    share of a tier that is retained (`retain` in the stack). `kvtier ls KEY` says what is. With
    --remove they are like others again: no block goes, and what requests retain themselves stays
    retained. Exit code 1 if no tier remembers it, or there is no place for all of it.
    """
    if prompts is None and not remove:
        raise typer.BadParameter("name the prompts by --prompts FILE", param_hint="--prompts")
    if remove and seconds is not None:
        raise typer.BadParameter("says nothing with --remove: leave it out", param_hint="--for")
    options.only_with("--prompts", prompts, model=model)
    stack = load(config)
    inspectors = look(stack, depth=Depth.NAMES)
    chosen = options.tier_of(tier, stack)
    tiers = [each for each in inspectors if chosen in (None, each.tier)]
    if prompts is None:
        names = [] if namespace is None else [find_namespace(inspectors, namespace)]
        _remove(tiers, names, None, json)
        return
    found = _namespace_of(inspectors, namespace, model)
    keys, skipped = _keys_of(inspectors, found, prompts, model)
    if remove:
        _remove(tiers, [found.id], keys, json)
        return
    until = math.inf if seconds is None else time.time() + seconds
    done = _pin(tiers, found, keys, until, stack)
    if json:
        console.print_json({"namespace": found.id, "tiers": done, "skipped": skipped})
    else:
        _show(done, skipped)
    end_with_troubles(tiers, failed=not done or any(each.refused for each in done))


def _namespace_of(inspectors: Inspectors, wanted: str | None, model: str | None) -> Namespace:
    """The namespace that prompts are of; raises KVTierError if there is none."""
    known = known_namespaces(inspectors)
    if not known:
        end_with_troubles(inspectors)
        raise KVTierError(
            "this stack holds nothing yet: an engine has to serve the model once, so that it is "
            "known how prompts are named"
        )
    return known[asked_namespace(inspectors, known, wanted, model)]


def _keys_of(
    inspectors: Inspectors, namespace: Namespace, file: Path, model: str | None
) -> tuple[list[BlockKey], list[str]]:
    """The blocks of prompts, each prompt from its head on, and of which no key can be computed."""
    console.note("reading the prompts")
    prompts = read_prompts(file, model or namespace.facts.get("model"))
    chunks = [keys for prompt in prompts.known for keys in chunk_keys(prompt, namespace)]
    keys = list(dict.fromkeys(key for each in chunks for key in each))
    if len(namespace.group_bytes) > 1:  # of windows and states only what is at ends is ever stored
        stored = {block.key for each in inspectors for block in each.blocks(namespace.id)}
        keys = [key for key in keys if key in stored]
    return keys, prompts.skipped


def _pin(
    tiers: Inspectors,
    namespace: Namespace,
    keys: Sequence[BlockKey],
    until: float,
    stack: StackConfig,
) -> list[Pinned]:
    """Pin these where it can be remembered, as far as the share of each tier goes."""
    done = []
    size = record_bytes(namespace.payload_bytes)
    for each in tiers:
        most = int(each.capacity() // size * stack.retain.share)
        try:
            count = each.pin(namespace.id, keys, until, most)
        except Unsupported as error:
            console.note(str(error))
            continue
        done.append(Pinned(f"{each.tier} {each.kind}", count, len(keys) - count))
    return done


def _remove(
    tiers: Inspectors, names: Sequence[str], keys: Sequence[BlockKey] | None, json: bool
) -> None:
    """Pin these no longer, or nothing at all."""
    removed = 0
    for each in tiers:
        for name in names or [part.namespace for part in each.contents.parts]:
            try:
                removed += each.unpin(name, keys)
            except Unsupported as error:
                console.note(str(error))
                break
    if json:
        console.print_json({"removed": removed})
    else:
        console.say(f"{removed} blocks are not pinned any more")
    end_with_troubles(tiers)


def _show(done: Sequence[Pinned], skipped: Sequence[str]) -> None:
    if not done:
        console.warn("no tier of this stack remembers what is pinned: one of kind nvme does")
    for each in done:
        console.say(f"{each.tier}: {each.pinned} blocks of these prompts are pinned")
        if each.refused:
            console.warn(
                f"{each.tier}: there is no place for {each.refused} more: raise retain.share, or "
                "pin --remove others"
            )
    for text in skipped:
        console.warn(text)
