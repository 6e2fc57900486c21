"""Listings that never end: of a hostile server, or of far more than kvtier can have stored."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import RECORD, created
from support.object.object_servers import ENTRY, HostileServer, Peer, answer
from support.object.s3_client_helpers import retrying_bucket

from kvtier.backends.object import journal, lease, namespaces
from kvtier.backends.object import keeper as keeper_module
from kvtier.backends.object.inspection.store_survey import StoreSurvey
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.object_names import ServerName, block_name
from kvtier.backends.object.stores import bucket_store, retry, store
from kvtier.backends.object.stores.errors import EndlessListing, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryPolicy
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.inspect import Depth
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Presence

Names = Callable[[int], str]


def block(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).digest()
    return block_name(NAMESPACE.id, BlockKey(digest + bytes(4)))


def namespace(number: int) -> str:
    return f"{number:032x}/namespace.json"


class Endless:
    """Each page has names that were never listed, and a token of its own."""

    def __init__(self) -> None:
        self.name: Names = block
        self.breaks = False
        """Every second answer is an internal error."""
        self.pages = 0
        self._requests = count()
        self._number = count()
        self._objects: dict[bytes, bytes] = {}

    def _serve_object(self, peer: Peer, head: bytes, body: bytes) -> None:
        verb, path = head.split(b" ")[:2]
        if verb == b"PUT":
            refused = b"if-none-match" in head.lower() and path in self._objects
            self._objects[path] = self._objects[path] if refused else body
            peer.sendall(answer(412 if refused else 200))
        elif verb == b"GET" and path in self._objects:
            peer.sendall(answer(200, self._objects[path]))
        else:
            peer.sendall(answer(404 if verb in (b"GET", b"HEAD") else 200))

    def serve(self, peer: Peer, head: bytes) -> None:
        body = peer.read_body(head)
        if b"list-type=2" not in head:
            self._serve_object(peer, head, body)
        elif b"prefix=caretaker" in head:
            held = {
                path.partition(b"/caretaker/")[2]: len(at) for path, at in self._objects.items()
            }
            terms = ((f"caretaker/{term.decode()}", size) for term, size in held.items() if term)
            shown = "".join(ENTRY.format(key=name, size=size) for name, size in sorted(terms))
            peer.sendall(answer(200, f"<ListBucketResult>{shown}</ListBucketResult>".encode()))
        elif b"prefix=" in head or (
            b"start-after=" in head and self.name is block and not self.breaks
        ):
            peer.sendall(answer(200, b"<ListBucketResult></ListBucketResult>"))
        elif self.breaks and next(self._requests) % 2:
            peer.sendall(answer(500))
        else:
            self.pages += 1
            names = sorted(self.name(next(self._number)) for _ in range(1000))
            names = [f"{self.pages:06}-{name}" if self.breaks else name for name in names]
            listed = "".join(ENTRY.format(key=name, size=RECORD) for name in names)
            more = f"<NextContinuationToken>{self.pages}</NextContinuationToken>"
            body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{more}{listed}"
            peer.sendall(answer(200, f"{body}</ListBucketResult>".encode()))


@pytest.fixture
def endless() -> Endless:
    return Endless()


@pytest.fixture
def bucket(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(retry, "LISTED_MAX", 2500)
    monkeypatch.setattr(store, "NAMESPACES_MAX", 20)
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 20)
    with HostileServer(endless.serve) as server:
        opened = retrying_bucket(RetryPolicy(base_s=0.0, failures=1000), endpoint=server.endpoint)
        yield opened
        opened.close()


@pytest.mark.s3
@pytest.mark.parametrize("breaks", [False, True])
def test_new_names_without_end(bucket: Store, endless: Endless, breaks: bool) -> None:
    endless.breaks = breaks
    found: list[str] = []
    with pytest.raises(EndlessListing, match="2500 objects are listed: write a url"):
        found.extend(info.name for info in bucket.list())
    assert len(found) == 2500
    assert endless.pages == 3


@pytest.mark.s3
def test_pages_without_a_name_of_ours(
    bucket: Store, endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless.name = "some one's {}".format
    monkeypatch.setattr(bucket_store, "_PAGES_MAX", 3)
    with pytest.raises(EndlessListing, match="3 pages"):
        list(bucket.list())
    assert endless.pages == 3


@pytest.mark.s3
def test_a_tier_serves_on_and_lists_again_after_a_while(
    bucket: Store,
    endless: Endless,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(keeper_module, "_OPEN_S", 3600.0)
    now = 0.0
    keeper, tier = created(bucket, refresh_s=5.0, steady=lambda: now)
    with pytest.raises(EndlessListing):
        keeper.open(tier.offered)
    endless.pages = 0
    with caplog.at_level(logging.WARNING):
        for _ in range(120):
            now += 10.0
            keeper.run_once()
            tier.tick()
    said = [record.getMessage() for record in caplog.records]
    assert sum("is not listed to its end" in text for text in said) == 1
    assert endless.pages == 3 * 2, "each `audit`, and not each `refresh`"
    keys = make_keys(2)
    assert tier.lookup(keys) == [Presence.MISS] * 2
    assert tier.prepare_store(keys).keys == [], "nobody knows what is there"
    keeper.close()


class Tedious(FileStore):
    """Lists for minutes, and never to the end."""

    now = 1e9
    listings = 0

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        yield from super().list(prefix, **more)
        if not prefix:
            self.listings += 1
            self.now += 120.0
            raise Unavailable("page 1001 cannot be had")


def test_a_listing_that_fails_after_minutes_is_not_begun_at_once_again(tmp_path: Path) -> None:
    store = Tedious(tmp_path / "store")
    keeper, _ = created(store, refresh_s=5.0, steady=lambda: store.now)
    while store.now < 1e9 + 1000.0:
        keeper.run_once()
        store.now += 1.0
    assert store.listings == 5, "half of the time"
    keeper.close()


@pytest.mark.s3
@pytest.mark.parametrize("depth", Depth)
def test_namespaces_without_end(
    bucket: Store, endless: Endless, monkeypatch: pytest.MonkeyPatch, depth: Depth
) -> None:
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 20)
    monkeypatch.setattr(StoreSurvey, "_describe", lambda *_: None)
    monkeypatch.setattr(retry, "LISTED_MAX", 10**6)
    endless.name = lambda number: re.sub("^.{32}", f"{number:032x}", block(number))
    with pytest.raises(EndlessListing, match="20 namespaces"):
        StoreSurvey().look(bucket, depth)


class Listed(FileStore):
    """Has names without end below a prefix."""

    def __init__(self, root: Path, below: str, name: Names) -> None:
        super().__init__(root)
        self._below, self._named = below, name

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        if prefix in ("", self._below):
            return (ObjectInfo(self._named(number), 1, 1e9) for number in count())
        return super().list(prefix, **more)


def test_servers_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SERVERS_MAX", 50)
    servers = Listed(tmp_path / "store", "servers/", "servers/{}".format)
    own = ServerName(NAMESPACE.id, "ab" * 16, "f" * 16, 9, 3)
    with pytest.raises(EndlessListing, match="50 servers"):
        lease.Servers(servers, 30.0).look(own)


def test_manifests_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MANIFESTS_MAX", 50)
    below = f"{NAMESPACE.id}/manifest/"
    manifests = Listed(tmp_path / "store", below, lambda n: f"{below}{n:016x}-{0:010d}")
    with pytest.raises(EndlessListing, match="50 manifests"):
        Journal(manifests, NAMESPACE.id).read_all()


@pytest.mark.parametrize("name", [namespace, lambda n: re.sub("^.{32}", f"{n:032x}", block(n))])
def test_models_without_end_end_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Names
) -> None:
    monkeypatch.setattr(store, "NAMESPACES_MAX", 50)
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 50)
    keeper, _ = created(Listed(tmp_path / "store", "", name))
    with pytest.raises(EndlessListing, match="50 namespaces"):
        keeper.open(lambda: iter(()))
    keeper.close()
