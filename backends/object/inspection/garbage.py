"""What lies in a store that nobody will ask for again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from kvtier.backends.object.housekeeping import gc
from kvtier.backends.object.inspection.deletion import remove_idle
from kvtier.backends.object.inspection.store_access import local_folder, opened_store
from kvtier.backends.object.inspection.temporary_objects import left_behind, remove_left
from kvtier.backends.object.settings import ObjectSettings, capacity_of
from kvtier.backends.object.stores.store import Store
from kvtier.errors import MediumError
from kvtier.inspect import Contents, Garbage, Part, Reporter, inspector
from kvtier.settings import WritePolicy


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
    if settings.write is WritePolicy.NEVER:  # how much others keep, and for how long, is up to them
        capacity, age_s = sys.maxsize, None

    def survey(store: Store) -> gc.Survey:
        return gc.survey(store, capacity, age_s, time.time(), going)

    def collect() -> bool:
        with opened_store(settings) as store:
            found = survey(store)
            gone = gc.collect(store, found)
        if kept := len(found.garbage) - gone:
            raise MediumError(f"the store kept {kept} of {len(found.garbage)} blocks: try again")
        return True

    def remove(namespace: str) -> bool:
        with opened_store(settings) as store:
            return gc.remove_empty_namespace(store, namespace, time.time())

    with opened_store(settings) as store:
        found = survey(store)
    if found.garbage:
        what = f"{len(found.garbage)} blocks that are too old or over the budget"
        yield Garbage(what, settings.url, found.garbage_bytes, collect)
    for namespace, size in found.empty_namespaces.items():
        what = "what told of a namespace without blocks"
        yield Garbage(what, _below(settings, namespace), size, partial(remove, namespace))
