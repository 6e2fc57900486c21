"""Parsers of what comes over a socket: a store's answers, and the frames of a mover."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from campaign.fuzz.harness import Target
from kvtier.backends.object.stores.clouds import BucketSettings, Place
from kvtier.backends.object.stores.errors import Response, StoreError, response_error
from kvtier.backends.object.stores.reader import Reader
from kvtier.errors import MoverError
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.move import protocol
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome, SlotSpec

_BODY_MAX = 1 << 16
_SENT_MAX = 100_000
"""Fewer bytes than a socket holds."""
_PLACE = Place(BucketSettings(bucket="bucket"), "http://store", {}, None, None)
_ERROR = b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"
_HEADS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: x\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Slow Down\r\nRetry-After: 3\r\n\r\n" + _ERROR,
    b"HTTP/1.0 404 Not Found\r\nConnection: close\r\n\r\n",
)
_WORDS = (
    *(b"Content-Length: ", b"Transfer-Encoding: chunked", b"HTTP/1.1 "),
    *(b"\r\n\r\n", b"Retry-After: "),
)


def targets(folder: Path) -> list[Target]:
    """All of them."""
    return [
        _http(),
        _frames("mover's answers", _answers()),
        _frames("mover's requests", _requests()),
    ]


def _http() -> Target:
    """What a server sends to who reads an object, and then the end."""
    into = memoryview(bytearray(64))

    def parse(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[:_SENT_MAX])
            theirs.shutdown(socket.SHUT_WR)
            reader = Reader(_PLACE, lambda name, end: "http://store/name?x=y", lambda *_: ours)
            found = reader.get("name", into, None, time.monotonic() + 9)
            reader.close()
        if isinstance(found, Response):
            assert len(found.body) <= _BODY_MAX
            assert isinstance(response_error(found, "store"), StoreError)

    return Target(name="HTTP answer", corpus=_HEADS, parse=parse, typed=(StoreError,), words=_WORDS)


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
