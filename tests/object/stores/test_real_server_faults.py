"""A real server that is frozen, killed or distrustful: the right error in time, then recovery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support.object.object_servers import Opener, ServerProcess

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import Timeouts
from kvtier.backends.object.stores.store import PutOutcome, Store

pytestmark = pytest.mark.s3

QUICK = Timeouts(connect_s=0.5, idle_s=0.5, total_s=1.5)
BYTES = 24 << 20


@pytest.fixture
def store(own_rclone: ServerProcess, opened: Opener) -> BucketStore:
    return opened(endpoint=own_rclone.endpoint, timeouts=Timeouts(5, 5, 30))


@pytest.fixture
def hasty(own_rclone: ServerProcess, opened: Opener) -> BucketStore:
    """A store that does not wait for long."""
    return opened(endpoint=own_rclone.endpoint, timeouts=QUICK)


def get(store: Store, size: int) -> bytes:
    into = bytearray(size)
    assert store.get("big", memoryview(into)) is not None
    return bytes(into)


def put(store: Store, data: bytes) -> PutOutcome:
    return store.put("big", [memoryview(data)])


def served(store: Store, data: bytes) -> bool:
    """Whether these bytes come back; this server shows an object while it is being rewritten, as
    it is by a put that we gave up and that it carries out when it comes back."""
    try:
        return get(store, len(data)) == data
    except (errors.LengthMismatch, errors.Unavailable, errors.TimedOut, errors.NoCredentials):
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never happened"
        threading.Event().wait(0.002)


@pytest.mark.parametrize("how", ["freeze", "kill"])
@pytest.mark.parametrize("method", ["get", "put"])
def test_a_server_lost_before_the_request(
    own_rclone: ServerProcess, store: BucketStore, hasty: BucketStore, how: str, method: str
) -> None:
    data = bytes(range(256)) * 64
    put(store, data)
    until(lambda: served(hasty, data))  # a connection is kept
    getattr(own_rclone, how)()
    started = time.monotonic()
    with pytest.raises((errors.TimedOut, errors.Unavailable)):
        get(hasty, len(data)) if method == "get" else put(hasty, data)
    assert time.monotonic() - started < QUICK.total_s + 5
    own_rclone.thaw() if how == "freeze" else own_rclone.start()
    until(lambda: served(store, data))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_server_lost_in_the_middle_of_a_get(
    own_rclone: ServerProcess, store: BucketStore, hasty: BucketStore, how: str
) -> None:
    data = bytes(range(256)) * (BYTES // 256)
    put(store, data)
    into = bytearray(len(data))
    ended: list[int | errors.StoreError | None] = []

    def load() -> None:
        try:
            ended.append(hasty.get("big", memoryview(into)))
        except errors.StoreError as error:
            ended.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: into[255] == 255 or bool(ended))
    getattr(own_rclone, how)()
    thread.join(timeout=30)
    assert not thread.is_alive()
    # it either had everything when the server was lost, or it says so
    assert ended[0] is not None
    assert isinstance(ended[0], errors.StoreError) or into == data
    own_rclone.thaw() if how == "freeze" else own_rclone.start()
    assert get(store, len(data)) == data


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_server_lost_in_the_middle_of_a_put(
    own_rclone: ServerProcess, store: BucketStore, hasty: BucketStore, how: str
) -> None:
    data = bytes(range(256)) * (BYTES // 256)
    ended: list[PutOutcome | errors.StoreError] = []

    def save() -> None:
        try:
            ended.append(put(hasty, data))
        except errors.StoreError as error:
            ended.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    own_rclone.freeze() if how == "freeze" else own_rclone.kill()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert ended
    own_rclone.thaw() if how == "freeze" else own_rclone.start()
    put(store, data)
    until(lambda: served(store, data))


def test_a_bucket_that_is_not_there(rclone_server: ServerProcess, opened: Opener) -> None:
    store = opened(bucket="no-such-bucket", endpoint=rclone_server.endpoint)
    with pytest.raises(errors.NoSuchBucket, match="create the bucket"):
        put(store, b"x")
    with pytest.raises(errors.NoSuchBucket):
        list(store.list())
