"""Objects over plain HTTP: which connections are kept, and what is made of answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from support.object.object_servers import HostileServer, Opener, Peer, answer, error_body
from support.object.s3_client_helpers import BODY, get, said

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import Timeouts

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
TOO_MUCH = answer(200, BODY) + b"too much"


@pytest.mark.parametrize(
    ("data", "connections"),
    [(answer(200, BODY), 1), (CLOSES, 3), (TOO_MUCH, 3)],
    ids=["kept", "closed", "too much"],
)
def test_a_server_says_what_it_keeps(
    server: HostileServer, store: BucketStore, data: bytes, connections: int
) -> None:
    """One that closes a connection may take its time, and what it says beyond is no answer."""
    used = noted(server, said(data))
    for _ in range(3):
        assert get(store) is not None
    assert len(set(used)) == connections


def test_what_was_not_read_to_its_end_is_not_kept(
    server: HostileServer, store: BucketStore
) -> None:
    used = noted(server, said(answer(200, BODY + b"longer")))
    for _ in range(2):
        with pytest.raises(errors.LengthMismatch):
            get(store)
    assert len(set(used)) == 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_when_it_is_used_again_is_replaced(
    server: HostileServer, store: BucketStore, reset: bool
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


def test_a_new_connection_that_is_reset_is_weather(
    server: HostileServer, store: BucketStore
) -> None:
    used = noted(server, lambda peer, head: peer.reset())
    with pytest.raises(errors.Unavailable):
        get(store)
    assert len(used) == 1


def test_an_error_in_chunks_is_understood(server: HostileServer, store: BucketStore) -> None:
    body = error_body("NoSuchKey")
    head = b"HTTP/1.1 404 No\r\ntransfer-encoding: Chunked\r\n\r\n"
    server.script = said(head + b"%x;name=value\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    for _ in range(2):
        assert get(store) is None


@pytest.mark.parametrize("piece", [b"x" * 4096, b"1000\r\n" + b"x" * 4096 + b"\r\n"])
def test_an_error_without_an_end_is_bounded(
    server: HostileServer, store: BucketStore, piece: bytes
) -> None:
    chunked = b"transfer-encoding: chunked\r\n" if b"\r\n" in piece else b""

    def go_on(peer: Peer, head: bytes) -> None:
        peer.sendall(b"HTTP/1.1 500 No\r\n%s\r\n" % chunked)
        while not server.release.is_set():
            peer.sendall(piece)

    server.script = go_on
    with pytest.raises(errors.Unavailable, match="answered 500"):
        get(store)


def test_of_a_machine_that_has_gone_without_a_word_no_connection_is_tried_again(
    server: HostileServer, opened: Opener
) -> None:
    """It lost its power, say: nobody closes what was open, and another may have its address."""
    store = opened(endpoint=server.endpoint, timeouts=Timeouts(10.0, 1.0, 20.0))
    together = threading.Barrier(4)

    def reply(peer: Peer, head: bytes) -> None:
        together.wait(30)
        peer.sendall(answer(200, BODY))

    used = noted(server, reply)
    with ThreadPoolExecutor(4) as callers:
        asked = [callers.submit(get, store) for _ in range(4)]
    assert all(each.result() is not None for each in asked)
    before = set(used)
    heard = threading.Semaphore(0)
    used = noted(server, lambda peer, head: heard.release())
    for _ in range(2):
        with pytest.raises(errors.TimedOut):
            get(store)
    for _ in range(2):
        assert heard.acquire(timeout=30)
    assert [one in before for one in used] == [True, False]


def test_no_more_are_kept_than_were_asked_for_and_none_once_closed(
    server: HostileServer, opened: Opener
) -> None:
    store = opened(endpoint=server.endpoint, connections=2)
    together = threading.Barrier(4)

    def reply(peer: Peer, head: bytes) -> None:
        together.wait(30)
        peer.sendall(answer(200, BODY))

    used = noted(server, reply)
    for _ in range(2):
        with ThreadPoolExecutor(4) as callers:
            wait([callers.submit(get, store) for _ in range(4)])
    assert len(set(used)) == 6


def test_an_object_lands_in_its_buffer_and_nowhere_else(
    server: HostileServer, store: BucketStore
) -> None:
    """Whatever pieces it comes in."""
    body = bytes(range(256)) * 40

    def in_pieces(peer: Peer, head: bytes) -> None:
        data = answer(200, body)
        for start in range(0, len(data), 1999):
            peer.sendall(data[start : start + 1999])

    server.script = in_pieces
    into = bytearray(len(body) + 1000)
    assert store.get("name", memoryview(into)) == len(body)
    assert into == body + bytes(1000)
