"""Reads objects over plain HTTP straight into the memory that they belong in.

obstore hands a body over as an object of its own, which costs a copy: most of a GET of 2 MiB and
more. So where nothing stands between, obstore only signs the url, and the kernel writes the body
into the caller's buffers (MSG_WAITALL): one system call and one release of the GIL for all of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvtier.backends.object.stores.clouds import Place
from kvtier.backends.object.stores.errors import (
    Response,
    TimedOut,
    Unavailable,
    WrongEndpoint,
    replacement,
)
from kvtier.backends.object.stores.store import Buffer, wrong_length

_HEAD_BYTES_MAX = _ERROR_BYTES_MAX = 64 << 10
_KEPT_S = 15.0  # a server that closes idle connections does so later
_WAIT_MIN_S = 0.001
_TIMEVAL = struct.Struct("@ll")


class Unreachable(Exception):
    """No connection can be made. obstore, asked for the same object, says why."""


class Reader:
    """GETs of one bucket, over connections that are kept. Thread-safe. `sign` makes the url of an
    object; `bounded` makes a call that may hang, like a name server's, until a time."""

    def __init__(
        self,
        place: Place,
        sign: Callable[[str, float], str],
        bounded: Callable[[Callable[[], socket.socket], float, str], socket.socket],
    ) -> None:
        self._where = place.where
        self._sign = sign
        self._bounded = bounded
        self._timeouts = place.settings.timeouts
        self._keep_max = place.settings.connections
        self._lock = threading.Lock()
        self._kept: list[tuple[_Connection, float]] = []

    def get(self, name: str, into: Buffer, offset: int | None, end: float) -> int | Response:
        """Read an object as `Store.get` does; the response if it is not a success. Raises
        Unreachable, too."""
        url = urlsplit(self._sign(name, end))
        fields = f"host: {url.netloc}\r\naccept-encoding: identity\r\n"
        if offset is not None:
            fields += f"range: bytes={offset}-{offset + len(into) - 1}\r\n"
        request = f"GET {url.path}?{url.query} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
        while True:
            connection, kept = self._take(url, end)
            keeps = False
            try:
                head = connection.ask(request, end)
                found = self._answer(connection, head, into, offset is not None, end)
                keeps = connection.whole and head.fields.get("connection", "").lower() != "close"
                return found
            except (ConnectionError, EOFError) as error:
                if kept and not connection.answered:
                    continue  # the server had closed it meanwhile
                cut = "cut the connection" if connection.answered else "went without an answer"
                raise Unavailable(f"{self._where} {cut}") from error
            except (TimeoutError, BlockingIOError) as error:
                self._drop_kept()  # the machine may have gone without a word
                raise TimedOut(f"{self._where} does not answer") from error
            except ValueError:
                problem = "does not answer as an object store would: check the endpoint"
                raise WrongEndpoint(f"{self._where} {problem}") from None
            finally:
                self._give_back(connection, keeps)

    def _answer(
        self, connection: _Connection, head: _Head, into: Buffer, ranged: bool, end: float
    ) -> int | Response:
        if head.status not in (200, 206):
            return Response(head.status, connection.read_some(head, end))
        if replaced_by := replacement(head.fields):
            problem = f"answers with {replaced_by}: look for a proxy between"
            raise WrongEndpoint(f"{self._where} {problem}")
        if ranged != ("content-range" in head.fields):  # some servers send it with a 200
            raise WrongEndpoint(f"{self._where} does not know range requests")
        length = head.length
        if length is None:
            raise WrongEndpoint(f"{self._where} does not state how long an object is")
        if length > len(into) or (ranged and length != len(into)):
            raise wrong_length("an object", length)
        connection.read_into(into[:length], head.begun, end)
        return length

    def _take(self, url: SplitResult, end: float) -> tuple[_Connection, bool]:
        """A connection, and whether it has been used before."""
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._kept:
                    break
                connection, since = self._kept.pop()
            if now - since < _KEPT_S and connection.idle():
                connection.answered = False
                return connection, True
            connection.close()
        wait_s = self._timeouts.connect_s
        try:
            sock = self._bounded(lambda: _connect(url, wait_s), end, f"a way to {self._where}")
        except (OSError, UnicodeError) as error:
            raise Unreachable from error
        return _Connection(sock, self._timeouts.idle_s), False

    def _give_back(self, connection: _Connection, keeps: bool) -> None:
        with self._lock:
            if keeps and len(self._kept) < self._keep_max:
                self._kept.append((connection, time.monotonic()))
                return
        connection.close()

    def _drop_kept(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for connection, _ in kept:
            connection.close()

    def close(self) -> None:
        self._keep_max = 0
        self._drop_kept()


class _Head(NamedTuple):
    status: int
    fields: dict[str, str]
    begun: bytes
    """What came of the body with the head."""

    @property
    def length(self) -> int | None:
        """The body's; None if it is not stated."""
        stated = self.fields.get("content-length")
        unknown = stated is None or "transfer-encoding" in self.fields
        return None if unknown else _figures(stated or "", 18)


class _Connection:
    """A connection, whose waits are bounded by the idle timeout and by the end of the call. Raises
    OSError, EOFError if the server went away, ValueError if it speaks no HTTP."""

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self._socket = sock
        self._idle_s = idle_s
        self._wait_s = 0.0
        self.answered = False  # whether a byte of the present response has come
        self.whole = False  # whether it was read to its end, and nothing came behind it
        sock.settimeout(None)

    def ask(self, request: bytes, end: float) -> _Head:
        """Send a request; the head of the response."""
        self._bound(end)
        self._socket.sendall(request)
        self.whole = False
        held = b""
        while (stop := held.find(b"\r\n\r\n")) < 0:
            held += self._receive(_HEAD_BYTES_MAX, end)
            self.answered = True
            if len(held) > _HEAD_BYTES_MAX or held[:7] != b"HTTP/1."[: len(held)]:
                raise ValueError
        first, *lines = held[:stop].decode("latin-1").split("\r\n")
        parted = (line.partition(":") for line in lines)
        fields = {field.strip().lower(): value.strip() for field, _, value in parted}
        status = _figures(first.partition(" ")[2][:3], 3)
        if status < 200:  # of a request that asks for nothing beforehand
            raise ValueError
        return _Head(status, fields, held[stop + 4 :])

    def read_into(self, into: Buffer, begun: bytes, end: float) -> None:
        """Read a body of the length of this buffer, which begins with these bytes."""
        taken = min(len(begun), len(into))
        into[:taken] = begun[:taken]
        left = into[taken:]
        while left:
            self._bound(end)
            count = self._socket.recv_into(left, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            left = left[count:]
        self.whole = len(begun) == taken

    def read_some(self, head: _Head, end: float) -> str:
        """The start of a body whose words matter little: of an error."""
        held, length = head.begun, head.length
        wanted = _ERROR_BYTES_MAX if length is None else min(_ERROR_BYTES_MAX, length)
        with contextlib.suppress(EOFError):
            while len(held) < wanted and not held.endswith(b"\r\n0\r\n\r\n"):
                held += self._receive(wanted - len(held), end)
        self.whole = len(held) == length
        return held.decode("latin-1")

    def _receive(self, most: int, end: float) -> bytes:
        self._bound(end)
        found = self._socket.recv(most)
        if not found:
            raise EOFError
        return found

    def _bound(self, end: float) -> None:
        """Let the kernel wait no longer than may be waited now."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        wait_s = self._idle_s if left > self._idle_s else max(left, _WAIT_MIN_S)
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            value = _TIMEVAL.pack(int(wait_s), int(wait_s % 1.0 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def idle(self) -> bool:
        """Whether nothing can be read, not even the end of the stream."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def close(self) -> None:
        self._socket.close()


def _connect(url: SplitResult, wait_s: float) -> socket.socket:
    sock = socket.create_connection((url.hostname or "", url.port or 80), wait_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _figures(text: str, most: int) -> int:
    """A number of so many figures at most; raises ValueError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= most):
        raise ValueError
    return int(text)
