"""What prewarm, snapshot, restore, export and import share: filling a tier, and the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.backends.nvme import NvmeSettings, slab_bytes
from kvtier.backends.object import BACKEND, ObjectSettings
from kvtier.backends.object.budget.budget import UNLIMITED
from kvtier.cli import console, options
from kvtier.cli.choice import Choice, choose
from kvtier.cli.copying import Copied, Pace, open_sink, pieces_of
from kvtier.cli.hold import sparing
from kvtier.cli.holdings import Place, known_namespaces, look
from kvtier.cli.look_objects import local_folder
from kvtier.cli.namespaces import find_namespace
from kvtier.cli.outlook import capacity_of
from kvtier.cli.reader import ChoiceReader
from kvtier.config import StackConfig, load
from kvtier.core.records.record import HEADER_BYTES, record_bytes
from kvtier.core.settings import ByteSize, Capacity, Persistence, TierSettings
from kvtier.errors import ConfigError, KVTierError, NotWritable
from kvtier.observe import human
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.identity.prompt_keys import Prompt, chunk_keys, chunk_tokens

IntoOption = Annotated[
    str | None,
    typer.Option("--into", metavar="TIER", help="The tier to fill; else the first of kind nvme."),
]
_FILL_SHARE = 0.95
"""Of a tier's capacity: beyond it, the last blocks would push out the first."""


def namespaces_of(places: Sequence[Place], wanted: str | None) -> list[str]:
    """The namespaces to copy: the one that is named, or all that have blocks, the one to which a
    block came last first: there may not be room for all."""
    if wanted is not None:
        return [find_namespace(places, wanted)]
    newest: dict[str, float] = {}
    for part in (part for place in places for part in place.parts if part.blocks):
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


def sizes_in(settings: TierSettings, namespace: Namespace) -> list[int]:
    """What a block of each cache group takes in a tier: a whole slot, or its own bytes (less, if
    they can be compressed)."""
    if settings.kind in ("cpu", "nvme"):
        return [record_bytes(namespace.payload_bytes)]
    return [HEADER_BYTES + size for size in namespace.group_bytes]


