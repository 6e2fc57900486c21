"""How tests of a hostile server ask it, and what it says."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores.s3_store import S3Store
from support.object.object_servers import HostileServer, Peer

BODY = bytes(range(256)) * 256
PATIENT = Timeouts(connect_s=10.0, idle_s=10.0, total_s=20.0)


def store_at(server: HostileServer, timeouts: Timeouts = PATIENT) -> S3Store:
    return S3Store(S3Settings(bucket="bucket", endpoint=server.endpoint, timeouts=timeouts))


def get(store: S3Store) -> int | None:
    return store.get("name", [memoryview(bytearray(len(BODY)))])


def said(data: bytes) -> Callable[[Peer, bytes], None]:
    return lambda peer, head: peer.sendall(data)
