"""HTTP proxies: which one is on the way, and the tunnel through it.

The variables are those that boto3 reads. To an https:// endpoint a proxy only passes bytes on
(CONNECT). A request to an http:// endpoint is sent to the proxy itself, with the full url. No
message and no repr shows user or password of a proxy.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kvtier.backends.object.client.extra import optional_module
from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.stores.errors import ProxyRefused, Unavailable

_RESPONSE_BYTES_MAX = 16 << 10


class Proxy(NamedTuple):
    """A proxy's address, and the header field that it asks for."""

    address: Address
    authorization: str = ""

    def __repr__(self) -> str:
        return f"Proxy({self.address})"

    def headers(self) -> dict[str, str]:
        """What a request says to the proxy itself."""
        return {"proxy-authorization": self.authorization} if self.authorization else {}

    def tunnel(self, sock: socket.socket, to: Address, left_s: Callable[[], float]) -> None:
        """Have all further bytes on this socket passed on to an address."""
        place = to.host_and_port
        fields = "".join(f"{name}: {value}\r\n" for name, value in self.headers().items())
        sock.settimeout(left_s())
        sock.sendall(f"CONNECT {place} HTTP/1.1\r\nhost: {place}\r\n{fields}\r\n".encode("latin-1"))
        response = b""
        while not response.endswith(b"\r\n\r\n"):
            sock.settimeout(left_s())
            byte = sock.recv(1)  # no more: the bytes that follow are the endpoint's
            response += byte
            if not byte or len(response) > _RESPONSE_BYTES_MAX:
                raise Unavailable(f"the proxy at {self.address} does not answer to CONNECT")
        status = response.partition(b" ")[2][:3]  # some state no reason, and no space before it
        if status == b"407":
            raise ProxyRefused(
                f"the proxy at {self.address} answered 407: correct user and password in "
                "HTTPS_PROXY"
            )
        if status != b"200":
            said = status.decode() if status.isdigit() else "nonsense"
            raise Unavailable(f"the proxy at {self.address} answered {said} to CONNECT")


def proxy_for(address: Address) -> Proxy | None:
    """The proxy on the way to this address, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY."""
    found = optional_module("botocore.utils").get_environ_proxies(str(address))
    url = found.get(address.scheme)
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError:
        raise _unusable("it cannot be read") from None
    if parts.scheme != "http":
        raise _unusable(f"a proxy is not spoken to by {parts.scheme or 'such a scheme'}")
    if not parts.hostname:
        raise _unusable("it names no host")
    where = Address(parts.hostname, port, False)
    if parts.username is None:
        return Proxy(where)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(where, "Basic " + base64.b64encode(user.encode()).decode())


def _unusable(problem: str) -> ProxyRefused:
    return ProxyRefused(
        f"HTTP_PROXY or HTTPS_PROXY cannot be used, {problem}: write http://host:port, or name the "
        "endpoint's host in NO_PROXY"
    )
