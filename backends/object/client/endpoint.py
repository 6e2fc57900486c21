"""Where a bucket is: the address of an endpoint, and what every request's target begins with."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from kvtier.backends.object.client.sockets import Address
from kvtier.backends.object.stores.errors import WrongEndpoint


def address(endpoint: str, bucket: str, style: str) -> tuple[Address, str]:
    """Where to connect, and what every request target begins with."""
    parts = parts_of(endpoint)
    found = address_of(parts)
    base = parts.path.rstrip("/") + "/"
    if style == "virtual":
        return found._replace(host=f"{bucket}.{found.host}"), base
    return found, f"{base}{bucket}/"


def address_of(parts: SplitResult) -> Address:
    """Whatever way it is written: in capitals, or with the port that is meant without one."""
    tls = parts.scheme == "https"
    return Address(parts.hostname or "", parts.port or (443 if tls else 80), tls)


def parts_of(endpoint: str) -> SplitResult:
    """Raises WrongEndpoint on anything that a request cannot be sent to."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not endpoint.isascii() or "@" in parts.netloc or parts.query or parts.fragment:
        raise WrongEndpoint(
            "what the stack, AWS_ENDPOINT_URL or the AWS config file names is no endpoint: write "
            "https://host:port, without a user or password in it"
        )
    return parts
