"""An object store's prefix, seen through one listing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from kvtier.backends.object import ObjectSettings, capacity_of, open_for
from kvtier.backends.object.budget.claim import PREFIX, claims_of_ended_writers
from kvtier.backends.object.housekeeping.use_counts import Uses, count_uses, used_blocks
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, Entries
from kvtier.backends.object.object_names import (
    blocks_prefix,
    described_namespace,
    description_name,
    parse_block,
    parse_manifest,
    uses_prefix,
)
from kvtier.backends.object.stores.errors import Forbidden, StoreError, TransientError
from kvtier.backends.object.stores.open_store import parse_url
from kvtier.backends.object.stores.store import (
    NAMESPACES_MAX,
    ObjectInfo,
    Store,
    bounded,
    check_namespaces,
    read_description,
)
from kvtier.cli import console
from kvtier.cli.blocks import Block
from kvtier.cli.holdings import (
    NAMESPACE_ID,
    Part,
    Place,
    standing,
)
from kvtier.config import StackConfig
from kvtier.core.settings import TierSettings
from kvtier.core.slab.layout import keys_of
from kvtier.core.system.disk import Disk
from kvtier.errors import ConfigError, MediumError
from kvtier.types import BlockKey, Namespace

_PASSES_MAX = 8
"""An engine may go on writing where all is deleted."""


def look_at_store(
    tier: int, config: StackConfig, *, quick: bool, count: bool, uses_of: str | None
) -> Place:
    """What is below a url; a store that is down is a trouble, not an error.

    `quick`: what is written down of the blocks, read in a moment where a listing takes minutes, and
    without what a writer that died could not write down any more.
    """
    settings = config.tiers[tier]
    assert isinstance(settings, ObjectSettings)
    place = Place(tier=tier, kind="object", where=settings.url)
    place.list_objects = partial(_objects, place, settings)
    folder = local_folder(settings.url)
    place.capacity = capacity_of(settings)
    if folder is not None:
        place.free = Disk().free_bytes(standing(folder))
    if folder is not None and not folder.exists():
        return place  # opening the store would make it
    look = _read_manifests if quick else _count if count else _name
    try:
        with closing(open_for(settings)) as store:
            look(place, store, uses_of)
    except StoreError as error:
        place.troubles.append(_down(error))
        place.unseen = not place.parts
    return place


def _down(error: StoreError) -> str:
    look = "see that the store is running, and kvtier doctor"
    return f"{error}; {look if isinstance(error, TransientError) else 'see kvtier doctor'}"


def _objects(
    place: Place, settings: ObjectSettings, prefixes: Iterable[str]
) -> Iterator[ObjectInfo]:
    try:
        with closing(open_for(settings)) as store:
            for prefix in prefixes:
                yield from store.list(prefix)
    except StoreError as error:  # since it was looked at, or as then
        if (said := _down(error)) not in place.troubles:
            place.troubles.append(said)


def _name(place: Place, store: Store, uses_of: str | None) -> None:
    """Which namespaces have blocks, by the first of each."""
    down: StoreError | None = None
    for name in bounded(_namespace_names(store), NAMESPACES_MAX, "namespaces"):
        if any(parse_block(info.name) for info in store.list(blocks_prefix(name))):
            part = Part(tier=place.tier, kind=place.kind, namespace=name, in_use=None)
            place.parts.append(part)
            down = _read_about(place, store, part, uses_of) or down
    if down is not None:
        raise down


def _count(place: Place, store: Store, uses_of: str | None) -> None:
    parts: dict[str, Part] = {}
    down: StoreError | None = None
    for info in _listed(place, store):
        place.used += info.size
        parsed = parse_block(info.name)
        if parsed is None:
            if (told := described_namespace(info.name)) and not parse_manifest(info.name):
                place.served[told] = max(info.modified_s, place.served.get(told, 0.0))
            continue
        name, key, _ = parsed
        part = parts.get(name)
        if part is None:
            part = Part(tier=place.tier, kind=place.kind, namespace=name, in_use=None)
            parts[name] = part
            check_namespaces(parts)
            down = _read_about(place, store, part, uses_of) or down
        part.blocks += 1
        part.bytes += info.size
        part.add_times(info.modified_s, info.modified_s)
        hits, used = place.used_blocks.get(name, {}).get(key, (0, 0.0))
        if hits:
            part.add_uses(hits, used)
    place.parts = sorted(parts.values(), key=lambda part: -part.bytes)
    if down is not None:  # what is listed counts all the same
        raise down


def _read_about(place: Place, store: Store, part: Part, uses_of: str | None) -> StoreError | None:
    """What tells of a namespace whose first block was listed; why it could not be read, if so."""
    name = part.namespace
    try:
        with _told_if_closed(place, name):
            namespace = _describe(place, store, name)
            shown = uses_of is not None and name.startswith(uses_of)
            if shown and namespace and (found := used_blocks(store, namespace)) is not None:
                place.used_blocks[name] = _by_key(found)
                part.add_uses(0, 0.0)
    except StoreError as error:
        return error
    return None


@contextmanager
def _told_if_closed(place: Place, name: str) -> Iterator[None]:
    """What may not be read of one namespace keeps no other from being looked at."""
    try:
        yield
    except Forbidden as error:
        place.troubles.append(f"{closed(place, name)}{error}")


def closed(place: Place, name: str) -> str:
    """How it begins what is said of a namespace of which something may not be read."""
    return f"of the namespace {name[:12]} in {place.where}: "


def _listed(place: Place, store: Store) -> Iterator[ObjectInfo]:
    """All objects; to a person who waits it is said how many they are: a million take minutes."""
    with console.progress(f"listing {place.where}:", 0, "objects") as bar:
        for info in store.list():
            bar.advance(1)
            yield info


def _by_key(found: Entries) -> dict[BlockKey, tuple[int, float]]:
    uses = zip(found["size"].tolist(), (found["time_us"] / 1e6).tolist(), strict=True)
    return dict(zip(keys_of(found), uses, strict=True))


def _describe(place: Place, store: Store, name: str) -> Namespace | None:
    namespace = read_description(store, name)
    if namespace is not None:
        place.namespaces[name] = namespace
    return namespace


def _read_manifests(place: Place, store: Store, uses_of: str | None) -> None:
    for name in bounded(_namespace_names(store), NAMESPACES_MAX, "namespaces"):
        with _told_if_closed(place, name):
            _read_namespace(place, store, name, uses_of)


def _read_namespace(place: Place, store: Store, name: str, uses_of: str | None) -> None:
    namespace = _describe(place, store, name)
    if namespace is None:
        if any(parse_block(info.name) for info in store.list(f"{name}/")):
            place.troubles.append(
                f"nothing in {place.where} says what the namespace {name} means: its blocks are "
                f"left alone; with a stack that has this url, kvtier clear {name[:12]} --tier "
                "object removes them"
            )
        return
    entries = Journal(store, namespace).read_all()
    added = entries[entries["kind"] == ADDED]
    part = Part(tier=place.tier, kind=place.kind, namespace=name, in_use=None)
    part.blocks = len(added)
    if len(added):
        part.bytes = int(added["size"].sum())
        times = added["time_us"] / 1e6
        part.add_times(float(times.min()), float(times.max()))
    place.manifests[name] = added
    if uses_of is not None and name.startswith(uses_of):
        place.uses[name] = count_uses(store, namespace, added)
    place.parts.append(part)


def _namespace_names(store: Store) -> Iterator[str]:
    """The namespaces below a url, one short listing each."""
    after = ""
    while (info := next(store.list(after=after), None)) is not None:
        name = info.name.partition("/")[0]
        if NAMESPACE_ID.fullmatch(name):
            yield name
        after = f"{name}0"  # behind all that begins with the name and "/"


def list_blocks(place: Place, namespace: str, begins: Sequence[str]) -> Iterator[Block]:
    """The blocks of namespaces that begin so, with keys that begin with one of these digits."""
    for name in sorted(part.namespace for part in place.parts):
        if not name.startswith(namespace):
            continue
        uses = place.used_blocks.get(name)
        for info in place.list_objects([blocks_prefix(name, digits) for digits in begins]):
            if (parsed := parse_block(info.name)) is None:
                continue
            _, key, _ = parsed
            hits, used = (None, None) if uses is None else uses.get(key, (0, 0.0))
            yield Block(
                tier=place.tier,
                kind="object",
                namespace=name,
                key=key,
                bytes=info.size,
                stored_at=info.modified_s,
                hits=hits,
                used=used or None,
                name=info.name,
            )


def carry_uses(
    settings: TierSettings, namespace: Namespace, used: Mapping[BlockKey, tuple[int, float]]
) -> None:
    """Write down how often blocks were used, and when last, before they came to this store."""
    with opened_store(settings) as store:
        Uses(store, namespace, 0.0).carry(used)


def delete_objects(settings: TierSettings, names: Sequence[str]) -> int:
    """Delete objects; how many. Raises MediumError if the store cannot be reached."""
    with opened_store(settings) as store:
        return len(names) - len(store.delete(names))


def remove_namespace(settings: TierSettings, namespace: str) -> None:
    """Delete all objects of a namespace, and then the claims of writers that had ended before: what
    they answer for is gone. Raises MediumError if some objects stay, and the claims with them.

    What has no name of this kvtier's is left alone: it may be a newer one's, and then the
    description is its, too.
    """

    def goes(name: str) -> bool:
        return parse_block(name) is not None or described_namespace(name) is not None

    with opened_store(settings) as store:
        claimed = claims_of_ended_writers(store, namespace)
        strangers, kept = _delete_below(
            store, f"{namespace}/", goes, last=description_name(namespace)
        )
        if strangers:
            console.warn(
                f"{strangers} objects below {namespace} stay: they are not kvtier's, or a newer "
                "kvtier's"
            )
        if kept := kept or _why(store.delete(claimed)):
            raise MediumError(f"the store kept some objects of {namespace}: {_down(kept)}")


def _why(kept: Mapping[str, StoreError]) -> StoreError | None:
    """Why some objects could not be deleted: mostly all of them for one reason."""
    return next(iter(kept.values()), None)


def remove_idle(settings: TierSettings, namespace: str, idle_s: float) -> bool:
    """`remove_namespace`, unless somebody has begun to use it since it was found to be idle: who
    does writes that down beside the blocks, of which there may be millions."""
    told = (f"{PREFIX}{namespace}-", uses_prefix(namespace))  # others may write its manifests
    with opened_store(settings) as store:
        last = max((info.modified_s for each in told for info in store.list(each)), default=0.0)
    if time.time() - last <= idle_s:
        return False
    remove_namespace(settings, namespace)
    return True


def empty_store(settings: TierSettings) -> None:
    """Delete every object below a url that is nobody else's."""
    with opened_store(settings) as store:
        _delete_below(store, "", lambda name: True)


