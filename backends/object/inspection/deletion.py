"""Deleting objects for people: a whole namespace, a place of one's own, single ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from kvtier.backends.object.budget.claim import PREFIX, claims_of_ended_writers
from kvtier.backends.object.inspection.store_access import down, opened_store
from kvtier.backends.object.object_names import (
    described_namespace,
    description_name,
    parse_block,
    uses_prefix,
)
from kvtier.backends.object.settings import ObjectSettings
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.errors import MediumError
from kvtier.inspect import Reporter

_PASSES_MAX = 8
"""An engine may go on writing where all is deleted."""


def delete_objects(settings: ObjectSettings, names: Sequence[str]) -> int:
    """Delete objects; how many. Raises MediumError if the store cannot be reached."""
    with opened_store(settings) as store:
        return len(names) - len(store.delete(names))


def remove_namespace(settings: ObjectSettings, namespace: str, reporter: Reporter) -> None:
    """Delete all objects of a namespace, and then the claims of writers that had ended before: what
    they answer for is gone. Raises MediumError if some objects stay, and the claims with them.

    What has no name of this kvtier's is left alone: it may be a newer one's, and then the
    description is its, too.
    """

    def goes(name: str) -> bool:
        return parse_block(name) is not None or described_namespace(name) is not None

    with opened_store(settings) as store:
        claimed = claims_of_ended_writers(store, namespace)
        last = description_name(namespace)
        strangers, kept = _delete_below(store, f"{namespace}/", goes, reporter, last)
        if strangers:
            reporter.warn(
                f"{strangers} objects below {namespace} stay: they are not kvtier's, or a newer "
                "kvtier's"
            )
        if kept := kept or _why(store.delete(claimed)):
            raise MediumError(f"the store kept some objects of {namespace}: {down(kept)}")


def remove_idle(
    settings: ObjectSettings, namespace: str, idle_s: float, reporter: Reporter
) -> bool:
    """`remove_namespace`, unless somebody has begun to use it since it was found to be idle: who
    does writes that down beside the blocks, of which there may be millions."""
    prefixes = (f"{PREFIX}{namespace}-", uses_prefix(namespace))  # others may write its manifests
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
