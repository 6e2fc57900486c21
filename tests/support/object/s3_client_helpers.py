"""How tests of a hostile server ask it, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, Timeouts
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from support.object.object_servers import HostileServer, Peer

BODY = bytes(range(256)) * 256
PATIENT = Timeouts(connect_s=10.0, idle_s=10.0, total_s=20.0)


def store_at(server: HostileServer, timeouts: Timeouts = PATIENT) -> BucketStore:
    return BucketStore(BucketSettings(bucket="bucket", endpoint=server.endpoint, timeouts=timeouts))


def retrying_bucket(retry: RetryPolicy | None = None, **settings: Any) -> RetryingStore:
    """A bucket behind retries and a circuit breaker, as a tier has it."""
    chosen = BucketSettings(**{"bucket": "bucket"} | settings)
    return RetryingStore(BucketStore(chosen), retry or RetryPolicy(), chosen.timeouts.total_s)


def get(store: BucketStore) -> int | None:
    return store.get("name", memoryview(bytearray(len(BODY))))


def said(data: bytes) -> Callable[[Peer, bytes], None]:
    return lambda peer, head: peer.sendall(data)
