"""Sockets with a bounded wait, plain and TLS, and what their errors mean.

On plain sockets the kernel does the waiting (SO_RCVTIMEO with MSG_WAITALL), so that a whole body
costs one system call and one release of Python's lock.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvtier.backends.object.client.name_resolver import Resolver
from kvtier.backends.object.stores.errors import (
    OutOfTime,
    ProxyRefused,
    SpeaksNoTLS,
    TimedOut,
    TLSRefused,
    Unavailable,
    WrongEndpoint,
    WrongHost,
)
from kvtier.backends.object.stores.store import Buffer

_WAIT_MIN_S = 0.001
_IOV_MAX = 512
_TIMEVAL = struct.Struct("@ll")
_OUT_OF_TIME, _OTHER_HOST = (9, 10), (62, 64)
"""What OpenSSL says of certificates whose authority may be known."""
_resolver = Resolver()


class Timeouts(msgspec.Struct, frozen=True):
    """How long to wait: to connect, for the next byte, and for one call as a whole.

    A store that takes an upload in may be silent for longer (`upload_s`); nobody waits for that.
    """

    connect_s: float = 1.0
    idle_s: float = 2.0
    total_s: float = 10.0
    upload_s: float = 15.0


class Address(NamedTuple):
    host: str
    port: int
    tls: bool

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def place(self) -> str:
        """Host and port, as they stand in a url."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"


class Wire(ABC):
    """A connected socket. Raises OSError; waiting longer than `wait_s` is TimeoutError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        """Send some bytes, at least one."""

    @abstractmethod
    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        """Read some bytes, at least one, 0 at the end; if `everything`, as many as come in time."""

    def quiet(self) -> bool:
        """Whether there is nothing to read, not even the end."""
        return not self._poll.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class PlainWire(Wire):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        self._waits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        self._wait(socket.SO_SNDTIMEO, wait_s)
        try:
            return self._sock.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        self._wait(socket.SO_RCVTIMEO, wait_s)
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL if everything else 0)
        except BlockingIOError as error:
            raise TimeoutError from error

    def _wait(self, option: int, wait_s: float) -> None:
        if self._waits[option] != wait_s:
            self._waits[option] = wait_s
            whole, part = divmod(max(wait_s, _WAIT_MIN_S), 1.0)
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6))
            )


class TLSWire(Wire):
    def send(self, buffers: Sequence[Buffer], wait_s: float) -> int:
        self._sock.settimeout(max(wait_s, _WAIT_MIN_S))
        return self._sock.send(buffers[0])

    def receive(self, view: Buffer, wait_s: float, *, everything: bool) -> int:
        self._sock.settimeout(max(wait_s, _WAIT_MIN_S))
        return self._sock.recv_into(view)

    def quiet(self) -> bool:
        assert isinstance(self._sock, ssl.SSLSocket)
        return self._sock.pending() == 0 and super().quiet()


class Trust:
    """Whose word counts that a server is the one it claims to be: that of the authorities in a
    file, or of the system's."""

    def __init__(self, ca_bundle: str | None) -> None:
        self._ca_bundle = ca_bundle
        try:
            self.context = ssl.create_default_context(cafile=ca_bundle)
        except OSError as error:
            raise TLSRefused(f"the ca_bundle {ca_bundle} cannot be read: {error}") from error

    def learn(self) -> None:
        """Take in what stands there now, for the next connection: authorities follow one another
        while we run."""
        with contextlib.suppress(OSError):  # it may just be written
            if self._ca_bundle is None:
                self.context.load_default_certs()
            else:
                self.context.load_verify_locations(self._ca_bundle)


class Tunnel(Protocol):
    """A proxy on the way: see `proxy`."""

    @property
    def address(self) -> Address: ...

    def tunnel(self, sock: socket.socket, to: Address, left_s: Callable[[], float]) -> None: ...


def connect(
    address: Address,
    timeouts: Timeouts,
    tls: Trust | None,
    deadline: float,
    proxy: Tunnel | None = None,
) -> Wire:
    """A new connection, trying every address that the name stands for."""
    first = proxy.address if proxy else address
    found = _resolver.find(first.host, first.port, _left(deadline, timeouts.total_s, first))
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
                return PlainWire(sock)
            assert tls is not None
            if proxy is not None:
                proxy.tunnel(sock, address, lambda: _left(deadline, timeouts.idle_s, address))
            sock.settimeout(_left(deadline, timeouts.idle_s, address))
            return TLSWire(_handshake(sock, tls, address))
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or last:
                raise
            _resolver.shun(where)
    raise WrongEndpoint(f"{address} has no address: check the endpoint")


def _handshake(sock: socket.socket, tls: Trust, address: Address) -> ssl.SSLSocket:
    try:
        return tls.context.wrap_socket(sock, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        tls.learn()
        raise _distrust(address, error) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise  # the server went away: weather, not configuration
    except ssl.SSLError as error:
        raise SpeaksNoTLS(
            f"{address} refuses TLS ({error.reason}): is the endpoint http:// rather than https://?"
        ) from error


def _distrust(address: Address, error: ssl.SSLCertVerificationError) -> TLSRefused:
    said = f"the certificate of {address} is not trusted ({error.verify_message})"
    if error.verify_code in _OTHER_HOST:
        return WrongHost(f"{said}: write the endpoint as its certificate does, or addressing: path")
    if error.verify_code in _OUT_OF_TIME:
        return OutOfTime(f"{said}: have it renewed, if the clock of this machine is right")
    return TLSRefused(f"{said}: name its authority as ca_bundle")


def _left(deadline: float, limit_s: float, address: Address) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimedOut(f"{address} was not reached in time")
    return min(left, limit_s)


@contextlib.contextmanager
def explain(address: Address, *, proxy: bool = False) -> Iterator[None]:
    """Turn what sockets raise into the errors every store speaks; the address may be a proxy's."""
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
        raise Unavailable(f"nothing listens at {address}: is the {what} up, and right?") from error
    except OSError as error:
        raise Unavailable(f"the connection to {address} broke: {error.strerror}") from error
