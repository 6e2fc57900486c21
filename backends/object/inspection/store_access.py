"""A store that people, not engines, use: opened with errors that say what to do, deleted from, and
tried with objects of names of their own.

`bench` and `doctor` write such objects; what is left of them if they are killed is found here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

import msgspec

from kvtier.backends.object import writer_ids
from kvtier.backends.object.object_names import (
    SERVERS,
    described_namespace,
    description_name,
    parse_block,
    parse_server,
    uses_prefix,
)
from kvtier.backends.object.settings import ObjectSettings, open_for, parse_url
from kvtier.backends.object.stores.errors import StoreError, TransientError
from kvtier.backends.object.stores.store import Store
from kvtier.errors import MediumError
from kvtier.inspect import Reporter

_BENCH = "kvtier-bench-"
_DOCTOR = "kvtier-doctor/"
_OLD_S = 2 * 3600.0
"""A bench says each few seconds that it lives, and the doctor needs seconds: after an hour there is
nobody any more. The other hour is for clocks that are wrong."""
_PASSES_MAX = 8
"""An engine may go on writing where all is deleted."""


@contextmanager
def opened_store(settings: ObjectSettings) -> Iterator[Store]:
    """Raises MediumError for all that the store raises, here and in the block."""
    try:
        with closing(open_for(settings)) as store:
            yield store
    except StoreError as error:
        raise MediumError(down(error)) from error


def down(error: StoreError) -> str:
    """What a store said, and where to look."""
    look = "see that the store is running, and kvtier doctor"
    return f"{error}; {look if isinstance(error, TransientError) else 'see kvtier doctor'}"


def local_folder(url: str) -> Path | None:
    """The folder of a file:// url, None for any other text."""
    with suppress(StoreError):
        return parse_url(url).folder
    return None


# -- deleting --------------------------------------------------------------------------------------


def delete_objects(settings: ObjectSettings, names: Sequence[str]) -> int:
    """Delete objects; how many. Raises MediumError if the store cannot be reached."""
    with opened_store(settings) as store:
        return len(names) - len(store.delete(names))


def remove_namespace(settings: ObjectSettings, namespace: str, reporter: Reporter) -> None:
    """Delete all objects of a namespace, and those of its servers that have ended. Raises
    MediumError if some objects stay.

    What has no name of this kvtier's is left alone: it may be a newer one's, and then the
    description is its, too.
    """

    def goes(name: str) -> bool:
        return parse_block(name) is not None or described_namespace(name) is not None

    with opened_store(settings) as store:
        servers = (info.name for info in store.list(f"{SERVERS}{namespace}-"))
        ended = [name for name in servers if _has_ended(name)]
        last = description_name(namespace)
        strangers, kept = _delete_below(store, f"{namespace}/", goes, reporter, last)
        if strangers:
            reporter.warn(
                f"{strangers} objects below {namespace} stay: they are not kvtier's, or a newer "
                "kvtier's"
            )
        if kept := kept or _why(store.delete(ended)):
            raise MediumError(f"the store kept some objects of {namespace}: {down(kept)}")


def _has_ended(name: str) -> bool:
    parsed = parse_server(name)
    return parsed is not None and not writer_ids.may_live(parsed.server)


def remove_idle(
    settings: ObjectSettings, namespace: str, idle_s: float, reporter: Reporter
) -> bool:
    """`remove_namespace`, unless somebody has begun to use it since it was found to be idle: who
    does writes that down beside the blocks, of which there may be millions. (The caretaker writes
    manifests of namespaces that nobody uses.)"""
    prefixes = (f"{SERVERS}{namespace}-", uses_prefix(namespace), description_name(namespace))
    with opened_store(settings) as store:
        last = max((info.modified_s for each in prefixes for info in store.list(each)), default=0.0)
    if time.time() - last <= idle_s:
        return False
    remove_namespace(settings, namespace, reporter)
    return True


def empty_store(settings: ObjectSettings, reporter: Reporter) -> None:
    """Delete every object below a url that is nobody else's."""
    with opened_store(settings) as store:
        _delete_below(store, "", lambda name: True, reporter)


def _delete_below(
    store: Store, prefix: str, goes: Callable[[str], bool], reporter: Reporter, last: str = ""
) -> tuple[int, StoreError | None]:
    """Delete all objects that begin so, and that are to go by their names, while they are listed,
    because there may be millions; `last` goes when nothing else is left. How many others there are,
    and if not all went that should, why. It is listed again until nothing is found: in a store that
    counts its way through a listing, each deletion makes it skip an object."""
    with reporter.progress("removing", 0, "objects") as bar:
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


def _why(kept: Mapping[str, StoreError]) -> StoreError | None:
    """Why some objects could not be deleted: mostly all of them for one reason."""
    return next(iter(kept.values()), None)


# -- objects to try a store with -------------------------------------------------------------------


@contextmanager
def measuring_prefix(settings: ObjectSettings, reporter: Reporter) -> Iterator[ObjectSettings]:
    """A prefix of one's own, emptied afterwards: a tier may delete what is beyond its capacity from
    all that it sees."""
    own = _below(settings, new_bench())
    try:
        yield own
    finally:
        empty_store(own, reporter)


def new_bench() -> str:
    """The name of a place to measure in."""
    return f"{_BENCH}{secrets.token_hex(8)}"


def new_probe() -> str:
    """The name of an object to try rights with."""
    return f"{_DOCTOR}{secrets.token_hex(8)}"


def left_behind(settings: ObjectSettings) -> dict[str, int]:
    """Names of benches' places and of the doctor's objects that nobody uses any more, and how many
    bytes each has. Raises MediumError."""
    sizes: dict[str, int] = {}
    latest: dict[str, float] = {}
    with opened_store(settings) as store:
        for prefix in (_BENCH, _DOCTOR):
            for info in store.list(prefix):
                name = info.name.partition("/")[0] if prefix == _BENCH else info.name
                sizes[name] = sizes.get(name, 0) + info.size
                latest[name] = max(info.modified_s, latest.get(name, 0.0))
    now = time.time()
    return {name: size for name, size in sizes.items() if now - latest[name] > _OLD_S}


def remove_left(settings: ObjectSettings, name: str, reporter: Reporter) -> bool:
    """Remove one of these, unless it is in use after all. Raises MediumError."""
    if name not in left_behind(settings):
        return False
    if name.startswith(_DOCTOR):
        return delete_objects(settings, [name]) == 1
    empty_store(_below(settings, name), reporter)
    return True


def _below(settings: ObjectSettings, name: str) -> ObjectSettings:
    return msgspec.structs.replace(settings, url=f"{settings.url.rstrip('/')}/{name}")
