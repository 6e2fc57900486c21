"""Stores that refuse bulk deletes: found out once, said once, and then deleted from one by one."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.object.object_servers import (
    HostileServer,
    Opener,
    Peer,
    ServerProcess,
    answer,
    error_body,
    pass_on,
)

from kvtier.backends.object.client import deletes, parallel_requests
from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.circuit_breaker import BreakerPolicy
from kvtier.backends.object.stores.open_store import open_store
from kvtier.backends.object.stores.retry import RetryPolicy
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.backends.object.stores.store import Store

pytestmark = pytest.mark.s3

MANY = deletes._SINGLE_BATCH + 8
REFUSALS = {
    "not implemented": answer(501, error_body("NotImplemented")),
    "not implemented, says a proxy": answer(501, b"<html>no</html>"),
    "not allowed": answer(405, error_body("MethodNotAllowed")),
    "invalid argument": answer(400, error_body("InvalidArgument")),
    "invalid request": answer(400, error_body("InvalidRequest")),
    "malformed": answer(400, error_body("MalformedXML")),
    "another checksum, please": answer(400, error_body("MissingContentMD5")),
    "too large, says a proxy": answer(413),
    "no such page": answer(404, b"<html>what?</html>"),
    "nothing": answer(200),
    "a page": answer(200, b"<html><body>welcome</body></html>"),
}


class Front:
    """Stands before a real server, and answers bulk deletes, or all deletes, itself."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.bulk: bytes | None = REFUSALS["not implemented"]
        """What it says to bulk deletes; None: what the server says."""
        self.single: Callable[[], bytes | None] = lambda: None
        self._methods: list[bytes] = []

    def serve(self, peer: Peer, head: bytes) -> None:
        body = peer.read_body(head)
        self._methods.append(head.partition(b" ")[0])
        said = None
        if head.startswith(b"POST "):
            said = self.bulk
        elif head.startswith(b"DELETE "):
            said = self.single()
        peer.sendall(said or pass_on(self._port, head, body))

    @property
    def asked(self) -> int:
        """How many bulk deletes there were."""
        return self._methods.count(b"POST")

    @property
    def singles(self) -> int:
        return self._methods.count(b"DELETE")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    deletes._log_once.cache_clear()


@pytest.fixture
def front(rclone_server: ServerProcess) -> Front:
    return Front(rclone_server.port)


@pytest.fixture
def server(front: Front) -> Iterator[HostileServer]:
    with HostileServer(front.serve) as server:
        yield server


@pytest.fixture
def store(server: HostileServer, opened: Opener, request: pytest.FixtureRequest) -> S3Store:
    return opened(endpoint=server.endpoint, prefix=f"deletes/{request.node.name[:40].strip('[')}")


def filled(store: Store, count: int) -> list[str]:
    names = [f"d/{index:04d}" for index in range(count)]
    for name in names:
        store.put(name, [memoryview(b"x")])
    return names


def left(store: Store) -> list[str]:
    return [info.name for info in store.list("d/")]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("how", REFUSALS)
