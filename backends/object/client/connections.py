"""HTTP/1.1 over a pool of kept connections, with bodies read straight into the caller's memory.

Every wait is bounded twice: by the idle timeout (no byte at all for that long) and by the total
deadline of the call (a trickle of bytes does not extend it). What a server says is hostile: heads
and bodies are bounded, and a body that ends early is an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from kvtier.backends.object.client.sockets import (
    Address,
    Timeouts,
    Trust,
    Tunnel,
    Wire,
    connect,
    explain,
)
from kvtier.backends.object.stores.errors import (
    ObjectTooLarge,
    TimedOut,
    Unavailable,
    WrongEndpoint,
)
from kvtier.backends.object.stores.store import Buffer
from kvtier.core.records.record import behind

_BUFFER_BYTES = 16 << 10
_LINE_BYTES_MAX = 1 << 10
_KEEP_IDLE_S = 15.0
_INTERIM_ANSWERS_MAX = 4


class _Stale(Exception):
    """A kept connection was closed by the server before it answered: use a new one."""


class Response:
    """One answer; its body is read once, by one of the two methods."""

    def __init__(
        self, connection: _Connection, status: int, headers: dict[str, str], deadline: float
    ) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._deadline = deadline
        self._unread = True

    def no_body(self) -> None:
        """This answer has no body by the rules of HTTP, whatever its length field says."""
        self._unread = False

    @property
    def length(self) -> int | None:
        """The size of the body, where the server states it."""
        return _length(self.headers)

    @property
    def reusable(self) -> bool:
        """Whether the connection stands at the beginning of a next answer."""
        return not self._unread and self.headers.get("connection", "").lower() != "close"

    def read_into(self, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, which together must be exactly as long as the body."""
        wanted = sum(view.nbytes for view in buffers)
        if self.length != wanted:
            raise Unavailable(f"a body of {self.length} bytes where {wanted} were expected")
        with self._connection.explained():
            for view in buffers:
                self._connection.fill(view.cast("B"), self._deadline)
        self._unread = False

    def read(self, bytes_max: int) -> bytes:
        """The whole body, if it has no more than `bytes_max` bytes."""
        if not self._unread:
            return b""
        with self._connection.explained():
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                data = self._read_chunks(bytes_max)
            elif (length := self.length) is not None:
                data = self._read_exactly(length, bytes_max)
            else:
                data = self._connection.drain(bytes_max, self._deadline)
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
            digits = self._connection.line(self._deadline).partition(b";")[0].strip()
            if not digits or len(digits) > 8 or not digits.isalnum():
                raise Unavailable("a chunk of a body without a length")
            try:
                size = int(digits, 16)
            except ValueError as error:
                raise Unavailable("a chunk of a body without a length") from error
            data += self._read_exactly(size, bytes_max - len(data))
            if self._connection.line(self._deadline) and size:
                raise Unavailable("a chunk of a body is longer than stated")
            if size == 0:
                return data


