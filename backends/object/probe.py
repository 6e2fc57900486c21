"""Asks a store for everything the tier will need of it, and says what does not work and why."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec

from kvtier.backends.object.errors import StoreError
from kvtier.backends.object.store import GetOutcome, PutOutcome, Store

_SAMPLE_BYTES = 1 << 20
_SKEW_MAX_S = 60.0


class Step(msgspec.Struct, frozen=True):
    """One thing that was tried."""

    name: str
    ok: bool
    seconds: float
    note: str = ""
    """What is wrong and what to do about it, or what is worth knowing."""
    setting: str = ""
    """The setting to look at."""


class _Failed(Exception):
    """The store answered, but not as it should."""


def probe(store: Store) -> list[Step]:
    """Write, read, list and delete one small object under a name of its own.

    Without listing and deleting the tier cannot keep its budget; a store that does not refuse a
    second writer costs uploads and nothing else. Stops at what makes the rest pointless.
    """
    name = f"probe/{secrets.token_hex(8)}"
    data = memoryview(secrets.token_bytes(_SAMPLE_BYTES))
    steps = [_try("put", lambda: _put(store, name, data))]
    if not steps[0].ok:
        return steps
    steps += [
        _try("get", lambda: _get(store, name, data)),
        _try("range", lambda: _range(store, name, data)),
        _try("clock", lambda: _clock(store, name)),
        _try("conditional put", lambda: _refusal(store, name, data)),
        _try("list", lambda: _list(store, name)),
        _try("delete", lambda: _delete(store, name)),
    ]
    return steps


def _try(what: str, call: Callable[[], str]) -> Step:
    begin = time.perf_counter()
    try:
        note = call()
    except StoreError as error:
        return Step(what, False, time.perf_counter() - begin, str(error), error.setting)
    except _Failed as error:
        return Step(what, False, time.perf_counter() - begin, str(error))
    return Step(what, True, time.perf_counter() - begin, note)


def _put(store: Store, name: str, data: memoryview) -> str:
    store.put(name, [data])
    return ""


def _get(store: Store, name: str, data: memoryview) -> str:
    into = bytearray(len(data))
    if store.get(name, [memoryview(into)]) is GetOutcome.MISSING:
        raise _Failed("what was just written is not there: this store is not consistent")
    if into != data:
        raise _Failed("what comes back is not what was written")
    return ""


def _range(store: Store, name: str, data: memoryview) -> str:
    into = bytearray(1000)
    store.get(name, [memoryview(into)], offset=4000)
    if into != data[4000:5000]:
        raise _Failed("a part of an object is not what it should be")
    return ""


def _clock(store: Store, name: str) -> str:
    info = store.head(name)
    if info is None or info.size != _SAMPLE_BYTES:
        raise _Failed("HEAD does not know what was just written")
    skew_s = time.time() - info.modified_s
    if abs(skew_s) > _SKEW_MAX_S:
        raise _Failed(f"the clocks here and there are {skew_s:.0f} s apart: set them by NTP")
    return ""


def _refusal(store: Store, name: str, data: memoryview) -> str:
    if store.put(name, [data], if_absent=True) is PutOutcome.STORED:
        return "not known here: two servers may upload the same block twice, which does no harm"
    return ""


def _list(store: Store, name: str) -> str:
    if name not in [info.name for info in store.list("probe/")]:
        raise _Failed("a listing does not show what was just written")
    return ""


def _delete(store: Store, name: str) -> str:
    for error in store.delete([name]).values():
        raise error
    if store.head(name) is not None:
        raise _Failed("what was deleted is still there: is versioning or a lock set on the bucket?")
    return ""
