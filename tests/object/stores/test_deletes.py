"""Stores that refuse bulk deletes: found out once, said once, and then deleted from one by one."""

from __future__ import annotations

import logging
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
from support.object.s3_client_helpers import retrying_bucket

from kvtier.backends.object.stores import bucket_store, errors
from kvtier.backends.object.stores import store as store_module
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import Timeouts
from kvtier.backends.object.stores.retry import RetryPolicy
from kvtier.backends.object.stores.store import Store

pytestmark = pytest.mark.s3

MANY = bucket_store._SINGLE_BATCH + 8
REFUSALS = {
    "not implemented": answer(501, error_body("NotImplemented")),
    "not implemented, says a proxy": answer(501, b"<html>no</html>"),
    "not allowed": answer(405, error_body("MethodNotAllowed")),
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
    bucket_store._log_once.cache_clear()


@pytest.fixture
def front(rclone_server: ServerProcess) -> Front:
    return Front(rclone_server.port)


@pytest.fixture
def server(front: Front) -> Iterator[HostileServer]:
    with HostileServer(front.serve) as server:
        yield server


@pytest.fixture
def store(server: HostileServer, opened: Opener, request: pytest.FixtureRequest) -> BucketStore:
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
    front: Front, store: BucketStore, caplog: pytest.LogCaptureFixture
) -> None:
    names = filled(store, 30)
    for said, some in ((None, names[:10]), (REFUSALS["a page"], names[10:20]), (None, names[20:])):
        front.bulk = said
        assert store.delete(some) == {}
    assert (left(store), front.asked, front.singles) == ([], 3, 10)
    assert store.deletes_at_once > bucket_store._SINGLE_BATCH
    assert complaints(caplog) == []


@pytest.mark.parametrize("said", [(403, "AccessDenied"), (503, "SlowDown"), (500, "InternalError")])
def test_what_is_no_refusal_of_bulk_deletes_is_not_taken_for_one(
    front: Front,
    store: BucketStore,
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
    front: Front, store: BucketStore, caplog: pytest.LogCaptureFixture
) -> None:
    names = filled(store, 10)
    front.single = lambda: answer(403, error_body("AccessDenied"))
    failed = store.delete(names)
    assert list(failed) == names
    assert all(isinstance(error, errors.AccessDenied) for error in failed.values())
    store.delete(names)
    assert (front.asked, complaints(caplog)) == (2, [])


def test_an_endpoint_that_is_wrong_altogether_says_so(front: Front, store: BucketStore) -> None:
    front.single = lambda: REFUSALS["not implemented"]
    with pytest.raises(errors.WrongEndpoint, match="501 NotImplemented"):
        store.delete([f"d/{index}" for index in range(10)])


def test_single_deletes_go_side_by_side_but_not_all_at_once(
    front: Front, store: BucketStore
) -> None:
    names = filled(store, 3 * store_module._PARALLEL)
    together = threading.Barrier(store_module._PARALLEL)
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
    assert most == store_module._PARALLEL
    assert left(store) == []


def test_a_deadline_holds_for_all_of_them(
    front: Front, server: HostileServer, store: BucketStore
) -> None:
    names = filled(store, 20)

    def hang() -> None:
        server.release.wait()

    front.single = hang
    with pytest.raises(errors.TimedOut):
        store.delete(names, deadline=time.monotonic() + 0.3)
    server.release.set()


def test_where_no_thread_can_be_started_it_is_weather(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
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
    return retrying_bucket(
        RetryPolicy(attempts=1, failures=1),
        prefix=f"deletes/{prefix}",
        endpoint=server.endpoint,
        timeouts=Timeouts(5.0, 30.0, 60.0),
    )


def test_the_circuit_stays_closed_and_only_few_are_tried_in_vain(
    front: Front, server: HostileServer
) -> None:
    store = guarded(server, "circuit")
    assert store.deletes_at_once == bucket_store._SINGLE_BATCH, "nobody knows yet"
    names = filled(store, MANY)
    assert store.delete(names) == {}
    assert (left(store), front.asked) == ([], 1)
    assert store.deletes_at_once == bucket_store._SINGLE_BATCH
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


@pytest.fixture
def scripted() -> Iterator[HostileServer]:
    """With no server behind it."""
    with HostileServer(lambda peer, head: peer.cut()) as server:
        yield server


@pytest.mark.parametrize("page", [b"404 page not found", b""])
def test_what_a_proxy_does_not_find_is_not_gone(
    scripted: HostileServer, opened: Opener, page: bytes
) -> None:
    """One that does not know for now where the store is says so of each object."""

    def serve(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(404, page))

    scripted.script = serve
    store = opened(endpoint=scripted.endpoint)
    for count in (1, 9):
        with pytest.raises(errors.WrongEndpoint, match="404"):
            store.delete([f"n{index}" for index in range(count)])


@pytest.mark.parametrize("code", ["NoSuchKey", "NotFound"])
def test_what_the_store_does_not_find_is_gone(
    scripted: HostileServer, opened: Opener, code: str
) -> None:
    scripted.script = lambda peer, head: peer.sendall(answer(404, error_body(code)))
    assert opened(endpoint=scripted.endpoint).delete(["n0"]) == {}


def test_an_object_that_may_not_be_deleted_keeps_no_other_there(
    scripted: HostileServer, opened: Opener
) -> None:
    """A few are deleted one by one."""

    def serve(peer: Peer, head: bytes) -> None:
        held = b"/n1 " in head
        peer.sendall(answer(403, error_body("AccessDenied")) if held else answer(204))

    scripted.script = serve
    failed = opened(endpoint=scripted.endpoint).delete(["n0", "n1", "n2"])
    assert [*failed] == ["n1"]
    assert isinstance(failed["n1"], errors.AccessDenied)
    assert len(scripted.heads) == 3


REFUSED_DELETE = (
    "<DeleteResult><Error><Key>{}</Key><Code>{}</Code><Message>m</Message></Error></DeleteResult>"
)


def test_a_bulk_delete_says_what_was_not_deleted(scripted: HostileServer, opened: Opener) -> None:
    """One word of a failure, and each object is asked for by itself."""
    store = opened(endpoint=scripted.endpoint)
    names = [f"n{index}" for index in range(9)]
    said = "AccessDenied"

    def serve(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        if head.startswith(b"POST"):
            peer.sendall(answer(200, REFUSED_DELETE.format("n3", said).encode()))
        elif b"/n3 " in head:
            status = 404 if said == "NoSuchKey" else 403
            peer.sendall(answer(status, error_body(said)))
        else:
            peer.sendall(answer(204))

    scripted.script = serve
    assert [*store.delete(names)] == ["n3"]
    said = "NoSuchKey"
    assert not store.delete(names), "some servers call that an error"


def test_objects_that_a_busy_store_did_not_come_to_are_deleted_by_another_try(
    scripted: HostileServer,
) -> None:
    """Said of one of them, it is no more a refusal of that one than of all."""
    deleted = "".join(f"<Deleted><Key>n{index}</Key></Deleted>" for index in range(9))
    answers = [
        REFUSED_DELETE.format("n3", "SlowDown"),
        f"<DeleteResult>{deleted}</DeleteResult>",
    ]

    def serve(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(200, answers.pop(0).encode()))

    scripted.script = serve
    store = retrying_bucket(
        RetryPolicy(attempts=3, base_s=0.0),
        endpoint=scripted.endpoint,
        timeouts=Timeouts(5.0, 30.0, 60.0),
    )
    assert store.delete([f"n{index}" for index in range(9)]) == {}
    assert not answers
    store.close()
