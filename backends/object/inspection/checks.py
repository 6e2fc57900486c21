"""What `doctor` looks at in an object store: each right that a tier needs, one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvtier import amounts
from kvtier.backends.object.inspection.store_access import local_folder, new_probe
from kvtier.backends.object.settings import ObjectSettings, open_for
from kvtier.backends.object.stores.errors import StoreError, TransientError
from kvtier.backends.object.stores.store import PutOutcome, Store, is_name
from kvtier.inspect import Finding, Level
from kvtier.settings import WHOSE

_SKEW_S = 60.0
_BODY = b"kvtier doctor"
_MANY = 8
"""So many names are deleted by one request, which a store may refuse that deletes single ones."""
_FOLDERS_MAX = 4096
"""In so many folders it is tried: a store may have millions, each a moment's work for a network."""
_WHERE = {
    "credentials": "they come from the environment, a profile or a role",
    "clock": "timedatectl says whether it is set by NTP",
    "HTTPS_PROXY": "look at the variables HTTP_PROXY, HTTPS_PROXY and NO_PROXY",
}
"""What is no setting of the tier."""


def check_store(area: str, settings: ObjectSettings) -> Iterator[Finding]:
    """List, put, conditional put, get and delete, with one small object that is removed again; of
    a store that is only read, list and get."""
    folder = local_folder(settings.url)
    if folder is not None and not folder.exists():
        yield Finding(area, Level.OK, f"{folder} will be made")
        return
    try:
        store = open_for(settings)
    except StoreError as error:
        yield _refused(area, "open", error)
        return
    name = new_probe()
    try:
        yield from _rights(area, settings, store, name)
    finally:
        store.close()


def _rights(area: str, settings: ObjectSettings, store: Store, name: str) -> Iterator[Finding]:
    start = time.perf_counter()
    listed = _try(area, "list", lambda: next(iter(store.list("kvtier-doctor/")), None))
    if listed is not None:
        yield listed
        return
    took = amounts.duration(time.perf_counter() - start)
    if (folder := local_folder(settings.url)) and (closed := _closed_below(folder)):
        what = f"{closed} may not be read, and so nothing is known of all that is there"
        yield Finding(area, Level.BAD, what, WHOSE)
        return
    yield Finding(area, Level.OK, f"{settings.url} answers within {took}, and may be listed")
    if settings.only_read:
        failed = _try(area, "get", lambda: store.get(name, memoryview(bytearray(1))))
        yield failed or Finding(area, Level.OK, "objects may be read, which is all that is needed")
        return
    failed = _try(area, "put", lambda: store.put(name, [memoryview(_BODY)]))
    if failed is not None:
        yield failed
        return
    try:
        yield Finding(area, Level.OK, "objects may be written")
        if settings.conditional_put:
            yield _conditional(area, store, name)
        yield from _read_back(area, store, name)
    finally:  # also if nobody hears of it, as after Ctrl-C
        deleted = _deletes(area, store, name)
    yield from deleted


def _closed_below(store: Path) -> str | None:
    """A folder that may not be listed, like one of a snapshot that root has made here."""
    refused: list[OSError] = []
    for _, folders, _ in islice(os.walk(store, onerror=refused.append), _FOLDERS_MAX):
        folders[:] = [name for name in folders if is_name(name)]
    return str(refused[0].filename) if refused else None


def _conditional(area: str, store: Store, name: str) -> Finding:
    try:
        outcome = store.put(name, [memoryview(_BODY)], if_absent=True)
    except StoreError as error:
        return _refused(area, "put with If-None-Match", error)
    if outcome is PutOutcome.ALREADY_THERE:
        return Finding(area, Level.OK, "what is there already is refused (If-None-Match)")
    return Finding(
        area,
        Level.NOTE,
        "the store ignores If-None-Match: a block may be written twice, with equal bytes",
        "set conditional_put: false, which says the same without the attempt",
    )


def _read_back(area: str, store: Store, name: str) -> Iterator[Finding]:
    body = bytearray(len(_BODY))
    try:
        found = store.get(name, memoryview(body))
        info = store.head(name)
    except StoreError as error:
        yield _refused(area, "get", error)
        return
    if found != len(_BODY) or bytes(body) != _BODY or info is None:
        yield Finding(
            area, Level.BAD, "what was written does not come back", "ask who runs the store"
        )
        return
    yield Finding(area, Level.OK, "objects may be read")
    skew = info.modified_s - time.time()
    if abs(skew) > _SKEW_S:
        yield Finding(
            area,
            Level.WARN,
            f"the store's clock and this machine's are {amounts.duration(abs(skew))} apart",
            "set the clock (ntp): beyond 15 minutes a store refuses what is signed",
        )
    else:
        yield Finding(area, Level.OK, "the clocks agree")


def _deletes(area: str, store: Store, name: str) -> list[Finding]:
    """Remove the object, in both ways, and say which of them the store takes."""
    many = [name, *(f"{name}-{number}" for number in range(1, _MANY))]
    refused = _try(area, "delete of several", lambda: _delete(store, many))
    failed = _try(area, "delete", lambda: _delete(store, [name]))
    if failed is not None:
        return [failed]
    good = Finding(area, Level.OK, "objects may be deleted")
    return [good] if refused is None else [refused, good]


def _delete(store: Store, names: Sequence[str]) -> None:
    """Only the first of them need be there: to delete what is not is no error."""
    for error in store.delete(names).values():
        raise error


def _try(area: str, what: str, call: Callable[[], object]) -> Finding | None:
    try:
        call()
    except StoreError as error:
        return _refused(area, what, error)
    return None


def _refused(area: str, what: str, error: StoreError) -> Finding:
    return Finding(area, Level.BAD, f"{what}: {error}", remedy(error))


def remedy(error: StoreError) -> str:
    """Where to look, beyond what the error says itself."""
    if isinstance(error, TransientError):
        return "see that it is running and can be reached from here"
    if not error.setting:
        return "ask who runs the store"
    return _WHERE.get(error.setting, f"look at the setting {error.setting}")
