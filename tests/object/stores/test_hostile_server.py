"""A server that cuts, trickles, lies or refuses: the right error, in time, and nothing leaked.

Objects are read in two ways (straight, and by obstore alone), and each test takes both.
"""

from __future__ import annotations

import logging
import socket
import time

import pytest
from support.object.object_servers import SECRET_KEY, HostileServer, Peer, answer, error_body
from support.object.s3_client_helpers import BODY, get, said, store_at

from kvtier.backends.object import ObjectHandler, ObjectSpec
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores import clouds, errors
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import Timeouts
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.store import PutOutcome
from kvtier.record.codec import Codec
from kvtier.testing.subject import NAMESPACE, blank, make_keys, sealed
from kvtier.types import Outcome

pytestmark = pytest.mark.s3

TIMEOUTS = Timeouts(connect_s=1.0, idle_s=0.3, total_s=1.0, upload_s=0.6)


@pytest.fixture(autouse=True, params=["straight", "by obstore"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "straight":
        monkeypatch.setattr(clouds.Place, "direct", False)


@pytest.mark.parametrize("sent", [0, len(BODY) - 1])
def test_a_connection_cut_inside_the_body(
    server: HostileServer, store: BucketStore, sent: int
) -> None:
    def cut(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(200, BODY)[: -len(BODY)] + BODY[:sent])
        peer.cut()

    server.script = cut
    with pytest.raises(errors.Unavailable, match=r"cut the connection|broke"):
        get(store)


@pytest.mark.parametrize("sent", [0, 30])
def test_a_connection_cut_inside_the_head(
    server: HostileServer, store: BucketStore, sent: int
) -> None:
    def cut(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(200, BODY)[:sent])
        peer.cut()

    server.script = cut
    with pytest.raises(errors.Unavailable, match=r"cut|without an answer|broke"):
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
    server: HostileServer, store: BucketStore
) -> None:
    def refuse(peer: Peer, head: bytes) -> None:
        peer.sendall(answer(403, error_body("AccessDenied"), connection="close"))
        peer.cut(socket.SHUT_WR)
        while peer.recv(1 << 20):
            pass

    server.script = refuse
    with pytest.raises(errors.AccessDenied):
        store.put("name", [memoryview(bytes(8 << 20))])


def test_a_listing_that_begins_again_with_new_tokens(
    server: HostileServer, store: BucketStore
) -> None:
    """As from a store that hands out tokens, and does not look at those that it gets."""

    def page(peer: Peer, head: bytes) -> None:
        said = b"<Contents><Key>a</Key><Size>1</Size>"
        said += b"<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        if len(server.heads) < 2000:
            said += b"<IsTruncated>true</IsTruncated>"
            said += b"<NextContinuationToken>%d</NextContinuationToken>" % len(server.heads)
        peer.sendall(answer(200, b"<ListBucketResult>" + said + b"</ListBucketResult>"))

    server.script = page
    with pytest.raises(errors.WrongEndpoint, match="same names again and again"):
        list(store.list())
    assert len(server.heads) <= 1000


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"5\r\nhelloXX", b"7fffffff\r\n"])
def test_chunks_that_lie(server: HostileServer, store: BucketStore, chunks: bytes) -> None:
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
        answer(400, error_body("InvalidRequest")),
        answer(400),
    ],
)
def test_a_store_that_does_not_know_conditional_put(
    server: HostileServer, store: BucketStore, said: bytes
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
    server: HostileServer, store: BucketStore, status: int, code: str, kind: type[errors.StoreError]
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


REFUSALS = [
    (404, "NoSuchBucket", errors.NoSuchBucket, "create the bucket"),
    (401, "AccessDenied", errors.AccessDenied, "allow"),
    (403, "InvalidAccessKeyId", errors.AccessDenied, "access key"),
    (403, "SignatureDoesNotMatch", errors.AccessDenied, "secret"),
    (403, "RequestTimeTooSkewed", errors.ClockSkew, "clock"),
    (400, "ExpiredToken", errors.ExpiredToken, "token"),
    (400, "InvalidToken", errors.ExpiredToken, "token"),
    (403, "InvalidTokenId", errors.ExpiredToken, "token"),
    (400, "IncompleteBody", errors.Unavailable, "400"),
    (301, "PermanentRedirect", errors.WrongRegion, "region"),
    (400, "AuthorizationHeaderMalformed", errors.WrongRegion, "region"),
    (404, "", errors.WrongEndpoint, "endpoint"),
    (405, "MethodNotAllowed", errors.WrongEndpoint, "endpoint"),
    (503, "SlowDown", errors.RateLimited, "fewer"),
    (503, "", errors.RateLimited, "fewer"),
    (503, "ServiceUnavailable", errors.Unavailable, "503"),
    (429, "TooManyRequests", errors.RateLimited, "fewer"),
    (429, "", errors.RateLimited, "fewer"),
    (408, "", errors.Unavailable, "408"),
    (407, "", errors.ProxyRefused, "correct user and password"),
    (401, "", errors.AccessDenied, "allow"),
    (302, "", errors.WrongRegion, "elsewhere"),
    (500, "InternalError", errors.Unavailable, "500"),
    (502, "", errors.Unavailable, "502"),
    (507, "", errors.StoreFull, "full"),
    (400, "XMinioAdminBucketQuotaExceeded", errors.StoreFull, "full"),
    (403, "QuotaExceeded", errors.StoreFull, "full"),
    (409, "OperationAborted", errors.Unavailable, "409"),
    (409, "ConditionalRequestConflict", errors.Conflict, "another writer"),
    (403, "InvalidObjectState", errors.Archived, "archived"),
    (413, "EntityTooLarge", errors.ObjectTooLarge, "size"),
    (413, "", errors.ObjectTooLarge, "size"),
    (416, "InvalidRange", errors.LengthMismatch, "shorter"),
    (416, "", errors.LengthMismatch, "shorter"),
    (501, "", errors.UnknownRequest, "endpoint"),
    (501, "NotImplemented", errors.UnknownRequest, "does not accept"),
]


@pytest.mark.parametrize(("status", "code", "kind", "hint"), REFUSALS)
def test_every_refusal_names_its_setting(
    server: HostileServer,
    store: BucketStore,
    status: int,
    code: str,
    kind: type[errors.StoreError],
    hint: str,
) -> None:
    body = error_body(code) if code else b"<html>nothing here</html>"

    def refuse(peer: Peer, head: bytes) -> None:
        if head.startswith(b"PUT"):
            peer.read_body(head)
        peer.sendall(answer(status, body))

    server.script = refuse
    for call in (
        lambda: get(store),
        lambda: store.put("name", [memoryview(b"bytes")]),
        lambda: list(store.list()),
    ):
        with pytest.raises(kind, match=hint) as caught:
            call()
        assert type(caught.value) is kind
        assert not isinstance(caught.value, errors.Misconfigured) or caught.value.setting


def test_the_region_that_a_store_names_is_the_remedy(
    server: HostileServer, store: BucketStore
) -> None:
    body = error_body("AuthorizationHeaderMalformed").replace(
        b"</Err", b"<Region>eu-west-1</Region></Err"
    )
    server.script = said(answer(400, body))
    with pytest.raises(errors.WrongRegion, match="set region to eu-west-1"):
        get(store)


@pytest.mark.parametrize(
    ("code", "kind"), [("SlowDown", errors.RateLimited), ("InternalError", errors.Unavailable)]
)
def test_an_error_behind_a_status_of_success(
    server: HostileServer, store: BucketStore, code: str, kind: type[errors.StoreError]
) -> None:
    def pretend(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(200, error_body(code)))

    server.script = pretend
    with pytest.raises(kind):
        store.delete([f"n{index}" for index in range(9)])


NOT_S3 = [
    b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    b"\x15\x03\x01\x00\x02\x02\x50" * 4000,
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 9" + b"9" * 40 + b"\r\n\r\n",
]


@pytest.mark.parametrize("data", NOT_S3)
def test_what_is_no_s3_server_is_a_wrong_endpoint(
    server: HostileServer, store: BucketStore, data: bytes
) -> None:
    server.script = said(data)
    with pytest.raises(errors.WrongEndpoint):
        get(store)


def test_a_head_without_an_end_is_bounded(server: HostileServer, store: BucketStore) -> None:
    server.script = said(b"HTTP/1.1 200 OK\r\n" + b"x-padding: yes\r\n" * 10_000)
    with pytest.raises(errors.WrongEndpoint):
        get(store)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, errors.Unavailable), (403, errors.AccessDenied), (404, errors.WrongEndpoint)],
)
@pytest.mark.parametrize("how", ["with its length", "in chunks", "until the end"])
def test_of_an_error_that_comes_as_a_web_page_the_status_is_understood(
    server: HostileServer,
    store: BucketStore,
    status: int,
    kind: type[errors.StoreError],
    how: str,
) -> None:
    page = b"<p>please</p>" * 100_000
    head = b"HTTP/1.1 %d Said\r\ntransfer-encoding: chunked\r\n\r\n" % status
    in_chunks = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)
    until_the_end = b"HTTP/1.1 %d Said\r\n\r\n" % status + page
    said_of_it = {"in chunks": in_chunks, "until the end": until_the_end}

    def refuse(peer: Peer, head: bytes) -> None:
        peer.sendall(said_of_it.get(how, answer(status, page)))
        if how == "until the end":
            peer.cut()

    server.script = refuse
    for call in (lambda: get(store), lambda: list(store.list())):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind


