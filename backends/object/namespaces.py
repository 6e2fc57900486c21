"""The namespaces below a url, and what is left of those without a block.

What describes a namespace is removed when its last block has gone. That is safe beside a server
that is about to write there: it says that it lives before it stores, and what it then writes has
names of its own. So if no server lives there, and no block lies there after that, the manifests can
list nothing that exists. Only the description has the same name for all. It may be deleted a moment
after a server has found it there; that server writes it again after `audit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvtier.backends.object.object_names import (
    NAMESPACE_CHARS,
    OLD_CLAIMS,
    SERVERS,
    described_namespace,
    description_name,
)
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import (
    NAMESPACES_MAX,
    ObjectInfo,
    Store,
    bounded,
    check_namespaces,
)
from kvtier.inspect.contents import NAMESPACE_ID

GRACE_S = 3600.0
"""Younger objects stay: a server may be about to come back."""


class Descriptions:
    """What a listing shows of namespaces beside blocks."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._in_use: set[str] = set()
        """Namespaces with blocks, or with something that this kvtier does not know."""
        self.old_claims: list[ObjectInfo] = []
        """Those of the first alpha, which nobody reads any more."""

    def add_block(self, namespace: str) -> None:
        self._in_use.add(namespace)

    def add_other(self, info: ObjectInfo) -> None:
        """Something that is no block."""
        namespace = described_namespace(info.name)
        if namespace is None:
            if info.name[NAMESPACE_CHARS : NAMESPACE_CHARS + 1] == "/":
                self._in_use.add(info.name[:NAMESPACE_CHARS])
        elif info.name.startswith(OLD_CLAIMS):
            self.old_claims.append(info)
        else:
            self._bytes[namespace] += info.size
            check_namespaces(self._bytes)

    def without_blocks(self) -> dict[str, int]:
        """How many bytes describe each namespace that has no block."""
        return {name: size for name, size in self._bytes.items() if name not in self._in_use}


def listed(store: Store) -> Iterator[str]:
    """The namespaces below a url, one short listing each. Raises StoreError."""
    return bounded(_listed(store), NAMESPACES_MAX, "namespaces")


def _listed(store: Store) -> Iterator[str]:
    after = ""
    while (info := next(store.list(after=after), None)) is not None:
        name = info.name.partition("/")[0]
        if NAMESPACE_ID.fullmatch(name):
            yield name
        after = f"{name}0"  # behind all that begins with the name and "/"


def leftovers(store: Store, namespace: str, now_s: float) -> list[str] | None:
    """The names that `remove` deletes, in that order. None if a server may live there, or if there
    are blocks, or something young or unknown. `now_s` is not later than the store's own time.
    Raises StoreError."""
    servers = list(store.list(f"{SERVERS}{namespace}-"))
    if any(now_s - info.modified_s < GRACE_S for info in servers):
        return None
    names = []
    for info in store.list(f"{namespace}/"):  # after the servers
        if described_namespace(info.name) is None or now_s - info.modified_s < GRACE_S:
            return None
        names.append(info.name)
    last = description_name(namespace)
    return [*(name for name in names if name != last), *(i.name for i in servers), last]


def remove(store: Store, namespace: str, now_s: float) -> bool:
    """Delete what describes a namespace; False if it is in use, or something could not be deleted.
    Raises StoreError."""
    found = leftovers(store, namespace, now_s)
    if found is None:
        return False
    failed: dict[str, StoreError] = dict(store.delete(found[:-1]))
    return not failed and not store.delete(found[-1:])


def remove_old_claims(store: Store, claims: list[ObjectInfo], now_s: float) -> None:
    """Delete claims of the first alpha that no server of that version renews any more."""
    old = [info.name for info in claims if now_s - info.modified_s >= GRACE_S]
    if old:
        store.delete(old)