def test_refused_bulk_deletes_are_done_singly(
    front: Front, server: HostileServer, opened: Opener, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    front.bulk = REFUSALS[how]
    store = opened(
        endpoint=server.endpoint, prefix=f"deletes/{how.replace(' ', '-').replace(',', '')}"
    )
    names = filled(store, 24)
    assert store.delete([*names[:10], "d/never-there"]) == {}
    assert left(store) == names[10:]
    assert store.delete(names[10:20]) == {}
    assert left(store) == names[20:]
    assert store.delete(names[20:]) == {}
    assert front.asked == 1, "it is remembered"
    again = opened(endpoint=server.endpoint, prefix="deletes")
    assert again.delete(names[:10]) == {}
    (said,) = complaints(caplog)
    assert "to a bulk delete: objects are deleted one by one" in said


def test_a_page_that_comes_once_in_between_is_not_believed(
    front: Front, store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    names = filled(store, 30)
    for said, some in ((None, names[:10]), (REFUSALS["a page"], names[10:20]), (None, names[20:])):
        front.bulk = said
        assert store.delete(some) == {}
    assert (left(store), front.asked, front.singles) == ([], 3, 10)
    assert store.deletes_at_once > deletes._SINGLE_BATCH
    assert complaints(caplog) == []


def test_a_store_that_insists_on_md5_is_deleted_from_in_bulk(opened: Opener) -> None:
    """As botocore sent it until 2025."""

    def serve(peer: Peer, head: bytes) -> None:
        digest = base64.b64encode(hashlib.md5(peer.read_body(head)).digest())
        stated = re.search(rb"content-md5: (\S+)", head, re.IGNORECASE)
        good = stated and stated.group(1) == digest and b"content-md5;" in head
        refused = answer(400, error_body("MissingContentMD5"))
        peer.sendall(answer(200, b"<DeleteResult/>") if good else refused)

    with HostileServer(serve) as server:
        store = opened(endpoint=server.endpoint)
        assert store.delete([f"n{index}" for index in range(9)]) == {}
        assert [head[:5] for head in server.heads] == [b"POST "]


@pytest.mark.parametrize("said", [(403, "AccessDenied"), (503, "SlowDown"), (500, "InternalError")])
def test_what_is_no_refusal_of_bulk_deletes_is_not_taken_for_one(
    front: Front,
    store: S3Store,
    caplog: pytest.LogCaptureFixture,
    said: tuple[int, str],
) -> None:
    """Permissions, and weather."""
    status, code = said
    names = filled(store, 10)
    front.bulk = answer(status, error_body(code))
    for _ in range(2):
        with pytest.raises((errors.AccessDenied, errors.TransientError)):
            store.delete(names)
    assert (front.asked, front.singles) == (2, 0)
    assert left(store) == names
    front.bulk = None
    assert store.delete(names) == {}
    assert (front.asked, left(store), complaints(caplog)) == (3, [], [])


def test_where_nothing_may_be_deleted_it_is_not_remembered(
    front: Front, store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    names = filled(store, 10)
    front.single = lambda: answer(403, error_body("AccessDenied"))
    failed = store.delete(names)
    assert list(failed) == names
    assert all(isinstance(error, errors.AccessDenied) for error in failed.values())
    store.delete(names)
    assert (front.asked, complaints(caplog)) == (2, [])


def test_an_endpoint_that_is_wrong_altogether_says_so(front: Front, store: S3Store) -> None:
    front.single = lambda: REFUSALS["not implemented"]
    with pytest.raises(errors.WrongEndpoint, match="501 NotImplemented"):
        store.delete([f"d/{index}" for index in range(10)])


def test_single_deletes_go_side_by_side_but_not_all_at_once(front: Front, store: S3Store) -> None:
    names = filled(store, 3 * parallel_requests._THREADS)
    together = threading.Barrier(parallel_requests._THREADS)
    lock, under_way, most = threading.Lock(), 0, 0

    def wait() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        together.wait(timeout=30)
        with lock:
            under_way -= 1

    front.single = wait
    assert store.delete(names, deadline=time.monotonic() + 60) == {}
    assert most == parallel_requests._THREADS
    assert left(store) == []


def test_a_deadline_holds_for_all_of_them(
    front: Front, server: HostileServer, store: S3Store
) -> None:
    names = filled(store, 20)

    def hang() -> None:
        server.release.wait()

    front.single = hang
    with pytest.raises(errors.TimedOut):
        store.delete(names, deadline=time.monotonic() + 0.3)
    server.release.set()


def test_where_no_thread_can_be_started_it_is_weather(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = filled(store, 10)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvtier-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(errors.Unavailable, match="thread"):
            store.delete(names)
    assert store.delete(names) == {}
    assert left(store) == []


def guarded(server: HostileServer, prefix: str) -> Store:
    """With the breaker that the first failure opens."""
    return open_store(
        f"s3://bucket/deletes/{prefix}",
        S3Settings(endpoint=server.endpoint, timeouts=Timeouts(5.0, 30.0, 60.0)),
        retry=RetryPolicy(attempts=1),
        breaker=BreakerPolicy(failures=1),
    )


def test_the_circuit_stays_closed_and_only_few_are_tried_in_vain(
    front: Front, server: HostileServer
) -> None:
    store = guarded(server, "circuit")
    assert store.deletes_at_once == deletes._SINGLE_BATCH, "nobody knows yet"
    names = filled(store, MANY)
    assert store.delete(names) == {}
    assert (left(store), front.asked) == ([], 1)
    assert store.deletes_at_once == deletes._SINGLE_BATCH
    store.close()


def test_where_bulk_deletes_work_the_next_are_a_thousand(
    front: Front, server: HostileServer
) -> None:
    front.bulk = None
    store = guarded(server, "thousand")
    names = filled(store, MANY)
    assert store.delete([*names, *(f"d/none-{index}" for index in range(1000))]) == {}
    assert (left(store), front.asked, front.singles) == ([], 3, 0)
    store.close()
