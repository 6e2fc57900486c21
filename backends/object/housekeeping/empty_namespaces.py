"""Namespaces that have no block left: what tells of them goes, too.

That is safe beside a server which is just about to write there. It claims before it stores, and
what it writes then has names of its own. So where nobody claims anything, and where no block lies
after that, there is nothing that manifests could rightly tell of. The description alone is named by
the namespace, and may go a moment after somebody has found it there: servers write it again if
their audit does not find it.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from kvtier.backends.object.budget.claim import abandoned
from kvtier.backends.object.object_names import NAMESPACE_CHARS, description_name, told_of
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import ObjectInfo, Store, check_namespaces
from kvtier.types import Namespace

GRACE_S = 3600.0
"""What is younger stays: somebody may be about to come back."""


class EmptyNamespaces:
    """Takes in a listing of everything, and finds namespaces without a block in it."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._described: dict[str, int] = {}
        self._in_use: set[str] = set()
        """Namespaces with blocks, or with something that this kvtier does not know."""

    def holds(self, namespace: str) -> None:
        """A block of this namespace lies there."""
        self._in_use.add(namespace)

    def see(self, info: ObjectInfo) -> None:
        """Something that is no block."""
        namespace = told_of(info.name)
        if namespace is None:
            if info.name[NAMESPACE_CHARS : NAMESPACE_CHARS + 1] == "/":
                self._in_use.add(info.name[:NAMESPACE_CHARS])
            return
        self._bytes[namespace] += info.size
        check_namespaces(self._bytes)
        if info.name == description_name(namespace):
            self._described[namespace] = info.size

    def describes(self, namespace: Namespace) -> bool:
        """Whether the namespace's description lies there, in its full length."""
        return self._described.get(namespace.id) == len(namespace.to_json())

    def found(self) -> dict[str, int]:
        """How many bytes tell of each namespace that has no block."""
        return {name: size for name, size in self._bytes.items() if name not in self._in_use}


class Remains(msgspec.Struct, frozen=True):
    """What is left of a namespace that nobody uses, in the order in which it goes."""

    told: list[str]
    description: list[str]
    claims: list[str]


def remains(store: Store, namespace: str, now_s: float) -> Remains | None:
    """What may go; None if somebody may write there, if it has blocks, or something young or
    strange. `now_s` is not later than it is by the store's clock. Raises StoreError."""
    claims = abandoned(store, namespace, now_s, GRACE_S)
    if claims is None:
        return None
    found = Remains([], [], claims)
    for info in store.list(f"{namespace}/"):  # after the claims
        if told_of(info.name) is None or now_s - info.modified_s < GRACE_S:
            return None
        described = info.name == description_name(namespace)
        (found.description if described else found.told).append(info.name)
    return found


def remove(store: Store, namespace: str, now_s: float) -> bool:
    """Delete what is left of a namespace; False if it is in use, or something stays. Raises
    StoreError."""
    found = remains(store, namespace, now_s)
    if found is None:
        return False
    failed: dict[str, StoreError] = {}
    for names in (found.told, found.description, found.claims):
        if not failed:
            failed.update(store.delete(names))
    return not failed
