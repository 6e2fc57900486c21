"""Namespaces without a block: what describes them is removed, too.

That is safe beside a server that is about to write there. It claims before it stores, and what it
then writes has names of its own. So if nobody claims anything, and no block lies there after that,
the manifests can list nothing that exists. Only the description has the same name for all. It may
be deleted a moment after a server has found it there, and that server's next audit writes it again.
"""

from __future__ import annotations

from collections import defaultdict

from kvtier.backends.object.budget.claim import abandoned_claims
from kvtier.backends.object.object_names import (
    NAMESPACE_CHARS,
    described_namespace,
    description_name,
)
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import ObjectInfo, Store, check_namespaces
from kvtier.types import Namespace

GRACE_S = 3600.0
"""Younger objects stay: a server may be about to come back."""


class EmptyNamespaces:
    """Finds namespaces without a block in a listing of everything."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._descriptions: dict[str, int] = {}
        self._in_use: set[str] = set()
        """Namespaces with blocks, or with something that this kvtier does not know."""

    def add_block(self, namespace: str) -> None:
        self._in_use.add(namespace)

    def add_other(self, info: ObjectInfo) -> None:
        """Something that is no block."""
        namespace = described_namespace(info.name)
        if namespace is None:
            if info.name[NAMESPACE_CHARS : NAMESPACE_CHARS + 1] == "/":
                self._in_use.add(info.name[:NAMESPACE_CHARS])
            return
        self._bytes[namespace] += info.size
        check_namespaces(self._bytes)
        if info.name == description_name(namespace):
            self._descriptions[namespace] = info.size

    def describes(self, namespace: Namespace) -> bool:
        """Whether the description of this namespace was listed, in its full length."""
        return self._descriptions.get(namespace.id) == len(namespace.to_json())

    def found(self) -> dict[str, int]:
        """How many bytes describe each namespace that has no block."""
        return {name: size for name, size in self._bytes.items() if name not in self._in_use}


def is_unused(store: Store, namespace: str, now_s: float) -> bool:
    """Whether `remove` would delete what describes this namespace. Raises StoreError."""
    return _leftovers(store, namespace, now_s) is not None


def _leftovers(store: Store, namespace: str, now_s: float) -> list[list[str]] | None:
    """Names in the order in which they are deleted. None if somebody may write there, or if there
    are blocks, or something young or unknown. `now_s` is not later than the store's own time."""
    claims = abandoned_claims(store, namespace, now_s, GRACE_S)
    if claims is None:
        return None
    descriptions: list[str] = []
    others: list[str] = []
    for info in store.list(f"{namespace}/"):  # after the claims
        if described_namespace(info.name) is None or now_s - info.modified_s < GRACE_S:
            return None
        described = info.name == description_name(namespace)
        (descriptions if described else others).append(info.name)
    return [others, descriptions, claims]


def remove(store: Store, namespace: str, now_s: float) -> bool:
    """Delete what describes a namespace; False if it is in use, or something could not be deleted.
    Raises StoreError."""
    found = _leftovers(store, namespace, now_s)
    if found is None:
        return False
    failed: dict[str, StoreError] = {}
    for names in found:
        if not failed:
            failed.update(store.delete(names))
    return not failed