def taken_by(choice: Choice, settings: TierSettings, sizes: Sequence[int]) -> int:
    """How much room these blocks of one namespace take from others: on a disk whole slabs, because
    each slab holds blocks of one."""
    if not isinstance(settings, NvmeSettings):
        return int(choice.room(sizes).sum())
    (slot_bytes,) = sizes
    slots = max(1, slab_bytes(capacity_of(settings)) // slot_bytes)
    return -(-len(choice) // slots) * slots * slot_bytes


def room_in(target: StackConfig, tier: int, size: int | None) -> int:
    """How many bytes may be copied into a tier, at most so many."""
    most = int(capacity_of(target.tiers[tier]) * _FILL_SHARE)
    return most if size is None else min(most, size)


def copy_all(
    source: StackConfig,
    places: Sequence[Place],
    target: StackConfig,
    tier: int,
    *,
    namespace: str | None,
    size: int | None,
    rate: int | None,
    hottest: bool,
    prompts: list[Prompt] | None = None,
) -> list[Copied]:
    """Fill a tier with what places hold, one namespace after the other: all of it, or what these
    prompts would ask for. Of several namespaces those are skipped of which that cannot be told, or
    that the tier does not take."""
    most, room = room_in(target, tier, size), room_in(target, tier, None)
    pace = Pace(rate)
    done: list[Copied] = []
    before: dict[str, set[BlockKey]] = {}
    names = namespaces_of(places, namespace)
    if len(names) > 1 and target.tiers[tier].kind == "cpu":
        raise KVTierError(
            f"{len(names)} namespaces here, and host memory holds one: name it with --namespace"
        )
    with ExitStack() as spared:
        for name in names:
            result = Copied(name)
            done.append(result)
            try:
                described = description(source, places, name)
                keys = None if prompts is None else keys_of(prompts, described)
            except KVTierError as error:
                if namespace is not None:
                    raise
                result.skipped = str(error)
                continue
            choice = choose(places, name, hottest=hottest)
            if keys is not None:
                choice = choice.only(keys)
                result.missing = len(keys) - len(choice)
            sizes = sizes_in(target.tiers[tier], described)
            some_before = any(each.asked for each in done)
            found, allowed = len(choice), min(most, room)
            choice = choice.cut(allowed, sizes) if some_before else first_of(choice, allowed, sizes)
            result.asked = len(choice)
            result.left = found - len(choice)
            if not choice:
                continue
            reader = ChoiceReader(source, choice, described)
            try:
                with (
                    open_sink(target, tier, described, reader, pace, before) as sink,
                    console.progress("copying", len(choice), "blocks") as bar,
                ):
                    sink.fill(pieces_of(choice, sink.piece), result, bar)
                    sink.carry_uses(choice.used())
            except KVTierError as error:  # its folder may be another user's, and the next one not
                if len(names) == 1:
                    raise
                result.skipped = str(error)
                continue
            sink.check(result)
            most -= int(choice.room(sizes).sum())
            room -= taken_by(choice, target.tiers[tier], sizes)
            settings = target.tiers[tier]
            if isinstance(settings, NvmeSettings) and name != names[-1]:
                spared.enter_context(sparing(Path(settings.path), described))
            elif name != names[-1]:
                before[name] = set(choice.keys(0, len(choice)))
    return done


def description(config: StackConfig, places: Sequence[Place], name: str) -> Namespace:
    """What a namespace means, from these places or another tier of their stack: it does not lie
    beside the blocks in host memory. Raises KVTierError where nothing says it."""
    if name not in known_namespaces(places):
        seen = {place.tier for place in places}
        others = [tier for tier in range(len(config.tiers)) if tier not in seen]
        places = [*places, *look_at(config, others, name)]
    if found := known_namespaces(places).get(name):
        return found
    if troubles := console.troubles_of(places):
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


def report(
    done: Sequence[Copied], places: Sequence[Place], json: bool, *, may_skip: bool = False
) -> None:
    """Say what was copied; ends with a failure if something is missing. `may_skip`: it is none to
    skip a namespace of which nothing was asked for, unless there is no other."""
    skipped = [each for each in done if each.skipped]
    rest = [each for each in done if not each.skipped]
    troubles = console.troubles_of(places)
    excused = [each for each in skipped if rest and may_skip and not each.asked]
    ok = not troubles and all(each.whole or each in excused for each in done)
    if json:
        console.print_json({"ok": ok, "namespaces": done, "troubles": troubles})
    elif not done and not troubles:
        where = ", ".join(place.where for place in places)
        console.say(f"there is nothing to copy: nothing in {where} tells of blocks")
    elif rest:
        _show(rest)
    for each in skipped:
        console.warn(f"namespace {each.namespace[:12]} is skipped: {each.skipped}")
    if untold := sum(each.untold for each in done):
        console.warn(
            f"{untold} blocks are not written down in the store, because that failed: they may be "
            "there, but only a listing would find them; run it again once the store is well"
        )
    if any(each.full for each in done):
        console.warn(
            "the tier had no room for the rest: it is full, its disk is (free_floor counts), its "
            "store went away, or an engine that runs there holds it - kvtier doctor and kvtier du "
            "say which; give it more room, stop the engine meanwhile, or copy less with --size"
        )
    elif gone := [each for each in rest if each.all_gone]:
        asked = sum(each.asked for each in gone)
        console.warn(f"all {asked} blocks are gone that the source says it has: see kvtier verify")
    elif not all(each.whole for each in rest) and not untold:
        console.warn("some blocks are missing: run it again, or see kvtier verify and kvtier du")
    console.end_with_troubles(places, failed=not ok)


def _show(done: Sequence[Copied]) -> None:
    columns = ["namespace", "asked", "there", "copied", "size", "bad"]
    columns += ["unread", "gone", "not stored"]
    rows = [
        [
            each.namespace[:12],
            each.asked,
            each.already_there,
            each.copied,
            human.size(each.bytes),
            each.bad,
            each.unread,
            each.gone,
            each.not_stored,
        ]
        for each in done
    ]
    console.print_table(columns, rows, numbers=columns[1:])
    if moved := sum(each.bytes for each in done):
        seconds = sum(each.seconds for each in done)
        rate = human.rate(moved / seconds)
        console.say(f"{human.size(moved)} in {human.duration(seconds)}, {rate}")
    if left := sum(each.left for each in done):
        console.say(f"{left} blocks are left out: beyond --size, or 95 % of the tier's capacity")
    if missing := sum(each.missing for each in done):
        console.say(f"{missing} blocks that the prompts ask for are not in the source")


def tier_to_fill(config: StackConfig, into: str | None) -> int:
    """The tier that an option names, or the first one below host memory that keeps blocks."""
    tier = options.tier_of(into, config, "--into")
    if tier is None:
        kinds = [settings.kind for settings in config.tiers]
        if "nvme" not in kinds:
            raise KVTierError("this stack has no nvme tier to fill: name one with --into")
        tier = kinds.index("nvme")
    settings = config.tiers[tier]
    if settings.kind == "memory" or getattr(settings, "persistence", None) is Persistence.DISCARD:
        raise KVTierError(
            f"tier {tier} ({settings.kind}) keeps nothing when a process ends, and so nothing of "
            "what this one copies: name another with --into, or set its persistence: keep"
        )
    return tier


def store_of(
    text: str | None, config: StackConfig, *, to_write: bool = True
) -> tuple[StackConfig, int]:
    """The object tier that a url, another stack file, or the stack itself names."""
    if text is not None and "://" in text:
        settings = ObjectSettings(url=text, capacity=Capacity(ByteSize(UNLIMITED)))
        try:
            BACKEND.check(settings, None)
        except ConfigError as error:
            if to_write or not isinstance(error, NotWritable):
                shown = "this url" if re.search("[@?]", text) else text  # a password, a signature
                raise ConfigError(shown, error.problem, error.remedy) from error
        folder = local_folder(text)
        if not to_write and folder is not None and not folder.exists():
            raise ConfigError(text, "there is no such folder", "name one that holds a snapshot")
        return msgspec.structs.replace(config, tiers=(config.tiers[0], settings)), 1
    if text is not None and Path(text).is_dir():
        raise ConfigError(text, "is a folder", f"write {Path(text).resolve().as_uri()}")
    if text is not None and not Path(text).exists():
        remedy = "write s3://bucket/prefix or file:///folder, or name a stack with a store"
        raise ConfigError(text, "neither a url nor a stack file", remedy)
    other = config if text is None else load(Path(text), to_write=to_write)
    stores = [tier for tier, each in enumerate(other.tiers) if each.kind == "object"]
    if len(stores) == 1:
        return other, stores[0]
    where = "this stack" if text is None else text
    count = f"{len(stores)} object tiers" if stores else "no object tier"
    raise KVTierError(f"{where} has {count}: name a url, like s3://bucket/prefix")


def look_at(config: StackConfig, tiers: Iterable[int], namespace: str | None) -> list[Place]:
    """Some of a stack's tiers, and how often the blocks of one namespace or of all were used."""
    uses_of = (namespace or "").lower()
    return [place for tier in tiers for place in look(config, tier, quick=True, uses_of=uses_of)]
