"""Parsers of what comes over a socket: a store's answers, and the frames of a mover."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from campaign.fuzz.harness import Target
from kvtier.backends.object.client.http.connection import HTTPConnection, StaleConnection
from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.client.http.sockets import Transport
from kvtier.backends.object.client.listing import Page, name_from_key
from kvtier.backends.object.client.status_errors import error_code, response_error
from kvtier.backends.object.client.xml_rows import RowParser
from kvtier.backends.object.stores.errors import StoreError
from kvtier.errors import MoverError
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.move import protocol
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome, SlotSpec

_BODY_MAX = 1 << 16
_XML = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>true</IsTruncated>
<NextContinuationToken>abc</NextContinuationToken><Contents><Key>kv/claims/a-b</Key>
<LastModified>2026-11-27T00:00:00.000Z</LastModified><Size>12288</Size></Contents>
</ListBucketResult>"""
_ERROR = b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"
_HEADS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: x\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Slow Down\r\nRetry-After: 3\r\n\r\n" + _ERROR,
    b"HTTP/1.0 404 Not Found\r\nConnection: close\r\n\r\n",
)
_WORDS = (
    *(
        b"Content-Length: ",
        b"Transfer-Encoding: chunked",
        b"HTTP/1.1 ",
        b"\r\n\r\n",
        b"Retry-After: ",
    ),
    *(
        b"<Contents>",
        b"</Contents>",
        b"<Size>",
        b"<!DOCTYPE a [",
        b"<!ENTITY a 'b'>",
        b"&a;",
        b"%2e%2e/",
    ),
)


class _Canned(Transport):
    """What a server sends, in pieces, and then the end."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def send(self, buffers: Sequence[memoryview], wait_s: float) -> int:
        return sum(view.nbytes for view in buffers)

    def receive(self, view: memoryview, wait_s: float, *, everything: bool) -> int:
        count = min(len(view), len(self._data), 1 << 20 if everything else 700)
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def close(self) -> None:
        pass


def targets(folder: Path) -> list[Target]:
    """All of them."""
    return [
        *(_http(), _listing(), _deletes()),
        _frames("mover's answers", _answers()),
        _frames("mover's requests", _requests()),
    ]


def _http() -> Target:
    def parse(data: bytes) -> None:
        connection = HTTPConnection(_Canned(data), Address("store", 80, False))
        connection.idle_timeout_s = 5.0
        response = connection.request("GET", b"GET / HTTP/1.1\r\n\r\n", [], time.monotonic() + 9)
        body = response.read(_BODY_MAX)
        assert len(body) <= _BODY_MAX
        if response.status >= 300:
            error = response_error(response.status, error_code(body), response.headers, "store")
            assert isinstance(error, StoreError)
            assert error.retry_after_s < 1e6

    typed = (StoreError, StaleConnection)
    return Target(name="HTTP answer", corpus=_HEADS, parse=parse, typed=typed, words=_WORDS)


def _listing() -> Target:
    def parse(data: bytes) -> None:
        for found in Page(data):
            name_from_key("kv/", found.key)

    return Target(name="listing", corpus=[_XML], parse=parse, typed=(StoreError,), words=_WORDS)


def _deletes() -> Target:
    corpus = [
        b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code></Error></DeleteResult>",
        _ERROR,
    ]

    def parse(data: bytes) -> None:
        parser = RowParser("DeleteResult", "Error", lambda row: (row.get("Key"), row.get("Code")))
        list(parser.rows(data))

    return Target(name="deletes", corpus=corpus, parse=parse, typed=(StoreError,), words=_WORDS)


def _answers() -> tuple[list[bytes], object]:
    outcomes = [Outcome.OK, Outcome.GONE]
    result = TransferResult(id=7, outcomes=outcomes, bytes_moved=9, seconds=0.1, busy_seconds=0.1)
    ended = protocol.TransferEnded([result])
    ready = protocol.Ready([True, False], {kind: [1.0, 2.0] for kind in TransferKind})
    messages = (ended, ready, protocol.Failed("no disk"))
    return [bytes(protocol.frame(each)) for each in messages], protocol.answers


def _requests() -> tuple[list[bytes], object]:
    keys = make_keys(3)
    transfer = Transfer(
        id=7,
        kind=TransferKind.LOAD,
        source=1,
        target=0,
        keys=keys,
        source_spec=SlotSpec([4, 5, 6]),
        target_spec=SlotSpec([1, 2, 3]),
        deadline=12.5,
    )
    opening = protocol.TierOpening("cpu", b'{"kind": "cpu", "path": "/dev/shm"}')
    hello = protocol.Hello(TierContext(NAMESPACE, "engine"), [opening], 1 << 20, 20)
    messages = (protocol.Cancel([1, 2, 3]), protocol.Submit.of(transfer), hello)
    return [bytes(protocol.frame(each)) for each in messages], protocol.requests


def _frames(name: str, what: tuple[list[bytes], object]) -> Target:
    corpus, decoder = what

    def parse(data: bytes) -> None:
        inbox = protocol.Inbox()
        for start in range(0, len(data), 1000):
            list(inbox.feed(data[start : start + 1000], decoder))  # type: ignore[arg-type]

    return Target(name=name, corpus=corpus, parse=parse, typed=(MoverError,))
