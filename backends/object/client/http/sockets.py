"""Connected sockets whose waits are bounded, plain and TLS, and what their errors mean.

On plain sockets the kernel does the waiting (SO_RCVTIMEO with MSG_WAITALL). A whole body then
costs one system call and one release of the GIL.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec

from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.client.http.name_resolver import Resolver
from kvtier.backends.object.client.http.proxy import Proxy
from kvtier.backends.object.client.http.tls import TrustStore
from kvtier.backends.object.stores.errors import (
    ProxyRefused,
    TimedOut,
    TLSRefused,
    Unavailable,
    WrongEndpoint,
)
from kvtier.backends.object.stores.store import Buffer

_WAIT_MIN_S = 0.001
_IOV_MAX = 512
_TIMEVAL = struct.Struct("@ll")
_resolver = Resolver()


class Timeouts(msgspec.Struct, frozen=True):
    """How long to wait: to connect, for the next byte, and for one call as a whole.

    The response to an upload may take longer (`upload_s`), because stores are silent while they
    write an object. No request of an engine waits for that.
    """

    connect_s: float = 1.0
    idle_s: float = 2.0
    total_s: float = 10.0
    upload_s: float = 15.0


class Transport(ABC):
    """A connected socket. Raises OSError; TimeoutError after a wait of `wait_s`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        """Send some bytes, at least one; how many."""

    @abstractmethod
    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        """Receive some bytes, at least one, or with `everything` as many as come in time; how
        many, 0 at the end of the stream."""

    def idle(self) -> bool:
        """Whether nothing can be read, not even the end of the stream."""
        return not self._poll.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class PlainTransport(Transport):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        self._waits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        self._set_wait(socket.SO_SNDTIMEO, wait_s)
        try:
            return self._sock.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        self._set_wait(socket.SO_RCVTIMEO, wait_s)
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL if everything else 0)
        except BlockingIOError as error:
            raise TimeoutError from error

    def _set_wait(self, option: int, wait_s: float) -> None:
        if self._waits[option] != wait_s:
            self._waits[option] = wait_s
            whole, part = divmod(max(wait_s, _WAIT_MIN_S), 1.0)
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6))
            )


class TLSTransport(Transport):
    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        self._sock.settimeout(max(wait_s, _WAIT_MIN_S))
        return self._sock.send(buffers[0])

    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        self._sock.settimeout(max(wait_s, _WAIT_MIN_S))
        return self._sock.recv_into(view)

    def idle(self) -> bool:
        assert isinstance(self._sock, ssl.SSLSocket)
        return self._sock.pending() == 0 and super().idle()


def connect(
    address: Address,
    timeouts: Timeouts,
    trust: TrustStore | None,
    deadline: float,
    proxy: Proxy | None = None,
) -> Transport:
    """A new connection. Every address that the host name stands for is tried."""
    first = proxy.address if proxy else address
    found = _resolver.resolve(first.host, first.port, _left(deadline, timeouts.total_s, first))
    for index, (family, kind, protocol, _, where) in enumerate(found):
        last = index == len(found) - 1
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError:  # a name may stand for IPv6 addresses on a machine that has none
            if last:
                raise
            continue
        try:
            sock.settimeout(_left(deadline, timeouts.connect_s, first))
            sock.connect(where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not address.tls:
                return PlainTransport(sock)
            assert trust is not None
            if proxy is not None:
                proxy.tunnel(sock, address, lambda: _left(deadline, timeouts.idle_s, address))
            sock.settimeout(_left(deadline, timeouts.idle_s, address))
            return TLSTransport(trust.handshake(sock, address))
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or last:
                raise
            _resolver.avoid(where)
    raise WrongEndpoint(f"{address} has no address: check the endpoint")


def _left(deadline: float, limit_s: float, address: Address) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimedOut(f"{address} was not reached in time")
    return min(left, limit_s)


@contextlib.contextmanager
def map_socket_errors(address: Address, *, proxy: bool = False) -> Iterator[None]:
    """Turn what sockets raise into StoreError. `proxy`: the address is that of a proxy."""
    what, wrong = ("proxy", ProxyRefused) if proxy else ("endpoint", WrongEndpoint)
    try:
        yield
    except TimeoutError as error:
        raise TimedOut(f"{address} does not answer") from error
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise Unavailable(f"no name server says for now what {address.host} is") from error
        raise wrong(
            f"the name {address.host} cannot be resolved ({error.strerror}): check the {what}"
        ) from error
    except UnicodeError as error:
        raise wrong(f"{address.host[:80]!r} is no host name: check the {what}") from error
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            raise TLSRefused(f"{address} refuses TLS: {error.reason}") from error
        raise Unavailable(f"the TLS connection to {address} broke: {error.reason}") from error
    except ConnectionRefusedError as error:
        raise Unavailable(
            f"nothing listens at {address}: the {what} is down, or elsewhere"
        ) from error
    except OSError as error:
        raise Unavailable(f"the connection to {address} broke: {error.strerror}") from error
