"""Which blocks are meant by prompts that are to be kept, and how many a tier keeps."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier.cli import console
from kvtier.cli.inspection.inspectors import AnyInspector, end_with_troubles, known_namespaces, look
from kvtier.cli.inspection.namespaces import asked_namespace
from kvtier.config import StackConfig
from kvtier.errors import KVTierError
from kvtier.inspect import Depth
from kvtier.record.record import record_bytes
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.identity.prompts import chunk_keys, read_prompts


class Wanted(msgspec.Struct):
    """The blocks of some prompts in one namespace, each prompt from its head on."""

    inspectors: list[AnyInspector]
    namespace: Namespace
    keys: list[BlockKey]
    skipped: list[str]
    """Prompts whose keys cannot be computed, a sentence each."""


def look_for(
    stack: StackConfig, file: Path, tier: int | None, namespace: str | None, model: str | None
) -> Wanted:
    """Read prompts and find the namespace that they are of, for one tier or all; raises KVTierError
    if there is none."""
    inspectors = look(stack, depth=Depth.NAMES)
    known = known_namespaces(inspectors)
    if not known:
        end_with_troubles(inspectors)
        raise KVTierError(
            "this stack holds nothing yet: an engine has to serve the model once, so that it is "
            "known how prompts are named"
        )
    found = known[asked_namespace(inspectors, known, namespace, model)]
    console.note("reading the prompts")
    prompts = read_prompts(file, model or found.facts.get("model"))
    chunks = [keys for prompt in prompts.known for keys in chunk_keys(prompt, found)]
    keys = list(dict.fromkeys(key for each in chunks for key in each))
    if len(found.group_bytes) > 1:  # of windows and states only what is at ends is ever stored
        stored = {block.key for each in inspectors for block in each.blocks(found.id)}
        keys = [key for key in keys if key in stored]
    chosen = [each for each in inspectors if tier in (None, each.tier)]
    return Wanted(chosen, found, keys, prompts.skipped)


def most_of(inspector: AnyInspector, share: float, namespace: Namespace) -> int:
    """How many blocks a tier retains, with such a share of it."""
    return int(inspector.capacity() // record_bytes(namespace.payload_bytes) * share)