class _Connection:
    """One socket, and the bytes read from it beyond what was asked for."""

    def __init__(self, wire: Wire, address: Address) -> None:
        self._wire = wire
        self._address = address
        self.idle_s = 0.0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.used = False
        self.idle_since = 0.0

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return explain(self._address)

    def ask(self, method: str, head: bytes, body: Sequence[Buffer], deadline: float) -> Response:
        """Send one request and read the head of its answer."""
        try:
            self._send([memoryview(head), *body], deadline)
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses a long body answers, then closes: its answer says why
            with contextlib.suppress(OSError, _Stale, Unavailable):
                return self._answer(method, deadline)
            raise
        return self._answer(method, deadline)

    def _send(self, buffers: list[Buffer], deadline: float) -> None:
        rest = behind(buffers, 0)
        while rest:
            rest = behind(rest, self._wire.send(rest, self._wait_s(deadline)))

    def _answer(self, method: str, deadline: float) -> Response:
        for _ in range(_INTERIM_ANSWERS_MAX):
            status, headers = parse_head(self._head(deadline))
            if status >= 200:
                response = Response(self, status, headers, deadline)
                if method == "HEAD" or status in (204, 304) or response.length == 0:
                    response.no_body()
                self.used = True
                return response
        raise WrongEndpoint(f"{self._address} sends only interim answers: not an object store")

    def _head(self, deadline: float) -> bytes:
        while True:
            at = self._buffer.find(b"\r\n\r\n", self._start, self._end)
            if at >= 0:
                head = bytes(self._view[self._start : at])
                self._start = at + 4
                return head
            if self._end == len(self._buffer):
                if self._start == 0:
                    raise WrongEndpoint(f"{self._address} does not answer in HTTP: endpoint?")
                self._compact()
            fresh = self._start == self._end
            if not self._more(deadline):
                if fresh and self.used:
                    raise _Stale
                raise Unavailable(f"{self._address} closed the connection without an answer")

    def _compact(self) -> None:
        held = self._end - self._start
        self._view[:held] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, held

    def _more(self, deadline: float) -> int:
        """Read what has come into the free end of the buffer; 0 when the server has closed."""
        if self._start == self._end:
            self._start = self._end = 0
        free = self._view[self._end :]
        count = self._wire.receive(free, self._wait_s(deadline), everything=False)
        self._end += count
        return count

    def fill(self, view: Buffer, deadline: float) -> None:
        """Exactly `len(view)` bytes, first those already here, then straight from the socket."""
        done = min(len(view), self._end - self._start)
        view[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(view):
            count = self._wire.receive(view[done:], self._wait_s(deadline), everything=True)
            if count == 0:
                raise Unavailable(
                    f"{self._address} cut the connection after {done} of {len(view)} bytes"
                )
            done += count

    def drain(self, bytes_max: int, deadline: float) -> bytearray:
        """Everything until the server closes."""
        data = bytearray()
        while True:
            data += self._view[self._start : self._end]
            self._start = self._end
            if len(data) > bytes_max:
                raise ObjectTooLarge(f"an answer of more than the {bytes_max} bytes allowed")
            if not self._more(deadline):
                return data

    def line(self, deadline: float) -> bytes:
        """One short line without its end."""
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _LINE_BYTES_MAX:
                raise Unavailable("a line of an answer is too long")
            if self._end == len(self._buffer):
                self._compact()
            if not self._more(deadline):
                raise Unavailable(f"{self._address} cut the connection inside a body")
        found = bytes(self._view[self._start : at])
        self._start = at + 2
        return found

    def _wait_s(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimedOut(f"{self._address} was not done in time")
        return min(left, self.idle_s)

    def quiet(self) -> bool:
        """Whether the server has neither closed nor said anything since the last answer."""
        return self._start == self._end and self._wire.quiet()

    def close(self) -> None:
        self._wire.close()


class Pool:
    """Kept connections to one address. Safe from any thread; holds at most `keep_max` idle."""

    def __init__(
        self,
        address: Address,
        timeouts: Timeouts,
        *,
        tls: Trust | None = None,
        keep_max: int = 64,
        proxy: Tunnel | None = None,
    ) -> None:
        self.address = address
        self._proxy = proxy
        self._timeouts = timeouts
        self._tls = tls
        self._keep_max = keep_max
        self._idle: deque[_Connection] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def exchange(
        self, method: str, head: bytes, body: Sequence[Buffer], deadline: float
    ) -> Iterator[Response]:
        """One request and its answer; a connection that is in doubt afterwards is closed."""
        connection, response = self._ask(method, head, body, deadline)
        try:
            yield response
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)

    def _ask(
        self, method: str, head: bytes, body: Sequence[Buffer], deadline: float
    ) -> tuple[_Connection, Response]:
        kept = self._take()
        if kept is not None:
            left_s = deadline - time.monotonic()
            try:
                with explain(self.address):
                    return kept, self._try(kept, method, head, body, deadline)
            except _Stale:
                pass  # an ordinary race with a server that closes idle connections
            except TimedOut:
                if left_s > kept.idle_s:  # else it may be for want of time
                    self._forsake()
                raise
        first = self._proxy.address if self._proxy else self.address
        with explain(first, proxy=self._proxy is not None):
            wire = connect(self.address, self._timeouts, self._tls, deadline, self._proxy)
        with explain(self.address):
            fresh = _Connection(wire, self.address)
            return fresh, self._try(fresh, method, head, body, deadline)

    def _try(
        self,
        connection: _Connection,
        method: str,
        head: bytes,
        body: Sequence[Buffer],
        deadline: float,
    ) -> Response:
        uploads = method == "PUT"
        connection.idle_s = self._timeouts.upload_s if uploads else self._timeouts.idle_s
        try:
            return connection.ask(method, head, body, deadline)
        except (BrokenPipeError, ConnectionResetError) as error:
            connection.close()
            if connection.used:
                raise _Stale from error
            raise
        except BaseException:
            connection.close()
            raise

    def _take(self) -> _Connection | None:
        horizon = time.monotonic() - _KEEP_IDLE_S
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.idle_since > horizon and connection.quiet():
                return connection
            connection.close()

    def _keep(self, connection: _Connection, response: Response) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            if response.reusable and not self._closed and len(self._idle) < self._keep_max:
                self._idle.append(connection)
                return
        connection.close()

    def _forsake(self) -> None:
        """Keep none of those that are idle: who was behind one of them has gone without a word, and
        the next try, which may reach another machine, would wait on them one after the other."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self._forsake()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and lower-case fields of an answer; WrongEndpoint if it is no HTTP/1 answer."""
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


def _length(headers: dict[str, str]) -> int | None:
    stated = headers.get("content-length")
    if stated is None or "transfer-encoding" in headers:
        return None
    if not stated.isdecimal() or len(stated) > 15:
        raise WrongEndpoint("the endpoint states a length that is no number: is it an S3 endpoint?")
    return int(stated)
