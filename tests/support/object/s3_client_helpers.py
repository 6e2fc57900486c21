"""How tests of a hostile server ask it, and what it says."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, Timeouts
from support.object.object_servers import HostileServer, Peer

BODY = bytes(range(256)) * 256
PATIENT = Timeouts(connect_s=10.0, idle_s=10.0, total_s=20.0)


def store_at(server: HostileServer, timeouts: Timeouts = PATIENT) -> BucketStore:
    return BucketStore(BucketSettings(bucket="bucket", endpoint=server.endpoint, timeouts=timeouts))


def get(store: BucketStore) -> int | None:
    return store.get("name", [memoryview(bytearray(len(BODY)))])


def said(data: bytes) -> Callable[[Peer, bytes], None]:
    return lambda peer, head: peer.sendall(data)
