"""Endpoints: the address of a server, and how a bucket is named in a request to it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvtier.backends.object.stores.errors import WrongEndpoint


class Address(NamedTuple):
    host: str
    port: int
    tls: bool

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def host_and_port(self) -> str:
        """As they stand in a url."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_and_port}"


def bucket_address(endpoint: str, bucket: str, style: str) -> tuple[Address, str]:
    """Where to connect for this bucket, and how the target of every request begins."""
    parts = parse_endpoint(endpoint)
    found = address_of(parts)
    base = parts.path.rstrip("/") + "/"
    if style == "virtual":
        return found._replace(host=f"{bucket}.{found.host}"), base
    return found, f"{base}{bucket}/"


def address_of(parts: SplitResult) -> Address:
    """The address in a url. Case and a default port that is written out make no difference."""
    tls = parts.scheme == "https"
    return Address(parts.hostname or "", parts.port or (443 if tls else 80), tls)


def parse_endpoint(endpoint: str) -> SplitResult:
    """The parts of an endpoint's url; WrongEndpoint if no request can be sent to it."""
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
