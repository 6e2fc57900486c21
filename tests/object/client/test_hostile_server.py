"""A server that cuts, trickles, lies or refuses: the right error, in time, and nothing leaked."""

from __future__ import annotations

import logging
import socket
import time

import pytest
from support.object.object_servers import SECRET_KEY, HostileServer, Peer, answer, error_body
from support.object.s3_client_helpers import BODY, get, store_at

from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.backends.object.stores.store import PutOutcome

pytestmark = pytest.mark.s3

TIMEOUTS = Timeouts(connect_s=1.0, idle_s=0.3, total_s=1.0)


@pytest.mark.parametrize("sent", [0, 1, 4096, len(BODY) - 1])
def test_a_connection_cut_inside_the_body(server: HostileServer, store: S3Store, sent: int) -> None:
    def cut(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(200, BODY)[: -len(BODY)] + BODY[:sent])
        peer.cut()

    server.script = cut
    with pytest.raises(errors.Unavailable, match="cut the connection"):
        get(store)


@pytest.mark.parametrize("sent", [0, 5, 30])
def test_a_connection_cut_inside_the_head(server: HostileServer, store: S3Store, sent: int) -> None:
    def cut(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(200, BODY)[:sent])
        peer.cut()

    server.script = cut
    with pytest.raises(errors.Unavailable, match="without an answer"):
        get(store)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_server_that_falls_silent(server: HostileServer, head_first: bool) -> None:
    def hang(peer: Peer, head: bytes) -> None:
        if head_first:
            peer.sendall(answer(200, BODY)[:-100])
        server.release.wait()

    server.script = hang
    store = store_at(server, TIMEOUTS)
    started = time.monotonic()
    with pytest.raises(errors.TimedOut):
        get(store)
    assert time.monotonic() - started < TIMEOUTS.total_s + 2.0
    store.close()


def test_a_trickle_ends_at_the_total_deadline(server: HostileServer) -> None:
    def trickle(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(200, BODY)[: -len(BODY)])
        while not server.release.wait(0.02):
            peer.sendall(b"x")

    server.script = trickle
    store = store_at(server, Timeouts(connect_s=1.0, idle_s=5.0, total_s=0.5))
    started = time.monotonic()
    with pytest.raises(errors.TimedOut):
        get(store)
    assert time.monotonic() - started < 4.0  # the idle timeout alone would never end it
    store.close()


def test_a_server_that_reads_no_upload(server: HostileServer) -> None:
    def hang(peer: Peer, head: bytes) -> None:
        server.release.wait()

    server.script = hang
    store = store_at(server, TIMEOUTS)
    with pytest.raises(errors.TimedOut):
        store.put("name", [memoryview(bytes(64 << 20))])
    store.close()


def test_a_refusal_in_the_middle_of_an_upload_is_understood(
    server: HostileServer, store: S3Store
) -> None:
    def refuse(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(403, error_body("AccessDenied"), connection="close"))
        peer.cut(socket.SHUT_WR)
        while peer.recv(1 << 20):
            pass

    server.script = refuse
    with pytest.raises(errors.AccessDenied):
        store.put("name", [memoryview(bytes(8 << 20))])


def test_nor_is_it_lost_where_the_rest_is_not_read(server: HostileServer, store: S3Store) -> None:
    def refuse(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(403, error_body("AccessDenied")))
        peer.close()

    server.script = refuse
    with pytest.raises(errors.AccessDenied):
        store.put("name", [memoryview(bytes(64 << 20))])


def test_a_listing_that_goes_in_circles(server: HostileServer, store: S3Store) -> None:
    def page(peer: Peer, head: bytes) -> None:
        token = b"y" if b"continuation-token=x" in head else b"x"
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken>"
        body = more % token if len(server.heads) < 9 else b""
        peer.sendall(answer(200, b"<ListBucketResult>" + body + b"</ListBucketResult>"))

    server.script = page
    with pytest.raises(errors.WrongEndpoint, match="same page"):
        list(store.list())
    assert len(server.heads) == 3


def test_a_listing_that_begins_again_with_new_tokens(server: HostileServer, store: S3Store) -> None:
    """As from a store that hands out tokens, and does not look at those that it gets."""

    def page(peer: Peer, head: bytes) -> None:
        said = b"<Contents><Key>a</Key><Size>1</Size>"
        said += b"<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        if len(server.heads) < 9:
            said += b"<IsTruncated>true</IsTruncated>"
            said += b"<NextContinuationToken>%d</NextContinuationToken>" % len(server.heads)
        peer.sendall(answer(200, b"<ListBucketResult>" + said + b"</ListBucketResult>"))

    server.script = page
    with pytest.raises(errors.WrongEndpoint, match="same page"):
        list(store.list())
    assert len(server.heads) == 2


@pytest.mark.parametrize(
    "chunks", [b"zz\r\n", b"fffffffff\r\n", b"5\r\nhelloXX", b"-1\r\n", b"7fffffff\r\n"]
)
def test_chunks_that_lie(server: HostileServer, store: S3Store, chunks: bytes) -> None:
    def lie(peer: Peer, head: bytes) -> None:
        peer.sendall(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        peer.cut(socket.SHUT_WR)

    server.script = lie
    with pytest.raises(errors.StoreError):
        get(store)


@pytest.mark.parametrize(
    "said",
    [
        answer(501, error_body("NotImplemented")),
        answer(501, b"<html>not implemented, says a proxy</html>"),
        answer(400, error_body("InvalidArgument")),
        answer(400, error_body("InvalidRequest")),
        answer(400, error_body("BadRequest")),
        answer(400),
    ],
)
def test_a_store_that_does_not_know_conditional_put(
    server: HostileServer, store: S3Store, said: bytes
) -> None:
    def old(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        knows = b"if-none-match" not in head.lower()
        peer.sendall(answer(200) if knows else said)

    server.script = old
    for _ in range(2):
        outcome = store.put("name", [memoryview(b"bytes")], if_absent=True)
        assert outcome is PutOutcome.STORED
    assert len(server.heads) == 3  # the second put does not ask again


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "XMinioAdminBucketQuotaExceeded", errors.StoreFull),
        (400, "KeyTooLongError", errors.WrongEndpoint),
        (405, "MethodNotAllowed", errors.WrongEndpoint),
    ],
)
def test_a_put_that_is_refused_for_another_reason_is_not_sent_twice(
    server: HostileServer, store: S3Store, status: int, code: str, kind: type[errors.StoreError]
) -> None:
    def refuse(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(status, error_body(code)))

    server.script = refuse
    for _ in range(2):
        with pytest.raises(kind, match=code):
            store.put("name", [memoryview(b"bytes")], if_absent=True)
    assert len(server.heads) == 2


def test_nothing_secret_is_logged_or_shown(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = "session-token-0123456789abcdef"
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    shown = []

    def echo(peer: Peer, head: bytes) -> None:
        said = error_body("SignatureDoesNotMatch", head.decode("latin-1"))
        peer.sendall(answer(403, said + SECRET_KEY.encode()))

    server.script = echo
    caplog.set_level(logging.DEBUG)
    store = store_at(server)
    for call in (lambda: get(store), lambda: list(store.list()), lambda: store.delete(["x"])):
        with pytest.raises(errors.AccessDenied) as caught:
            call()
        shown += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
    shown += [repr(store), str(vars(store)), caplog.text]
    assert any(token.encode() in head for head in server.heads)
    for text in shown:
        assert SECRET_KEY not in text
        assert token not in text
    store.close()
