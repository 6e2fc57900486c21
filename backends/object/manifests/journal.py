"""The manifests of one namespace in a store: append, read what is new, join what has piled up."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.client.parallel_requests import in_parallel
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.manifest import Entries
from kvtier.backends.object.object_names import description_name, manifest_prefix, parse_manifest
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Archived,
    Forbidden,
    LengthMismatch,
    StoreError,
    Unavailable,
)
from kvtier.backends.object.stores.store import GetOutcome, Store, bounded
from kvtier.errors import FormatError, NewerFormat
from kvtier.types import Namespace

_log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 1 << 30
"""All together: they are read into memory, and nobody knows who can write to a bucket."""
_MANIFESTS_MAX = 1 << 20
_HEAD_READ_BYTES = 64 << 10
_LISTINGS_MAX = 4
_PILE = 16
"""So many manifests of similar size are joined into one."""
_PILE_MAX = 1024
"""And no more at once: the list of what a manifest covers must fit into `_HEAD_READ_BYTES`."""
_TOLD_MAX = 1 << 17
"""So many of the entries that were told last are known again in a manifest that joins others."""
_Closed = StoreError | NewerFormat
"""Why a manifest is left alone."""


class Journal:
    """Reads and writes manifests. May block; used by one thread at a time.

    Reading is safe against joining at any moment: a manifest that vanishes between its listing and
    its reading is covered by one that a new listing shows.
    """

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.namespace = namespace
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._seen: set[str] = set()
        self._sizes: dict[str, int] = {}
        """What the last listing showed, and what we have written since."""
        self._broken: set[str] = set()
        """Damaged ones, which say nothing."""
        self._closed: set[str] = set()
        """Those that we may not read, or a newer kvtier wrote; `everything` tries them again."""
        self._said: set[type[Exception]] = set()
        """What has been said of these."""
        self._joined: set[str] = set()
        """Those that we have joined, as long as they are still there."""
        self._too_many = False
        self._told = np.zeros(0, np.uint64)
        """Prints of the entries that were told last."""

    def append(self, entries: Entries, covers: Iterable[str] = ()) -> None:
        """Write one manifest, which nobody else can overwrite."""
        name = f"{self._writer}-{self._number:010d}"
        self._number += 1
        pieces = manifest.pack(self.namespace.digest, entries, covers)
        self._store.put(self._full_name(name), pieces)
        self._seen.add(name)
        self._sizes[name] = sum(map(len, pieces))

    def news(self) -> Entries:
        """What others have written since the last call, merged."""
        entries = manifest.merge(self._read(self._seen))
        # a manifest that joins others has some that we lack, and many that we have read
        fresh = entries[np.isin(_prints(entries), self._told, invert=True)]
        self._remember(fresh)
        return fresh

    def everything(self) -> Entries:
        """The state of the namespace, from all manifests."""
        self._closed = set()
        entries = manifest.merge(self._read(set()))
        self._remember(entries)
        return entries

    def _remember(self, entries: Entries) -> None:
        self._told = np.append(self._told, _prints(entries[-_TOLD_MAX:]))[-_TOLD_MAX:]

    def join(self, purged_before: float) -> bool:
        """Join manifests if enough have piled up; whether it did.

        Whoever does the same at the same time writes the same entries again: nothing is lost.
        Removals are forgotten when all that was removed `purged_before` that time (seconds since
        the epoch) is known to be deleted; until then they hide objects whose deletion was lost.
        """
        listed = self._sizes
        # only what `news` has told of: it would never be heard of here otherwise
        ripe = self._seen - self._broken - self._closed - self._joined
        chosen = _pile({name: size for name, size in listed.items() if name in ripe})
        if not chosen:
            return False
        found = self._fetch({name: listed[name] for name in chosen})
        readable = [name for name, entries in found.items() if entries is not None]
        pieces = [entries for entries in found.values() if entries is not None]
        if len(found) < len(chosen) or len(pieces) < 2:
            return False  # somebody else is joining them at this moment
        del found  # which would keep the pieces
        entries = manifest.merge(pieces)
        if len(readable) == len(listed):  # nothing is left that a removal could hide
            old = entries["time_us"] < purged_before * 1e6
            old &= entries["kind"] == manifest.REMOVED
            entries = entries[~old]
        self.append(entries, covers=readable)
        for name in readable:
            del self._sizes[name]
        self._joined.update(readable)  # or, if the store keeps them, they would be again and again
        self._store.delete([self._full_name(name) for name in sorted(self._joined)])
        return True

    def drop_broken(self) -> None:
        """Delete damaged manifests: a listing of the blocks has replaced what they said."""
        failed = self._store.delete([self._full_name(name) for name in self._broken])
        self._broken = {name for name in self._broken if self._full_name(name) in failed}

    def _full_name(self, name: str) -> str:
        return f"{manifest_prefix(self.namespace.id)}{name}"

    def _listed(self) -> dict[str, int]:
        """Sizes of the manifests that are there, by name."""
        found = {}
        total = 0
        passed_over = self._broken | self._closed
        prefix = manifest_prefix(self.namespace.id)
        remedy = "see that servers may delete those that they have joined"
        listed = bounded(self._store.list(prefix), _MANIFESTS_MAX, "manifests", remedy)
        for info in sorted(listed, key=lambda info: info.size):
            name = parse_manifest(info.name)
            if name is None or name in passed_over:
                continue
            total += info.size
            if total > MANIFEST_BYTES_MAX:
                self._say_too_many()
                break
            found[name] = info.size
        return found

    def _say_too_many(self) -> None:
        if not self._too_many:
            self._too_many = True
            _log.warning(
                "manifests below %s have more than %d bytes together: the largest are not read",
                manifest_prefix(self.namespace.id),
                MANIFEST_BYTES_MAX,
            )

    def _read(self, known: set[str]) -> list[Entries]:
        """The entries of all manifests that are not known, until a listing finds no new one. If it
        comes to nothing, all of them are read again the next time."""
        found: dict[str, Entries | None] = {}
        for _ in range(_LISTINGS_MAX):
            listed = self._listed()
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
        """Entries by name; None where there is nothing new or readable; vanished ones left out."""
        covered = set(skip_if_covered_by) - self._broken - self._closed

        def read(name: str) -> Entries | _Closed | bool | None:
            return self._read_one(name, sizes[name], covered)

        found: dict[str, Entries | None] = {}
        closed: dict[str, _Closed] = {}
        for name, entries in zip(sizes, in_parallel(read, list(sizes)), strict=True):
            if isinstance(entries, StoreError | NewerFormat):
                closed[name] = entries
            elif not isinstance(entries, bool):
                found[name] = entries
        if closed:
            if len(closed) == len(sizes):
                self._check_rights(closed)
            self._leave(closed)
            found.update(dict.fromkeys(closed))
        return found

    def _check_rights(self, closed: Mapping[str, _Closed]) -> None:
        """Raises AccessDenied if nothing else may be read either: that is no matter of these."""
        if not all(isinstance(error, Forbidden) for error in closed.values()):
            return
        name = description_name(self.namespace.id)
        try:
            with contextlib.suppress(LengthMismatch):
                self._store.get(name, [memoryview(bytearray(1))], offset=0)
        except Forbidden as error:
            said = str(error).partition(": ")[0]
            raise AccessDenied(f"{said}: allow these credentials to get objects") from error

    def _leave(self, closed: Mapping[str, _Closed]) -> None:
        """Neither read nor join nor delete these, and say so once of each kind."""
        self._closed |= closed.keys()
        for kind in {type(error) for error in closed.values()} - self._said:
            self._said.add(kind)
            some = {name: error for name, error in closed.items() if type(error) is kind}
            name, error = next(iter(some.items()))
            _log.warning(
                "%d manifests may not be read and are left alone, a listing will tell: %s: %s",
                len(some),
                self._full_name(name),
                error,
            )

    def _read_one(self, name: str, size: int, covered: set[str]) -> Entries | _Closed | bool | None:
        """As in `_fetch`; False if the manifest has vanished, or why it may not be read."""
        full_name = self._full_name(name)
        for again in (True, False):  # damage on the way is gone the second time
            try:
                return self._read_whole(full_name, size, covered)
            except (NewerFormat, Forbidden, Archived) as error:
                return error
            except (FormatError, LengthMismatch) as error:
                if not again:
                    self._broken.add(name)
                    _log.warning(
                        "manifest %s is damaged, a listing will tell: %s", full_name, error
                    )
        return None

    def _read_whole(self, full_name: str, size: int, covered: set[str]) -> Entries | bool | None:
        data = memoryview(bytearray(size))
        if covered and size > 2 * _HEAD_READ_BYTES:
            head = data[:_HEAD_READ_BYTES]
            if self._store.get(full_name, [head], offset=0) is GetOutcome.MISSING:
                return False
            if covered.issuperset(self._covers(head)):
                return None
        if self._store.get(full_name, [data]) is GetOutcome.MISSING:
            return False
        return manifest.unpack(data, self.namespace.digest)[0]

    def _covers(self, head: memoryview) -> list[str]:
        covers = manifest.unpack_head(head, self.namespace.digest)[2]
        return covers or [""]  # one that covers none is never skipped


def _prints(entries: Entries) -> npt.NDArray[np.uint64]:
    """64 bits for each entry, time and all."""
    found = manifest.marks(entries, entries["generation"])
    found ^= entries["time_us"] * np.uint64(0x9FB21C651E98DF25) + entries["kind"].astype(np.uint64)
    return found


def _pile(sizes: dict[str, int]) -> list[str]:
    """The smaller manifests that are worth joining: many, or as much as the next larger one."""
    chosen: list[str] = []
    total = 0
    for name in sorted(sizes, key=lambda name: sizes[name])[:_PILE_MAX]:
        if len(chosen) >= _PILE and sizes[name] > total:
            break
        chosen.append(name)
        total += sizes[name]
    return chosen if len(chosen) >= _PILE else []
