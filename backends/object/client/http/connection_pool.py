"""Kept connections to one address: a request that finds one saves the time to connect."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from kvtier.backends.object.client.http.connection import HTTPConnection, Response, StaleConnection
from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.client.http.proxy import Proxy
from kvtier.backends.object.client.http.sockets import Timeouts, connect, map_socket_errors
from kvtier.backends.object.client.http.tls import TrustStore
from kvtier.backends.object.stores.errors import TimedOut
from kvtier.backends.object.stores.store import Buffer

_KEEP_IDLE_S = 15.0


class ConnectionPool:
    """Connections to one address. Safe from any thread; keeps at most `keep_max` idle ones."""

    def __init__(
        self,
        address: Address,
        timeouts: Timeouts,
        *,
        trust: TrustStore | None = None,
        keep_max: int = 64,
        proxy: Proxy | None = None,
    ) -> None:
        self.address = address
        self._proxy = proxy
        self._timeouts = timeouts
        self._trust = trust
        self._keep_max = keep_max
        self._idle: deque[HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def exchange(
        self, method: str, head: bytes, body: Sequence[Buffer], deadline: float
    ) -> Iterator[Response]:
        """One request and its response. If the caller raises, the connection is closed, because
        nobody knows what can still be read from it."""
        connection, response = self._request(method, head, body, deadline)
        try:
            yield response
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)

    def _request(
        self, method: str, head: bytes, body: Sequence[Buffer], deadline: float
    ) -> tuple[HTTPConnection, Response]:
        kept = self._take()
        if kept is not None:
            left_s = deadline - time.monotonic()
            try:
                with map_socket_errors(self.address):
                    return kept, self._send(kept, method, head, body, deadline)
            except StaleConnection:
                pass  # an ordinary race with a server that closes idle connections
            except TimedOut:
                if left_s > kept.idle_timeout_s:  # else the call may just have had too little time
                    self._close_idle()
                raise
        first = self._proxy.address if self._proxy else self.address
        with map_socket_errors(first, proxy=self._proxy is not None):
            transport = connect(self.address, self._timeouts, self._trust, deadline, self._proxy)
        with map_socket_errors(self.address):
            fresh = HTTPConnection(transport, self.address)
            return fresh, self._send(fresh, method, head, body, deadline)

    def _send(
        self,
        connection: HTTPConnection,
        method: str,
        head: bytes,
        body: Sequence[Buffer],
        deadline: float,
    ) -> Response:
        timeouts = self._timeouts
        connection.idle_timeout_s = timeouts.upload_s if method == "PUT" else timeouts.idle_s
        try:
            return connection.request(method, head, body, deadline)
        except (BrokenPipeError, ConnectionResetError) as error:
            connection.close()
            if connection.used:
                raise StaleConnection from error
            raise
        except BaseException:
            connection.close()
            raise

    def _take(self) -> HTTPConnection | None:
        horizon = time.monotonic() - _KEEP_IDLE_S
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.idle_since > horizon and connection.idle():
                return connection
            connection.close()

    def _keep(self, connection: HTTPConnection, response: Response) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            if response.reusable and not self._closed and len(self._idle) < self._keep_max:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        """Close all idle connections. If the server behind one of them is gone without a word, the
        next request, which may reach another machine, would wait on them one after the other."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self._close_idle()