def test_an_object_of_unknown_length_is_not_called_corrupt(
    server: HostileServer, store: BucketStore
) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    server.script = said(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    with pytest.raises(errors.WrongEndpoint, match=r"how long|check the endpoint"):
        get(store)


@pytest.mark.parametrize("field", [b"content-encoding: gzip", b"Content-Type: text/html; x=y"])
def test_what_a_proxy_made_of_an_object_is_not_called_corrupt(
    server: HostileServer, store: BucketStore, field: bytes
) -> None:
    """Packed, or a page of its own with status 200: the object itself may be quite right, and what
    is corrupt is deleted."""
    head = b"HTTP/1.1 200 OK\r\n%s\r\ncontent-length: 4\r\n\r\n" % field
    server.script = said(head + b"what")
    with pytest.raises(errors.WrongEndpoint, match="proxy"):
        store.get("name", memoryview(bytearray(len(BODY))))


@pytest.mark.parametrize("encoding", [b"identity", b"aws-chunked", b""])
def test_an_encoding_that_leaves_the_object_as_it_is(
    server: HostileServer, store: BucketStore, encoding: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %s\r\ncontent-length: %d\r\n\r\n"
    server.script = said(head % (encoding, len(BODY)) + BODY)
    assert get(store) is not None


def test_archived_blocks_are_given_up_and_keep_no_other_from_being_read(
    server: HostileServer, store: BucketStore
) -> None:
    """A rule of the bucket's owner has moved some to where they must be asked back for hours."""
    keys = make_keys(12)
    archived = {block_name(NAMESPACE.id, key).encode() for key in keys[:-1]}
    record = bytes(sealed(keys[-1]))

    def tell(peer: Peer, head: bytes) -> None:
        there = not any(name in head for name in archived)
        peer.sendall(
            answer(200, record) if there else answer(403, error_body("InvalidObjectState"))
        )

    server.script = tell
    handler = ObjectHandler(
        RetryingStore(store, RetryPolicy(), 10.0),
        NAMESPACE,
        Codec.RAW,
        threads=1,
        load_s=10,
        store_s=10,
    )
    found = handler.load(ObjectSpec([0] * len(keys)), keys, [blank() for _ in keys])
    assert found == [Outcome.CORRUPT] * 11 + [Outcome.OK]
