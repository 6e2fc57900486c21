"""A store that people, not engines, use: opened with errors that say what to do, deleted from, rid
of what nobody will ask for again (`kvtier gc`), and tried with objects of names of their own.

Any process may collect garbage at any time beside running servers. What is too old or over the
budget is the caretaker's to delete: `gc` becomes the caretaker for a moment where no server is it.
Objects that kvtier did not name are never touched.

`bench` and `doctor` write objects to try a store with; what is left of them if they are killed is
found here.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice

import msgspec

from kvtier.backends.object import manifests, namespaces, writer_ids
from kvtier.backends.object.caretaker import Caretaker, Limits
from kvtier.backends.object.gil_yield import GilYield
from kvtier.backends.object.lease import Lease, LeaseLost
from kvtier.backends.object.object_names import (
    SERVERS,
    ServerName,
    described_namespace,
    description_name,
    new_writer,
    parse_block,
    parse_server,
    uses_prefix,
)
from kvtier.backends.object.settings import ObjectSettings, capacity_of, open_for
from kvtier.backends.object.stores.errors import StoreError, TransientError
from kvtier.backends.object.stores.store import DELETES_MAX, Store
from kvtier.errors import MediumError
from kvtier.inspect import Contents, Garbage, Part, Reporter, inspector

_BENCH = "kvtier-bench-"
_DOCTOR = "kvtier-doctor/"
_OLD_S = 2 * 3600.0
"""A bench says each few seconds that it lives, and the doctor needs seconds: after an hour there is
nobody any more. The other hour is for clocks that are wrong."""
_PASSES_MAX = 8
"""An engine may go on writing where all is deleted."""
_NOBODY = "0" * 32
"""The namespace of a caretaker that serves none."""


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
            while some := list(islice(listed, DELETES_MAX)):
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
    return msgspec.structs.replace(settings, url=_url_below(settings, name))


def _url_below(settings: ObjectSettings, name: str) -> str:
    return f"{settings.url.rstrip('/')}/{name}"


# -- garbage --------------------------------------------------------------------------------------


def find_garbage(
    settings: ObjectSettings,
    contents: Contents,
    served: Mapping[str, float],
    idle_s: float | None,
    reporter: Reporter,
) -> Iterator[Garbage]:
    """Idle namespaces, blocks too old or over the budget, what told of blocks that went, and what
    was only written to try the store. `served` says when a server last used a namespace."""
    idle = _idle(contents.parts, served, idle_s)
    for part in idle:
        yield Garbage(
            "namespace that nobody used for so long",
            _url_below(settings, part.namespace),
            part.bytes,
            partial(remove_idle, settings, part.namespace, idle_s or 0.0, reporter),
        )
    folder = settings.folder
    if folder is not None:
        yield from inspector.left_behind(folder)
    made = folder is None or folder.exists()  # opening the store would make it
    if made and not contents.troubles:
        for name, size in left_behind(settings).items():
            what = "what a measurement or a doctor left that was killed"
            remove = partial(remove_left, settings, name, reporter)
            yield Garbage(what, _url_below(settings, name), size, remove)
        yield from _surveyed(settings, {part.namespace for part in idle})


def _idle(parts: Sequence[Part], served: Mapping[str, float], idle_s: float | None) -> list[Part]:
    if idle_s is None:
        return []
    now = time.time()
    return [
        part
        for part in parts
        if now - max(part.newest or 0.0, served.get(part.namespace, 0.0)) > idle_s
    ]


def _surveyed(settings: ObjectSettings, going: set[str]) -> Iterator[Garbage]:
    capacity = capacity_of(settings)
    age_s = None if settings.age_max is None else settings.age_max.seconds
    if settings.only_read:  # how much others keep, and for how long, is up to them
        capacity, age_s = sys.maxsize, None
    limits = Limits(capacity, settings.refresh.seconds, settings.audit.seconds, age_s)

    def remove_blocks() -> bool:
        with opened_store(settings) as store:
            try:
                kept = collect(store, limits)
            except LeaseLost as error:
                raise MediumError(
                    "a server that runs is the caretaker of this store: it deletes what is too old "
                    "or over the budget, by its own settings"
                ) from error
        if kept:
            raise MediumError(f"the store kept {kept} blocks: try again")
        return True

    def remove_description(namespace: str) -> bool:
        with opened_store(settings) as store:
            return namespaces.remove(store, namespace, store_time(time.time()))

    with opened_store(settings) as store:
        due, empty = survey(store, capacity, age_s, time.time(), going)
    if due:
        yield Garbage(
            "blocks that are too old or over the budget", settings.url, due, remove_blocks
        )
    for namespace, size in empty.items():
        what = "what told of a namespace without blocks"
        yield Garbage(
            what, _url_below(settings, namespace), size, partial(remove_description, namespace)
        )


def survey(
    store: Store,
    capacity: int,
    age_max_s: float | None,
    now: float,
    without: Collection[str] = (),
) -> tuple[int, dict[str, int]]:
    """How many bytes of blocks should go, and how many describe each namespace that has no block
    and that nobody uses. Raises StoreError. Namespaces in `without` count as if they were gone."""
    descriptions = namespaces.Descriptions()
    size = too_old = 0
    for info in store.list():
        if info.name.partition("/")[0] in without:
            continue
        if parsed := parse_block(info.name):
            descriptions.add_block(parsed[0])
            size += info.size
            if age_max_s is not None and now - info.modified_s >= age_max_s:
                too_old += info.size
        else:
            descriptions.add_other(info)
    empty = {
        namespace: described
        for namespace, described in descriptions.without_blocks().items()
        if namespaces.leftovers(store, namespace, store_time(now)) is not None
    }
    return max(too_old, size - capacity, 0), empty


def store_time(now: float) -> float:
    """A time that is not later than the store's own, as far as clocks can be wrong."""
    return now - manifests.SKEW_US / 1e6


def collect(store: Store, limits: Limits) -> int:
    """Be the caretaker until nothing is too old or over the budget; how many objects the store
    would not delete. Raises LeaseLost if a server is the caretaker; other StoreErrors."""
    server = writer_ids.new_writer_id()
    lease = Lease(store, server, limits.lease_s)
    try:
        while lease.look() is not None or not lease.acquire():
            if lease.decided_at == math.inf:
                raise LeaseLost("another server is the caretaker")
            time.sleep(max(0.0, lease.decided_at - lease.clock()))
        lease.look()  # the store's time
        caretaker = Caretaker(
            store,
            lease,
            ServerName(_NOBODY, server, new_writer(), limits.capacity, max(1, limits.capacity)),
            limits,
            clock=time.time,
            gil_yield=GilYield(lambda: lease.publish(lease.last_report)),
        )
        caretaker.audit()
        before = None
        while before != (before := caretaker.to_do):
            caretaker.round()
        return caretaker.kept + len(caretaker.doomed)
    finally:
        lease.close()
        writer_ids.mark_ended(server)
