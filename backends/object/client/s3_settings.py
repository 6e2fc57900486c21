"""How to reach a bucket, as far as the settings of a tier say it."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvtier.backends.object.client.http.endpoint import parse_endpoint
from kvtier.backends.object.client.http.sockets import Timeouts
from kvtier.backends.object.client.signer import check_region
from kvtier.backends.object.stores.errors import NoSuchBucket

_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Which bucket, how all names in it begin, and how to reach it. Credentials never stand here:
    see `credentials`."""

    bucket: str = ""
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    ca_bundle: str | None = None
    profile: str | None = None
    conditional_put: bool = True
    connections: int = 64
    timeouts: Timeouts = Timeouts()


def check_settings(settings: S3Settings) -> None:
    """Raises Misconfigured on settings that cannot work."""
    if not _BUCKET.fullmatch(settings.bucket):
        raise NoSuchBucket(f"{settings.bucket[:80]!r} is not a bucket name: correct the url")
    if settings.endpoint is not None:
        parse_endpoint(settings.endpoint)
    if settings.region:
        check_region(settings.region)


def addressing_style(settings: S3Settings, endpoint: str) -> str:
    """Whether requests name the bucket in the path or in the host name. `auto` means the host name
    only where that is known to work."""
    if settings.addressing != "auto":
        return settings.addressing
    host = parse_endpoint(endpoint).hostname or ""
    own = settings.endpoint is None and host.endswith(_AWS)
    return "virtual" if own and _DNS_BUCKET.fullmatch(settings.bucket) else "path"
