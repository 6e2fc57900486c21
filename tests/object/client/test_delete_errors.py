"""What stores answer to deletes: which objects are gone, which are kept, and why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.object.object_servers import (
    HostileServer,
    Opener,
    Peer,
    answer,
    error_body,
)

from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.open_store import open_store
from kvtier.backends.object.stores.retry import RetryPolicy

pytestmark = pytest.mark.s3


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


REFUSED_DELETE = "<DeleteResult><Error>{}<Code>AccessDenied</Code></Error></DeleteResult>"


def test_a_bulk_delete_says_what_was_not_deleted(scripted: HostileServer, opened: Opener) -> None:
    store = opened(endpoint=scripted.endpoint)
    names = [f"n{index}" for index in range(9)]

    def reply(body: str) -> None:
        def serve(peer: Peer, head: bytes) -> None:
            peer.read_body(head)
            peer.sendall(answer(200, body.encode()))

        scripted.script = serve

    reply(REFUSED_DELETE.format("<Key>n3</Key>"))
    assert [*store.delete(names)] == ["n3"]
    gone = "<DeleteResult><Error><Key>n3</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    reply(gone)
    assert not store.delete(names), "some servers call that an error"
    for unclear in ("", "<Key>other</Key>"):
        reply(REFUSED_DELETE.format(unclear))
        with pytest.raises(errors.AccessDenied):
            store.delete(names)
    scripted.heads.clear()
    reply('<!DOCTYPE x [<!ENTITY a "aaaa">]><DeleteResult>&a;</DeleteResult>')
    assert not store.delete(names), "what cannot be read says nothing: each was deleted singly"
    assert [head[:6] for head in scripted.heads] == [b"POST /", *[b"DELETE"] * 9]


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable"])
def test_objects_that_a_busy_store_did_not_come_to_are_deleted_by_another_try(
    scripted: HostileServer, code: str
) -> None:
    """Said of one of them, it is no more a refusal of that one than of all."""
    busy = REFUSED_DELETE.format("<Key>n3</Key>").replace("AccessDenied", code)
    answers = [busy, "<DeleteResult/>"]

    def serve(peer: Peer, head: bytes) -> None:
        peer.read_body(head)
        peer.sendall(answer(200, answers.pop(0).encode()))

    scripted.script = serve
    store = open_store(
        "s3://bucket",
        S3Settings(endpoint=scripted.endpoint, timeouts=Timeouts(5.0, 30.0, 60.0)),
        retry=RetryPolicy(attempts=3, base_s=0.0),
    )
    assert store.delete([f"n{index}" for index in range(9)]) == {}
    assert not answers
    store.close()
