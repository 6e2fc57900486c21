"""A server, or what stands in front of it, that answers something else: what it means, in words."""

from __future__ import annotations

import pytest
from support.object.object_servers import HostileServer, Peer, answer, error_body
from support.object.s3_client_helpers import BODY, get, said

from kvtier.backends.object import ObjectHandler, ObjectSpec
from kvtier.backends.object.client.status_errors import response_error
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.circuit_breaker import BreakerPolicy, BreakerStore
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.record.codec import Codec
from kvtier.testing.subject import NAMESPACE, blank, make_keys, sealed
from kvtier.types import Outcome

pytestmark = pytest.mark.s3

REFUSALS = [
    (404, "NoSuchBucket", {}, errors.NoSuchBucket, "create the bucket"),
    (401, "AccessDenied", {}, errors.AccessDenied, "allow"),
    (403, "InvalidAccessKeyId", {}, errors.AccessDenied, "access key"),
    (403, "SignatureDoesNotMatch", {}, errors.AccessDenied, "secret"),
    (403, "RequestTimeTooSkewed", {}, errors.ClockSkew, "clock"),
    (400, "ExpiredToken", {}, errors.ExpiredToken, "token"),
    (400, "InvalidToken", {}, errors.ExpiredToken, "token"),
    (403, "InvalidTokenId", {}, errors.ExpiredToken, "token"),
    (400, "IncompleteBody", {}, errors.Unavailable, "400"),
    (
        301,
        "PermanentRedirect",
        {"x_amz_bucket_region": "eu-west-1"},
        errors.WrongRegion,
        "eu-west-1",
    ),
    (307, "TemporaryRedirect", {"location": "http://127.0.0.1:1/"}, errors.WrongRegion, "region"),
    (400, "AuthorizationHeaderMalformed", {}, errors.WrongRegion, "region"),
    (404, "", {}, errors.WrongEndpoint, "endpoint"),
    (405, "MethodNotAllowed", {}, errors.WrongEndpoint, "endpoint"),
    (503, "SlowDown", {"retry_after": "7"}, errors.RateLimited, "fewer"),
    (503, "", {}, errors.RateLimited, "fewer"),
    (503, "ServiceUnavailable", {}, errors.Unavailable, "503"),
    (429, "TooManyRequests", {}, errors.RateLimited, "fewer"),
    (429, "", {}, errors.RateLimited, "fewer"),
    (408, "", {}, errors.Unavailable, "408"),
    (407, "", {}, errors.ProxyRefused, "correct user and password"),
    (401, "", {}, errors.AccessDenied, "allow"),
    (302, "", {}, errors.WrongRegion, "elsewhere"),
    (301, "", {"x_amz_bucket_region": "<here>"}, errors.WrongRegion, "correct the region"),
    (500, "InternalError", {}, errors.Unavailable, "500"),
    (502, "", {}, errors.Unavailable, "502"),
    (507, "", {}, errors.StoreFull, "full"),
    (400, "XMinioAdminBucketQuotaExceeded", {}, errors.StoreFull, "full"),
    (403, "QuotaExceeded", {}, errors.StoreFull, "full"),
    (409, "OperationAborted", {}, errors.Unavailable, "409"),
    (409, "ConditionalRequestConflict", {}, errors.Conflict, "another writer"),
    (403, "InvalidObjectState", {}, errors.Archived, "archived"),
    (413, "EntityTooLarge", {}, errors.ObjectTooLarge, "size"),
    (413, "", {}, errors.ObjectTooLarge, "size"),
    (416, "InvalidRange", {}, errors.LengthMismatch, "shorter"),
    (416, "", {}, errors.LengthMismatch, "shorter"),
    (501, "", {}, errors.UnknownRequest, "endpoint"),
    (501, "NotImplemented", {}, errors.UnknownRequest, "does not accept"),
]


@pytest.mark.parametrize(("status", "code", "fields", "kind", "hint"), REFUSALS)
def test_every_refusal_names_its_setting(
    server: HostileServer,
    store: S3Store,
    status: int,
    code: str,
    fields: dict[str, str],
    kind: type[errors.StoreError],
    hint: str,
) -> None:
    body = error_body(code) if code else b"<html>nothing here</html>"

    def refuse(peer: Peer, head: bytes) -> None:
        if head.startswith(b"PUT"):
            peer.read_body(head)
        peer.sendall(answer(status, body, **fields))

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
    if "retry_after" in fields:
        assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [("7", 7.0), ("9999", 60.0), ("9" * 400, 60.0), ("-1", 0.0), ("soon", 0.0), ("\u00b2", 0.0)],
)
@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable"])
def test_how_long_a_server_may_ask_to_be_left_alone(code: str, stated: str, seconds: float) -> None:
    error = response_error(503, code, {"retry-after": stated}, "there")
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("code", "kind"), [("SlowDown", errors.RateLimited), ("InternalError", errors.Unavailable)]
)
def test_an_error_behind_a_status_of_success(
    server: HostileServer, store: S3Store, code: str, kind: type[errors.StoreError]
) -> None:
    def pretend(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(200, error_body(code)))

    server.script = pretend
    for count in (1, 9):
        with pytest.raises(kind):
            store.delete([f"n{index}" for index in range(count)])
    for if_absent in (False, True):
        with pytest.raises(kind):
            store.put("name", [memoryview(b"bytes")], if_absent=if_absent)


NOT_S3 = [
    b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    b"\x15\x03\x01\x00\x02\x02\x50" * 4000,
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 9" + b"9" * 40 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 10,
]


@pytest.mark.parametrize("data", NOT_S3)
def test_what_is_no_s3_server_is_a_wrong_endpoint(
    server: HostileServer, store: S3Store, data: bytes
) -> None:
    server.script = said(data)
    with pytest.raises(errors.WrongEndpoint):
        get(store)


def test_a_head_without_an_end_is_bounded(server: HostileServer, store: S3Store) -> None:
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
    store: S3Store,
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
    server: HostileServer, store: S3Store
) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    server.script = said(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    with pytest.raises(errors.WrongEndpoint, match="how long"):
        get(store)


@pytest.mark.parametrize("field", [b"content-encoding: gzip", b"Content-Type: text/html; x=y"])
def test_what_a_proxy_made_of_an_object_is_not_called_corrupt(
    server: HostileServer, store: S3Store, field: bytes
) -> None:
    """Packed, or a page of its own with status 200: the object itself may be quite right, and what
    is corrupt is deleted."""
    head = b"HTTP/1.1 200 OK\r\n%s\r\ncontent-length: 4\r\n\r\n" % field
    server.script = said(head + b"what")
    with pytest.raises(errors.WrongEndpoint, match="proxy"):
        store.get("name", [memoryview(bytearray(len(BODY)))])
    assert b"accept-encoding: identity" in server.heads[0].lower()


@pytest.mark.parametrize("encoding", [b"identity", b"aws-chunked", b""])
def test_an_encoding_that_leaves_the_object_as_it_is(
    server: HostileServer, store: S3Store, encoding: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %s\r\ncontent-length: %d\r\n\r\n"
    server.script = said(head % (encoding, len(BODY)) + BODY)
    assert get(store) is not None


def test_archived_blocks_are_given_up_and_keep_no_other_from_being_read(
    server: HostileServer, store: S3Store
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
        BreakerStore(store, BreakerPolicy()), NAMESPACE, Codec.RAW, threads=1, load_s=10, store_s=10
    )
    found = handler.load(ObjectSpec([0] * len(keys)), keys, [blank() for _ in keys])
    assert found == [Outcome.CORRUPT] * 11 + [Outcome.OK]
