"""Which connections are used again: those that stand where an answer would begin, and no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from support.object.object_servers import HostileServer, Opener, Peer, answer, error_body
from support.object.s3_client_helpers import BODY, get, said

from kvtier.backends.object.client.http import connection_pool
from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.s3_store import S3Store

pytestmark = pytest.mark.s3


def noted(server: HostileServer, script: Callable[[Peer, bytes], None]) -> list[object]:
    """Let the server do so; the connection that each request has come by."""
    used: list[object] = []

    def note(peer: Peer, head: bytes) -> None:
        used.append(peer.client)
        script(peer, head)

    server.script = note
    return used


CLOSES = answer(200, BODY, connection="Close")
OLD = answer(200, BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
OLD_AND_KEPT = answer(200, BODY, connection="keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")
TOO_MUCH = answer(200, BODY) + b"too much"


@pytest.mark.parametrize(
    ("data", "connections"),
    [(answer(200, BODY), 1), (OLD_AND_KEPT, 1), (CLOSES, 3), (OLD, 3), (TOO_MUCH, 3)],
    ids=["kept", "old and kept", "closed", "old", "too much"],
)
def test_a_server_says_what_it_keeps(
    server: HostileServer, store: S3Store, data: bytes, connections: int
) -> None:
    """One that closes a connection may take its time, and what it says beyond is no answer."""
    used = noted(server, said(data))
    for _ in range(3):
        assert get(store) is not None
    assert len(set(used)) == connections


def test_what_was_not_read_to_its_end_is_not_kept(server: HostileServer, store: S3Store) -> None:
    used = noted(server, said(answer(200, BODY + b"longer")))
    for _ in range(2):
        with pytest.raises(errors.LengthMismatch):
            get(store)
    assert len(set(used)) == 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_when_it_is_used_again_is_replaced(
    server: HostileServer, store: S3Store, reset: bool
) -> None:
    """As where the server closes what is idle at the moment at which something is asked."""

    def once(peer: Peer, head: bytes) -> None:
        if used.count(peer.client) == 1:
            peer.sendall(answer(200, BODY))
        elif reset:
            peer.reset()
        else:
            peer.cut()

    used = noted(server, once)
    for _ in range(3):
        assert get(store) is not None
    assert len(used) == 5


def test_a_new_connection_that_is_reset_is_weather(server: HostileServer, store: S3Store) -> None:
    used = noted(server, lambda peer, head: peer.reset())
    with pytest.raises(errors.Unavailable):
        get(store)
    assert len(used) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_error_is_read_to_its_end(
    server: HostileServer, store: S3Store, chunked: bool
) -> None:
    body = b"<Error><Message>" + b"x" * 40_000 + b"</Message><Code>ExpiredToken</Code></Error>"
    pieces = [body[start : start + 13] for start in range(0, len(body), 13)]

    def refuse(peer: Peer, head: bytes) -> None:
        field = b"transfer-encoding: chunked\r\n" if chunked else b""
        peer.sendall(b"HTTP/1.1 400 No\r\n%s\r\n" % field)
        peer.sendall(
            b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
            if chunked
            else body
        )
        peer.cut()

    server.script = refuse
    for _ in range(2):
        with pytest.raises(errors.ExpiredToken):
            get(store)


def test_interim_answers_are_passed_over(server: HostileServer, store: S3Store) -> None:
    used = noted(server, said(b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" * 2 + answer(200, BODY)))
    for _ in range(2):
        assert get(store) is not None
    assert len(set(used)) == 1


def test_nobody_waits_for_a_body_where_none_can_be(server: HostileServer, store: S3Store) -> None:
    used = noted(server, said(b"HTTP/1.1 204 Said\r\n\r\n"))
    for _ in range(2):
        assert store.delete(["name"]) == {}
    assert len(set(used)) == 1
    server.script = said(b"HTTP/1.1 304 Said\r\n\r\n")
    with pytest.raises(errors.WrongEndpoint, match="304"):
        store.delete(["name"])


def test_chunks_may_have_extensions(server: HostileServer, store: S3Store) -> None:
    body = error_body("NoSuchKey")
    head = b"HTTP/1.1 404 No\r\ntransfer-encoding: Chunked\r\n\r\n"
    used = noted(server, said(head + b"%x;name=value\r\n%s\r\n0\r\n\r\n" % (len(body), body)))
    for _ in range(2):
        assert get(store) is None
    assert len(set(used)) == 1


@pytest.mark.parametrize("piece", [b"x" * 4096, b"1000\r\n" + b"x" * 4096 + b"\r\n"])
def test_an_error_without_an_end_is_bounded(
    server: HostileServer, store: S3Store, piece: bytes
) -> None:
    chunked = b"transfer-encoding: chunked\r\n" if b"\r\n" in piece else b""

    def go_on(peer: Peer, head: bytes) -> None:
        peer.sendall(b"HTTP/1.1 500 No\r\n%s\r\n" % chunked)
        while not server.release.is_set():
            peer.sendall(piece)

    server.script = go_on
    with pytest.raises(errors.Unavailable, match="answered 500"):
        get(store)


def test_a_line_without_an_end_is_bounded(server: HostileServer, store: S3Store) -> None:
    head = b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n"
    server.script = said(head + b"1;" + b"x" * 100_000)
    with pytest.raises(errors.Unavailable, match="too long"):
        get(store)


def test_a_connection_that_was_idle_for_long_is_not_trusted(
    server: HostileServer, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = noted(server, said(answer(200, BODY)))
    monkeypatch.setattr(connection_pool, "_KEEP_IDLE_S", -1.0)
    for _ in range(2):
        assert get(store) is not None
    assert len(set(used)) == 2


def use_at_once(server: HostileServer, store: S3Store, count: int) -> None:
    """So many calls, each of which needs a connection of its own."""
    together = threading.Barrier(count)

    def reply(peer: Peer, head: bytes) -> None:
        together.wait(30)
        peer.sendall(answer(200))

    server.script = reply
    with ThreadPoolExecutor(count) as callers:
        wait([callers.submit(store.put, "name", [memoryview(b"")]) for _ in range(count)])


def test_of_a_machine_that_has_gone_without_a_word_no_connection_is_tried_again(
    server: HostileServer, opened: Opener
) -> None:
    """It lost its power, say: nobody closes what was open, and another may have its address."""
    timeouts = Timeouts(connect_s=10.0, idle_s=0.1, total_s=20.0, upload_s=20.0)
    store = opened(endpoint=server.endpoint, timeouts=timeouts)
    use_at_once(server, store, 4)
    assert len(store._client.pool._idle) == 4
    server.script = lambda peer, head: None
    with pytest.raises(errors.TimedOut):
        get(store)
    assert not store._client.pool._idle


def test_a_call_that_had_little_time_says_nothing_of_other_connections(
    server: HostileServer, opened: Opener
) -> None:
    store = opened(endpoint=server.endpoint, timeouts=Timeouts(10.0, 10.0, 20.0))
    use_at_once(server, store, 2)
    server.script = lambda peer, head: None
    with pytest.raises(errors.TimedOut):
        store.get("name", [memoryview(bytearray(1))], deadline=time.monotonic() + 0.1)
    assert len(store._client.pool._idle) == 1


def test_no_more_are_kept_than_were_asked_for_and_none_once_closed(
    server: HostileServer, opened: Opener
) -> None:
    store = opened(endpoint=server.endpoint, connections=2)
    together = threading.Barrier(4)

    def reply(peer: Peer, head: bytes) -> None:
        together.wait(30)
        peer.sendall(answer(200, BODY))

    used = noted(server, reply)
    callers = [threading.Thread(target=get, args=(store,)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(used)) == 4
    assert len(store._client.pool._idle) == 2
    server.script = lambda peer, head: (store.close(), peer.sendall(answer(200, BODY)))[1]
    assert get(store) is not None
    for thread in server._threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in server._threads), "each has seen the end"
