"""Filling a tier with what others hold, one namespace after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvtier.cli import console
from kvtier.cli.copying.pace import Pace
from kvtier.cli.copying.reader import ChoiceReader
from kvtier.cli.copying.report import Copied
from kvtier.cli.copying.selection import Choice, choose
from kvtier.cli.copying.sink import open_sink, pieces_of
from kvtier.cli.copying.targets import room_in
from kvtier.cli.inspection.inspectors import (
    AnyInspector,
    Inspectors,
    inspector_of,
    known_namespaces,
    look,
    parts_of,
    troubles_of,
)
from kvtier.cli.inspection.namespaces import find_namespace
from kvtier.config import StackConfig
from kvtier.errors import KVTierError
from kvtier.inspect import Depth, Filling
from kvtier.observe import human
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.identity.prompts import Prompt, chunk_keys, chunk_tokens


def namespaces_of(inspectors: Inspectors, wanted: str | None) -> list[str]:
    """The namespaces to copy: the one that is named, or all that have blocks, the one to which a
    block came last first: there may not be room for all."""
    if wanted is not None:
        return [find_namespace(inspectors, wanted)]
    newest: dict[str, float] = {}
    for part in (part for part in parts_of(inspectors) if part.blocks):
        newest[part.namespace] = max(part.newest or 0.0, newest.get(part.namespace, 0.0))
    return sorted(newest, key=lambda name: (-newest[name], name))


def first_of(choice: Choice, size: int, sizes: Sequence[int]) -> Choice:
    """The first blocks of a choice, up to so many bytes of room; raises KVTierError where that is
    none. `sizes` are what blocks of each cache group take."""
    cut = choice.cut(size, sizes)
    if len(choice) and not len(cut):
        takes = human.size(int(choice.room(sizes)[0]))
        raise KVTierError(
            f"{human.size(size)} hold not one block, which takes {takes}: allow more by --size or "
            "the tier's capacity"
        )
    return cut


def copy_all(
    source: StackConfig,
    inspectors: Inspectors,
    target: StackConfig,
    tier: int,
    *,
    namespace: str | None,
    size: int | None,
    rate: int | None,
    hottest: bool,
    prompts: list[Prompt] | None = None,
) -> list[Copied]:
    """Fill a tier with what these hold, one namespace after the other: all of it, or what these
    prompts would ask for. Of several namespaces those are skipped of which that cannot be told, or
    that the tier does not take."""
    names = namespaces_of(inspectors, namespace)
    filling = inspector_of(target, tier).filling()
    if len(names) > 1 and filling.one_namespace:
        raise KVTierError(
            f"{len(names)} namespaces here, and {filling.one_namespace} holds one: name it with "
            "--namespace"
        )
    room = Room(room_in(target, tier, size), room_in(target, tier, None))
    pace = Pace(rate)
    done: list[Copied] = []
    with ExitStack() as spared:
        for name in names:
            result = Copied(name)
            done.append(result)
            try:
                described = description(source, inspectors, name)
                keys = None if prompts is None else keys_of(prompts, described)
            except KVTierError as error:
                if namespace is not None:
                    raise
                result.skipped = str(error)
                continue
            choice = choose(inspectors, name, hottest=hottest)
            if keys is not None:
                choice = choice.only(keys)
                result.missing = len(keys) - len(choice)
            sizes = filling.block_bytes(described)
            choice = room.first_of(choice, sizes, result, some_before=any(e.asked for e in done))
            if not choice:
                continue
            try:
                _copy(choice, described, filling, pace, result)
            except KVTierError as error:  # its folder may be another user's, and the next one not
                if len(names) == 1:
                    raise
                result.skipped = str(error)
                continue
            room.take(choice, sizes, filling)
            if name != names[-1]:
                keys_of_choice = partial(_all_keys, choice)
                spared.enter_context(filling.protect(described, keys_of_choice))
    return done


def _copy(
    choice: Choice, namespace: Namespace, filling: Filling[Any], pace: Pace, result: Copied
) -> None:
    reader = ChoiceReader(choice, namespace)
    with (
        open_sink(filling, namespace, reader, pace) as sink,
        console.progress("copying", len(choice), "blocks") as bar,
    ):
        sink.fill(pieces_of(choice, sink.piece), result, bar)
        sink.carry_uses(choice.used())
    sink.check(result)


def _all_keys(choice: Choice) -> set[BlockKey]:
    return set(choice.keys(0, len(choice)))


class Room:
    """How many bytes may still be copied: of what was asked for, and of what the tier has."""

    def __init__(self, wanted: int, tier: int) -> None:
        self._wanted = wanted
        self._tier = tier

    def first_of(
        self, choice: Choice, sizes: Sequence[int], result: Copied, *, some_before: bool
    ) -> Choice:
        """The blocks for which there is room. Where nothing was copied before, at least one."""
        allowed = min(self._wanted, self._tier)
        cut = choice.cut(allowed, sizes) if some_before else first_of(choice, allowed, sizes)
        result.asked = len(cut)
        result.left = len(choice) - len(cut)
        return cut

    def take(self, choice: Choice, sizes: Sequence[int], filling: Filling[Any]) -> None:
        """These are there now."""
        size = int(choice.room(sizes).sum())
        self._wanted -= size
        self._tier -= filling.taken(len(choice), size, sizes)


def description(config: StackConfig, inspectors: Inspectors, name: str) -> Namespace:
    """What a namespace means, from these tiers or another one of their stack: it does not lie
    beside the blocks in host memory. Raises KVTierError where nothing says it."""
    if name not in known_namespaces(inspectors):
        seen = {each.tier for each in inspectors}
        others = [tier for tier in range(len(config.tiers)) if tier not in seen]
        inspectors = [*inspectors, *look_to_copy(config, others, name)]
    if found := known_namespaces(inspectors).get(name):
        return found
    if troubles := troubles_of(inspectors):
        raise KVTierError(troubles[0])
    raise KVTierError(
        f"nothing in this stack says what the namespace {name} means: its namespace.json lies "
        "beside the blocks on a disk or in a store, and there is none"
    )


def keys_of(prompts: Sequence[Prompt], namespace: Namespace) -> set[BlockKey]:
    """All keys that these prompts would ask for; raises KVTierError as `chunk_keys`."""
    chunk_tokens(namespace)
    chunks = (keys for prompt in prompts for keys in chunk_keys(prompt, namespace))
    return {key for keys in chunks for key in keys}


def look_to_copy(
    config: StackConfig, tiers: Iterable[int], namespace: str | None
) -> list[AnyInspector]:
    """Some of a stack's tiers, by what is written down of them, and how often the blocks of one
    namespace or of all were used."""
    return look(config, tiers, Depth.RECORDED, uses_of=(namespace or "").lower())
