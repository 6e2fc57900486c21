"""One HTTP/1.1 connection, whose response bodies are read straight into the caller's memory.

Every wait is bounded twice: by the idle timeout (no byte at all for that long) and by the deadline
of the call, which a trickle of bytes does not extend. Nothing that a server sends is trusted: heads
and bodies have limits, and a body that ends early is an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.client.http.sockets import Transport, map_socket_errors
from kvtier.backends.object.stores.errors import (
    ObjectTooLarge,
    TimedOut,
    Unavailable,
    WrongEndpoint,
)
from kvtier.backends.object.stores.store import Buffer
from kvtier.record.record import behind

_BUFFER_BYTES = 16 << 10
_LINE_BYTES_MAX = 1 << 10
_INTERIM_RESPONSES_MAX = 4


class StaleConnection(Exception):
    """The server had closed a kept connection before it answered: use a new one."""


class Response:
    """One response. Its body is read once, by `read_into` or by `read`."""

    def __init__(
        self, connection: HTTPConnection, status: int, headers: dict[str, str], deadline: float
    ) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._deadline = deadline
        self._unread = True

    def mark_empty(self) -> None:
        """By the rules of HTTP this response has no body, whatever its content-length says."""
        self._unread = False

    @property
    def length(self) -> int | None:
        """The size of the body, if the server states it."""
        return _content_length(self.headers)

    @property
    def reusable(self) -> bool:
        """Whether the next response can be read from the same connection."""
        return not self._unread and self.headers.get("connection", "").lower() != "close"

    def read_into(self, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, which together must be exactly as long as the body."""
        wanted = sum(view.nbytes for view in buffers)
        if self.length != wanted:
            raise Unavailable(f"a body of {self.length} bytes where {wanted} were expected")
        with map_socket_errors(self._connection.address):
            for view in buffers:
                self._connection.fill(view.cast("B"), self._deadline)
        self._unread = False

    def read(self, bytes_max: int) -> bytes:
        """The whole body; raises ObjectTooLarge if it has more than `bytes_max` bytes."""
        if not self._unread:
            return b""
        with map_socket_errors(self._connection.address):
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                data = self._read_chunks(bytes_max)
            elif (length := self.length) is not None:
                data = self._read_exactly(length, bytes_max)
            else:
                data = self._connection.read_to_end(bytes_max, self._deadline)
                self.headers["connection"] = "close"
        self._unread = False
        return bytes(data)

    def _read_exactly(self, length: int, bytes_max: int) -> bytearray:
        if length > bytes_max:
            raise ObjectTooLarge(f"an answer of {length} bytes where {bytes_max} are allowed")
        data = bytearray(length)
        self._connection.fill(memoryview(data), self._deadline)
        return data

    def _read_chunks(self, bytes_max: int) -> bytearray:
        data = bytearray()
        while True:
            digits = self._connection.read_line(self._deadline).partition(b";")[0].strip()
            if not digits or len(digits) > 8 or not digits.isalnum():
                raise Unavailable("a chunk of a body without a length")
            try:
                size = int(digits, 16)
            except ValueError as error:
                raise Unavailable("a chunk of a body without a length") from error
            data += self._read_exactly(size, bytes_max - len(data))
            if self._connection.read_line(self._deadline) and size:
                raise Unavailable("a chunk of a body is longer than stated")
            if size == 0:
                return data


class HTTPConnection:
    """One transport, and the bytes that were received beyond what was asked for."""

    def __init__(self, transport: Transport, address: Address) -> None:
        self.address = address
        self.idle_timeout_s = 0.0
        self.used = False
        """Whether it has had a response: the server may close it at any time since."""
        self.idle_since = 0.0
        self._transport = transport
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def request(
        self, method: str, head: bytes, body: Sequence[Buffer], deadline: float
    ) -> Response:
        """Send one request and read the head of its response."""
        try:
            self._send([memoryview(head), *body], deadline)
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses a long body answers and closes: its answer says why
            with contextlib.suppress(OSError, StaleConnection, Unavailable):
                return self._response(method, deadline)
            raise
        return self._response(method, deadline)

    def _send(self, buffers: list[Buffer], deadline: float) -> None:
        unsent = behind(buffers, 0)
        while unsent:
            unsent = behind(unsent, self._transport.send(unsent, self._wait_s(deadline)))

    def _response(self, method: str, deadline: float) -> Response:
        for _ in range(_INTERIM_RESPONSES_MAX):
            status, headers = parse_head(self._read_head(deadline))
            if status >= 200:
                response = Response(self, status, headers, deadline)
                if method == "HEAD" or status in (204, 304) or response.length == 0:
                    response.mark_empty()
                self.used = True
                return response
        raise WrongEndpoint(f"{self.address} sends only interim answers: not an object store")

    def _read_head(self, deadline: float) -> bytes:
        while (at := self._buffer.find(b"\r\n\r\n", self._start, self._end)) < 0:
            if self._end - self._start == len(self._buffer):
                raise WrongEndpoint(f"{self.address} does not answer in HTTP: endpoint?")
            fresh = self._start == self._end
            if not self._receive(deadline):
                if fresh and self.used:
                    raise StaleConnection
                raise Unavailable(f"{self.address} closed the connection without an answer")
        head = bytes(self._view[self._start : at])
        self._start = at + 4
        return head

    def _receive(self, deadline: float) -> int:
        """Receive into the free end of the buffer; how much, 0 if the server has closed."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            held = self._end - self._start
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        free = self._view[self._end :]
        count = self._transport.receive(free, self._wait_s(deadline), everything=False)
        self._end += count
        return count

    def fill(self, view: Buffer, deadline: float) -> None:
        """Read exactly `len(view)` bytes, those that are here first, then from the socket."""
        done = min(len(view), self._end - self._start)
        view[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(view):
            count = self._transport.receive(view[done:], self._wait_s(deadline), everything=True)
            if count == 0:
                raise Unavailable(
                    f"{self.address} cut the connection after {done} of {len(view)} bytes"
                )
            done += count

    def read_to_end(self, bytes_max: int, deadline: float) -> bytearray:
        """Read until the server closes."""
        data = bytearray()
        while True:
            data += self._view[self._start : self._end]
            self._start = self._end
            if len(data) > bytes_max:
                raise ObjectTooLarge(f"an answer of more than the {bytes_max} bytes allowed")
            if not self._receive(deadline):
                return data

    def read_line(self, deadline: float) -> bytes:
        """Read one short line; it is returned without its end."""
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _LINE_BYTES_MAX:
                raise Unavailable("a line of an answer is too long")
            if not self._receive(deadline):
                raise Unavailable(f"{self.address} cut the connection inside a body")
        found = bytes(self._view[self._start : at])
        self._start = at + 2
        return found

    def _wait_s(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimedOut(f"{self.address} was not done in time")
        return min(left, self.idle_timeout_s)

    def idle(self) -> bool:
        """Whether the server has neither closed nor sent anything since the last response."""
        return self._start == self._end and self._transport.idle()

    def close(self) -> None:
        self._transport.close()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and header fields (names in lower case) of a response; raises WrongEndpoint."""
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise WrongEndpoint("the endpoint does not answer in HTTP/1: is it an S3 endpoint?")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(rest[:3]), headers


def _content_length(headers: dict[str, str]) -> int | None:
    stated = headers.get("content-length")
    if stated is None or "transfer-encoding" in headers:
        return None
    if not stated.isdecimal() or len(stated) > 15:
        raise WrongEndpoint("the endpoint states a length that is no number: is it an S3 endpoint?")
    return int(stated)
