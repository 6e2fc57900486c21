"""The manifests of one namespace in a store: append, read what is new, join them.

Servers append small manifests. The caretaker reads them all, and says the same in one manifest for
each of its rounds, which replaces them (`relay`); now and then it joins all into one. Other servers
read only the caretaker's, so that their requests do not grow with the number of servers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.backends.object import manifests
from kvtier.backends.object.manifests import ENTRY, Entries, merge
from kvtier.backends.object.object_names import (
    description_name,
    is_of_caretaker,
    manifest_prefix,
    new_writer,
    parse_manifest,
)
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.store import Store, bounded, in_parallel
from kvtier.errors import FormatError, NewerFormat

_log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 1 << 30
"""Of all manifests together: they are read into memory, and anybody may write to a bucket."""
_MANIFESTS_MAX = 1 << 20
_HEAD_READ_BYTES = 64 << 10
_LISTINGS_MAX = 4
_JOIN_MIN = 16
"""So many manifests are joined into one, if they have an eighth of its size."""
_JOIN_ALWAYS = 256
_JOIN_MAX = 1024
"""No more are covered at once: the cover list must fit into `_HEAD_READ_BYTES`."""
_RETURNED_MAX = 1 << 17
"""So many of the last entries that `read_new` returned are recognised in a joined manifest."""
_NOTHING = np.zeros(0, ENTRY)
_Unreadable = errors.StoreError | NewerFormat
"""Why a manifest is left alone."""


class Journal:
    """Reads and writes the manifests of a namespace. May block; used by one thread at a time.

    Reading is safe against joining at any moment. A manifest that vanishes between listing and
    reading is covered by one that a new listing shows.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        writer: str | None = None,
        *,
        seen: Mapping[str, int] | None = None,
        quiet: bool = False,
    ) -> None:
        """`writer`: a new one if there is none. `seen`: the last manifests of others that count as
        read before. `quiet`: another journal of this process logs what cannot be read."""
        self._store = store
        self._level = logging.DEBUG if quiet else logging.WARNING
        self.namespace = namespace
        self._digest = bytes.fromhex(namespace)
        self.writer = writer or new_writer()
        self.number = 0
        """Of the next manifest."""
        self.numbers: dict[str, int] = dict(seen or {})
        """By writer, the number of its last manifest that was read here."""
        self._recorded: dict[str, int] = {}
        """By writer, the bytes that it has added in later manifests than those."""
        self._seen: set[str] = set()
        self._sizes: dict[str, int] = {}
        """By name: what the last listing showed, and what we have written since."""
        self.damaged: set[str] = set()
        self._joined: set[str] = set()
        """Those that we have joined, as long as the store still has them."""
        self._to_relay: list[Entries] = []
        self._relayed: list[str] = []
        """Those that our last relayed manifest has replaced."""
        self._unreadable: set[str] = set()
        """Those that we may not read, or that a newer kvtier wrote. `read_all` tries them again."""
        self._logged: set[type[Exception] | str] = set()
        """Reasons that have been logged for these."""
        self._returned = np.zeros(0, np.uint64)
        """Fingerprints of the last entries that were returned."""

    def append(self, entries: Entries, covers: Iterable[str] = ()) -> int:
        """Write one manifest, which no other writer can overwrite; returns its number."""
        number = max(self.number, self.numbers.get(self.writer, -1) + 1)
        self.number = number + 1
        name = f"{self.writer}-{number:010d}"
        pieces = manifests.pack(self._digest, entries, covers)
        self._store.put(self._full_name(name), pieces)
        self._seen.add(name)
        self._sizes[name] = sum(map(len, pieces))
        self._remember(entries)  # of which others tell, too
        return number

    def read_new(self, *, relayed: bool = False) -> Entries:
        """What others have written since the last call, merged; only what caretakers have
        `relayed`, if you like."""
        entries = merge(self._read(self._seen, relayed))
        # a joined manifest has some entries that we lack, and many that we know
        fresh = entries[np.isin(_entry_fingerprints(entries), self._returned, invert=True)]
        self._remember(fresh)
        return fresh

    def read_all(self, *, relayed: bool = False) -> Entries:
        """The state of the namespace, from all manifests or from those of caretakers."""
        self._unreadable = set()
        entries = merge(self._read(set(), relayed))
        self._remember(entries)
        return entries

    def _remember(self, entries: Entries) -> None:
        new = _entry_fingerprints(entries[-_RETURNED_MAX:])
        self._returned = np.append(self._returned, new)[-_RETURNED_MAX:]

    # -- for the caretaker alone -----------------------------------------------------------------

    def read_to_relay(self) -> Entries:
        """As `read_new`; `relay` will tell others of it."""
        entries = self.read_new()
        self._to_relay.append(entries)
        return entries

    def take_recorded(self) -> dict[str, int]:
        """By writer, the bytes that it has added since the last call."""
        recorded, self._recorded = self._recorded, {}
        return recorded

    def relay(self) -> None:
        """Say in one manifest what was read, and delete those that the last one has replaced: a
        server may still be about to read what it has just listed. Raises StoreError."""
        entries = merge(self._to_relay)
        covers = [name for name in self._joinable() if not is_of_caretaker(name)]
        if len(entries):
            self.append(entries, covers[:_JOIN_MAX])
        self._to_relay.clear()
        replaced, self._relayed = self._relayed, covers
        self._joined.update(covers)
        for name in covers:
            del self._sizes[name]
        if replaced:
            self._store.delete([self._full_name(name) for name in replaced])

    def worth_joining(self) -> bool:
        """Whether there are many manifests beside the largest."""
        sizes = sorted(self._sizes[name] for name in self._joinable())
        small = sum(sizes[:-1])
        many = len(sizes) > _JOIN_MIN and 8 * small >= sizes[-1]
        return many or len(sizes) > _JOIN_ALWAYS

    @property
    def complete(self) -> bool:
        """Whether every manifest could be read: if not, one may list what another removes."""
        return not self.damaged and not self._unreadable

    def _joinable(self) -> list[str]:
        skipped = self.damaged | self._unreadable | self._joined
        return [name for name in self._sizes if name in self._seen and name not in skipped]

    def join(self, entries: Entries) -> None:
        """Write the one manifest of what is there, and delete those that it replaces: all that were
        read. `entries` has all that they list."""
        covers = sorted(self._joinable(), key=lambda name: self._sizes[name])[-_JOIN_MAX:]
        self.append(entries, covers)
        for name in covers:
            del self._sizes[name]
        self._joined.update(covers)  # or a store that keeps them would have them joined again
        self._store.delete([self._full_name(name) for name in sorted(self._joined)])

    def drop_damaged(self) -> None:
        """Delete damaged manifests: an audit has recorded anew what they said."""
        failed = self._store.delete([self._full_name(name) for name in self.damaged])
        self.damaged = {name for name in self.damaged if self._full_name(name) in failed}

    # -- reading ---------------------------------------------------------------------------------

    def _full_name(self, name: str) -> str:
        return f"{manifest_prefix(self.namespace)}{name}"

    def _list(self, relayed: bool) -> dict[str, int]:
        """Sizes of the manifests that are there, by name; the largest are left out if all together
        are too large."""
        found = {}
        total = 0
        skipped = self.damaged | self._unreadable
        prefix = manifest_prefix(self.namespace)
        remedy = "see that servers may delete those that they have joined"
        listed = bounded(self._store.list(prefix), _MANIFESTS_MAX, "manifests", remedy)
        for info in sorted(listed, key=lambda info: info.size):
            name = parse_manifest(info.name)
            if name is None or name in skipped or (relayed and not is_of_caretaker(name)):
                continue
            total += info.size
            if total > MANIFEST_BYTES_MAX:
                self._warn_once(
                    "too many",
                    f"manifests below {prefix} have more than {MANIFEST_BYTES_MAX} bytes together: "
                    "the largest are not read",
                )
                break
            found[name] = info.size
        return found

    def _warn_once(self, reason: type[Exception] | str, message: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            _log.log(self._level, "%s", message)

    def _read(self, known: set[str], relayed: bool) -> list[Entries]:
        """The entries of all manifests that are not known. Lists until there is no new one. After
        an error nothing counts as read."""
        found: dict[str, Entries] = {}
        for _ in range(_LISTINGS_MAX):
            listed = self._list(relayed)
            new = [name for name in listed if name not in known and name not in found]
            fetched = self._fetch({name: listed[name] for name in new}, known | found.keys())
            found.update(fetched)
            if len(fetched) == len(new):
                self._sizes = listed
                self._seen = (known | found.keys()) & listed.keys()
                self._joined.intersection_update(listed)
                self._count(found)
                return list(found.values())
        raise errors.Unavailable("manifests keep vanishing while they are read: try again later")

    def _count(self, found: Mapping[str, Entries]) -> None:
        for name in sorted(found):
            writer, _, number = name.partition("-")
            if int(number) > self.numbers.get(writer, -1):
                self.numbers[writer] = int(number)
                entries = found[name]
                size = int(entries["size"][entries["kind"] == manifests.ADDED].sum())
                self._recorded[writer] = self._recorded.get(writer, 0) + size

    def _fetch(self, sizes: dict[str, int], known: set[str]) -> dict[str, Entries]:
        """Entries by name: none for a manifest with nothing new or readable. One that has vanished
        is left out."""
        covered = known - self.damaged - self._unreadable
        names = list(sizes)
        results = in_parallel(lambda name: self._read_one(name, sizes[name], covered), names)
        found: dict[str, Entries] = {}
        unreadable: dict[str, _Unreadable] = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, _Unreadable):
                unreadable[name], result = result, _NOTHING
            if result is not None:
                found[name] = result
        if unreadable:
            if len(unreadable) == len(sizes):
                self._check_rights(unreadable)
            self._skip(unreadable)
        return found

    def _check_rights(self, unreadable: Mapping[str, _Unreadable]) -> None:
        """Raises AccessDenied if the description may not be read either: then the credentials are
        at fault, and not these manifests."""
        if not all(isinstance(error, errors.Forbidden) for error in unreadable.values()):
            return
        try:
            with contextlib.suppress(errors.LengthMismatch):
                self._store.get(
                    description_name(self.namespace), memoryview(bytearray(1)), offset=0
                )
        except errors.Forbidden as error:
            said = str(error).partition(": ")[0]
            raise errors.AccessDenied(f"{said}: allow these credentials to get objects") from error

    def _skip(self, unreadable: Mapping[str, _Unreadable]) -> None:
        """Neither read nor join nor delete these; log each kind of reason once."""
        self._unreadable |= unreadable.keys()
        for kind in {type(error) for error in unreadable.values()}:
            some = {name: error for name, error in unreadable.items() if type(error) is kind}
            name, error = next(iter(some.items()))
            self._warn_once(
                kind,
                f"{len(some)} manifests may not be read and are left alone, a listing will tell: "
                f"{self._full_name(name)}: {error}",
            )

    def _read_one(self, name: str, size: int, covered: set[str]) -> Entries | _Unreadable | None:
        """None if it has vanished."""
        full_name = self._full_name(name)
        for again in (True, False):  # damage on the way is gone the second time
            try:
                return self._read_whole(full_name, size, covered)
            except (NewerFormat, errors.Forbidden, errors.Archived) as error:
                return error
            except (FormatError, errors.LengthMismatch) as error:
                if not again:
                    self.damaged.add(name)
                    message = "manifest %s is damaged, a listing will tell: %s"
                    _log.log(self._level, message, full_name, error)
        return _NOTHING

    def _read_whole(self, full_name: str, size: int, covered: set[str]) -> Entries | None:
        data = memoryview(bytearray(size))
        if covered and size > 2 * _HEAD_READ_BYTES:
            head = data[:_HEAD_READ_BYTES]
            if self._store.get(full_name, head, offset=0) is None:
                return None
            covers = manifests.unpack_head(head, self._digest)[2]
            if covers and covered.issuperset(covers):
                return _NOTHING
        length = self._store.get(full_name, data)
        return None if length is None else manifests.unpack(data[:length], self._digest)[0]


def _entry_fingerprints(entries: Entries) -> npt.NDArray[np.uint64]:
    """64 bits for each entry, from its object, kind and time."""
    found = manifests.object_prints(entries)
    found ^= entries["time_us"] * np.uint64(0x9FB21C651E98DF25) + entries["kind"].astype(np.uint64)
    return found
