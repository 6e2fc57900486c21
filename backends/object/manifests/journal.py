"""The manifests of one namespace in a store: append, read what is new, join many small ones."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.manifest import Entries
from kvtier.backends.object.manifests.merge import merge
from kvtier.backends.object.object_names import description_name, manifest_prefix, parse_manifest
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Archived,
    Forbidden,
    LengthMismatch,
    StoreError,
    Unavailable,
)
from kvtier.backends.object.stores.store import Store, bounded, in_parallel
from kvtier.errors import FormatError, NewerFormat
from kvtier.types import Namespace

_log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 1 << 30
"""Of all manifests together: they are read into memory, and anybody may write to a bucket."""
_MANIFESTS_MAX = 1 << 20
_HEAD_READ_BYTES = 64 << 10
_LISTINGS_MAX = 4
_JOIN_MIN = 16
"""So many manifests of similar size are joined into one."""
_JOIN_MAX = 1024
"""No more are joined at once: the cover list must fit into `_HEAD_READ_BYTES`."""
_RETURNED_MAX = 1 << 17
"""So many of the last entries that `read_new` returned are recognised in a joined manifest."""
_Unreadable = StoreError | NewerFormat
"""Why a manifest is left alone."""


class _Read(NamedTuple):
    """What came of reading one manifest. Without entries it has nothing new, or is damaged."""

    entries: Entries | None = None
    vanished: bool = False
    unreadable: _Unreadable | None = None


class Journal:
    """Reads and writes manifests. May block; used by one thread at a time.

    Reading is safe against joining at any moment. A manifest that vanishes between listing and
    reading is covered by one that a new listing shows.
    """

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.namespace = namespace
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._seen: set[str] = set()
        self._sizes: dict[str, int] = {}
        """By name: what the last listing showed, and what we have written since."""
        self._damaged: set[str] = set()
        self._unreadable: set[str] = set()
        """Those that we may not read, or that a newer kvtier wrote. `read_all` tries them again."""
        self._logged: set[type[Exception]] = set()
        """Reasons that have been logged for these."""
        self._joined: set[str] = set()
        """Those that we have joined, as long as the store still has them."""
        self._logged_too_many = False
        self._returned = np.zeros(0, np.uint64)
        """Fingerprints of the last entries that were returned."""

    def append(self, entries: Entries, covers: Iterable[str] = ()) -> None:
        """Write one manifest, which no other writer can overwrite."""
        name = f"{self._writer}-{self._number:010d}"
        self._number += 1
        pieces = manifest.pack(self.namespace.digest, entries, covers)
        self._store.put(self._full_name(name), pieces)
        self._seen.add(name)
        self._sizes[name] = sum(map(len, pieces))

    def read_new(self) -> Entries:
        """What others have written since the last call, merged."""
        entries = merge(self._read(self._seen))
        # a joined manifest has some entries that we lack, and many that we know
        fresh = entries[np.isin(_entry_fingerprints(entries), self._returned, invert=True)]
        self._remember(fresh)
        return fresh

    def read_all(self) -> Entries:
        """The state of the namespace, from all manifests."""
        self._unreadable = set()
        entries = merge(self._read(set()))
        self._remember(entries)
        return entries

    def _remember(self, entries: Entries) -> None:
        new = _entry_fingerprints(entries[-_RETURNED_MAX:])
        self._returned = np.append(self._returned, new)[-_RETURNED_MAX:]

    def join(self, purged_before: float) -> bool:
        """Join manifests if there are many of them; whether it did.

        If another writer joins the same ones at the same time, the same entries are written twice,
        and nothing is lost. Removals hide objects whose deletion was lost. They are dropped when
        all objects that were removed before `purged_before` (seconds since the epoch) are known to
        be deleted.
        """
        listed = self._sizes
        # only manifests that `read_new` has returned: other entries would never be returned
        candidates = self._seen - self._damaged - self._unreadable - self._joined
        chosen = _worth_joining({name: size for name, size in listed.items() if name in candidates})
        if not chosen:
            return False
        found = self._fetch({name: listed[name] for name in chosen})
        readable = [name for name, entries in found.items() if entries is not None]
        pieces = [entries for entries in found.values() if entries is not None]
        if len(found) < len(chosen) or len(pieces) < 2:
            return False  # another writer joins them at this moment
        del found  # which would keep the pieces in memory
        entries = merge(pieces)
        if len(readable) == len(listed):  # no other manifest has entries that a removal could hide
            old = entries["time_us"] < purged_before * 1e6
            old &= entries["kind"] == manifest.REMOVED
            entries = entries[~old]
        self.append(entries, covers=readable)
        for name in readable:
            del self._sizes[name]
        self._joined.update(readable)  # or a store that keeps them would have them joined again
        self._store.delete([self._full_name(name) for name in sorted(self._joined)])
        return True

    def drop_damaged(self) -> None:
        """Delete damaged manifests: an audit has recorded anew what they said."""
        failed = self._store.delete([self._full_name(name) for name in self._damaged])
        self._damaged = {name for name in self._damaged if self._full_name(name) in failed}

    def _full_name(self, name: str) -> str:
        return f"{manifest_prefix(self.namespace.id)}{name}"

    def _list(self) -> dict[str, int]:
        """Sizes of the manifests that are there, by name; the largest are left out if all together
        are too large."""
        found = {}
        total = 0
        skipped = self._damaged | self._unreadable
        prefix = manifest_prefix(self.namespace.id)
        remedy = "see that servers may delete those that they have joined"
        listed = bounded(self._store.list(prefix), _MANIFESTS_MAX, "manifests", remedy)
        for info in sorted(listed, key=lambda info: info.size):
            name = parse_manifest(info.name)
            if name is None or name in skipped:
                continue
            total += info.size
            if total > MANIFEST_BYTES_MAX:
                self._log_too_many()
                break
            found[name] = info.size
        return found

    def _log_too_many(self) -> None:
        if not self._logged_too_many:
            self._logged_too_many = True
            _log.warning(
                "manifests below %s have more than %d bytes together: the largest are not read",
                manifest_prefix(self.namespace.id),
                MANIFEST_BYTES_MAX,
            )

    def _read(self, known: set[str]) -> list[Entries]:
        """The entries of all manifests that are not known. Lists until there is no new one. After
        an error nothing counts as read."""
        found: dict[str, Entries | None] = {}
        for _ in range(_LISTINGS_MAX):
            listed = self._list()
            todo = {
                name: size
                for name, size in listed.items()
                if name not in known and name not in found
            }
            fetched = self._fetch(todo, skip_if_covered_by=known | found.keys())
            found.update(fetched)
            if len(fetched) == len(todo):
                self._sizes = listed
                self._seen = (known | found.keys()) & listed.keys()
                self._joined.intersection_update(listed)
                return [entries for entries in found.values() if entries is not None]
        raise Unavailable("manifests keep vanishing while they are read: try again later")

    def _fetch(
        self, sizes: dict[str, int], skip_if_covered_by: Iterable[str] = ()
    ) -> dict[str, Entries | None]:
        """Entries by name. None stands for a manifest with nothing new or readable; one that has
        vanished is left out."""
        covered = set(skip_if_covered_by) - self._damaged - self._unreadable

        def read(name: str) -> _Read:
            return self._read_one(name, sizes[name], covered)

        found: dict[str, Entries | None] = {}
        unreadable: dict[str, _Unreadable] = {}
        for name, result in zip(sizes, in_parallel(read, list(sizes)), strict=True):
            if result.unreadable is not None:
                unreadable[name] = result.unreadable
            elif not result.vanished:
                found[name] = result.entries
        if unreadable:
            if len(unreadable) == len(sizes):
                self._check_rights(unreadable)
            self._skip(unreadable)
            found.update(dict.fromkeys(unreadable))
        return found

    def _check_rights(self, unreadable: Mapping[str, _Unreadable]) -> None:
        """Raises AccessDenied if the description may not be read either: then the credentials are
        at fault, and not these manifests."""
        if not all(isinstance(error, Forbidden) for error in unreadable.values()):
            return
        name = description_name(self.namespace.id)
        try:
            with contextlib.suppress(LengthMismatch):
                self._store.get(name, [memoryview(bytearray(1))], offset=0)
        except Forbidden as error:
            said = str(error).partition(": ")[0]
            raise AccessDenied(f"{said}: allow these credentials to get objects") from error

    def _skip(self, unreadable: Mapping[str, _Unreadable]) -> None:
        """Neither read nor join nor delete these; log each kind of reason once."""
        self._unreadable |= unreadable.keys()
        for kind in {type(error) for error in unreadable.values()} - self._logged:
            self._logged.add(kind)
            some = {name: error for name, error in unreadable.items() if type(error) is kind}
            name, error = next(iter(some.items()))
            _log.warning(
                "%d manifests may not be read and are left alone, a listing will tell: %s: %s",
                len(some),
                self._full_name(name),
                error,
            )

    def _read_one(self, name: str, size: int, covered: set[str]) -> _Read:
        full_name = self._full_name(name)
        for again in (True, False):  # damage on the way is gone the second time
            try:
                return self._read_whole(full_name, size, covered)
            except (NewerFormat, Forbidden, Archived) as error:
                return _Read(unreadable=error)
            except (FormatError, LengthMismatch) as error:
                if not again:
                    self._damaged.add(name)
                    _log.warning(
                        "manifest %s is damaged, a listing will tell: %s", full_name, error
                    )
        return _Read()

    def _read_whole(self, full_name: str, size: int, covered: set[str]) -> _Read:
        data = memoryview(bytearray(size))
        if covered and size > 2 * _HEAD_READ_BYTES:
            head = data[:_HEAD_READ_BYTES]
            if self._store.get(full_name, [head], offset=0) is None:
                return _Read(vanished=True)
            covers = manifest.unpack_head(head, self.namespace.digest)[2]
            if covers and covered.issuperset(covers):
                return _Read()
        length = self._store.get(full_name, [data])
        if length is None:
            return _Read(vanished=True)
        return _Read(manifest.unpack(data[:length], self.namespace.digest)[0])


def _entry_fingerprints(entries: Entries) -> npt.NDArray[np.uint64]:
    """64 bits for each entry, from its object, kind and time."""
    found = manifest.fingerprints(entries, entries["generation"])
    found ^= entries["time_us"] * np.uint64(0x9FB21C651E98DF25) + entries["kind"].astype(np.uint64)
    return found


def _worth_joining(sizes: dict[str, int]) -> list[str]:
    """The smallest manifests, if they are many. A larger one is joined if the smaller ones together
    are as large."""
    chosen: list[str] = []
    total = 0
    for name in sorted(sizes, key=lambda name: sizes[name])[:_JOIN_MAX]:
        if len(chosen) >= _JOIN_MIN and sizes[name] > total:
            break
        chosen.append(name)
        total += sizes[name]
    return chosen if len(chosen) >= _JOIN_MIN else []
