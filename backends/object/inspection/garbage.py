"""What lies in a store that nobody will ask for again, and `kvtier gc`, which removes it.

Any process may collect garbage at any time beside running servers. What is too old or over the
budget is the caretaker's to delete: `gc` becomes the caretaker for a moment where no server is it.
Objects that kvtier did not name are never touched.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from kvtier.backends.object import manifests, namespaces, writer_ids
from kvtier.backends.object.caretaker import Caretaker, Limits
from kvtier.backends.object.gil_yield import GilYield
from kvtier.backends.object.inspection.store_access import (
    left_behind,
    local_folder,
    opened_store,
    remove_idle,
    remove_left,
)
from kvtier.backends.object.lease import Lease, LeaseLost
from kvtier.backends.object.object_names import ServerName, new_writer, parse_block
from kvtier.backends.object.settings import ObjectSettings, capacity_of
from kvtier.backends.object.stores.store import Store
from kvtier.errors import MediumError
from kvtier.inspect import Contents, Garbage, Part, Reporter, inspector

_NOBODY = "0" * 32
"""The namespace of a caretaker that serves none."""


# -- for commands ----------------------------------------------------------------------------------


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
            _below(settings, part.namespace),
            part.bytes,
            partial(remove_idle, settings, part.namespace, idle_s or 0.0, reporter),
        )
    folder = local_folder(settings.url)
    if folder is not None:
        yield from inspector.left_behind(folder)
    made = folder is None or folder.exists()  # opening the store would make it
    if made and not contents.troubles:
        for name, size in left_behind(settings).items():
            what = "what a measurement or a doctor left that was killed"
            remove = partial(remove_left, settings, name, reporter)
            yield Garbage(what, _below(settings, name), size, remove)
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


def _below(settings: ObjectSettings, namespace: str) -> str:
    return f"{settings.url.rstrip('/')}/{namespace}"


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

    def remove_namespace(namespace: str) -> bool:
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
        yield Garbage(what, _below(settings, namespace), size, partial(remove_namespace, namespace))


# -- in the store ----------------------------------------------------------------------------------


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
        if namespaces.is_unused(store, namespace, store_time(now))
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
