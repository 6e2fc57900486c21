"""What `bench` and `doctor` write into a store to try it, under names of their own, and what is
left of it there if they are killed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvtier.backends.object.inspection.deletion import delete_objects, empty_store
from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.settings import ObjectSettings
from kvtier.inspect import Reporter

_BENCH = "kvtier-bench-"
_DOCTOR = "kvtier-doctor/"
_OLD_S = 2 * 3600.0
"""Who measures renews a claim each minute, and the doctor needs seconds: after an hour there is
nobody any more. The other hour is for clocks that are wrong."""


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