def _delete_below(
    store: Store, prefix: str, goes: Callable[[str], bool], last: str = ""
) -> tuple[int, StoreError | None]:
    """Delete all objects that begin so, and that are to go by their names, while they are listed,
    because there may be millions; `last` goes when nothing else is left. How many others there are,
    and if not all went that should, why. It is listed again until nothing is found: in a store that
    counts its way through a listing, each deletion makes it skip an object."""
    with console.progress("removing", 0, "objects") as bar:
        for _ in range(_PASSES_MAX):
            found = others = 0
            kept: StoreError | None = None
            listed = (info.name for info in store.list(prefix) if info.name != last)
            while some := list(islice(listed, store.deletes_at_once)):
                names = [name for name in some if goes(name)]
                kept = _why(store.delete(names)) or kept
                found += len(names)
                others += len(some) - len(names)
                bar.advance(len(names))
            if kept or not found:
                break
        if last and not (kept or others):
            kept = _why(store.delete([last]))
    return others, kept


@contextmanager
def opened_store(settings: TierSettings) -> Iterator[Store]:
    """A store whose errors say what to do to people."""
    assert isinstance(settings, ObjectSettings)
    try:
        with closing(open_for(settings)) as store:
            yield store
    except StoreError as error:
        raise MediumError(_down(error)) from error


def unusable_here(config: StackConfig) -> Iterator[ConfigError]:
    """Why a store cannot be opened by this user though its settings are right, like a profile that
    another user may have: an engine would not start. Makes no request."""
    for index, settings in enumerate(config.tiers):
        if not isinstance(settings, ObjectSettings) or local_folder(settings.url) is not None:
            continue
        try:
            open_for(settings).close()
        except StoreError as error:
            problem, _, remedy = str(error).partition(": ")
            yield ConfigError(f"$.tiers[{index}]", problem, remedy)


def local_folder(url: str) -> Path | None:
    """The folder of a file:// url, None for any other text."""
    with suppress(StoreError):
        return parse_url(url).folder
    return None
