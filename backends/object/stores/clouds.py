"""Where a bucket is and how it is reached: settings, and obstore's client made from them.

The cloud follows from the url: `s3` (Amazon and all that speak S3), `gs` (Google), `az` (Azure).
Credentials never stand in the settings. Those of `s3` come from botocore's chain where it is
installed; all others are found by obstore itself.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from kvtier import __version__
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.credentials import CredentialChain
from kvtier.errors import ExtraMissing

Cloud = Literal["s3", "gs", "az"]
CLOUDS: tuple[Cloud, ...] = ("s3", "gs", "az")
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_BUCKET = {
    "s3": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}"),
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "az": re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}"),
}
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")


class Timeouts(msgspec.Struct, frozen=True):
    """How long to wait: to connect, for the next byte, and for one call as a whole.

    The response to an upload may take longer (`upload_s`), because stores are silent while they
    write an object. No request of an engine waits for that.
    """

    connect_s: float = 1.0
    idle_s: float = 2.0
    total_s: float = 10.0
    upload_s: float = 15.0


class BucketSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which bucket, how all names in it begin, and how to reach it."""

    cloud: Cloud = "s3"
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


def check_settings(settings: BucketSettings) -> None:
    """Raises Misconfigured on settings that cannot work."""
    if not _BUCKET[settings.cloud].fullmatch(settings.bucket):
        raise errors.NoSuchBucket(f"{settings.bucket[:80]!r} is not a bucket name: correct the url")
    path = settings.prefix.strip("/")
    if not {"", ".", ".."}.isdisjoint(path.split("/") if path else ()):
        raise errors.NoSuchBucket(
            "the prefix has a part that is empty or made of dots: correct the url"
        )
    if settings.endpoint is not None:
        parse_endpoint(settings.endpoint)
    if settings.region:
        check_region(settings.region)
    for name in ("region", "profile"):
        if settings.cloud != "s3" and getattr(settings, name):
            problem = f"a bucket of {settings.cloud}:// has no {name}: leave it out"
            raise errors.Misconfigured(problem, setting=name)
    if settings.profile and not has_botocore():
        raise errors.NoCredentials(
            "profiles are read by boto3, which is not installed: pip install 'kvtier[s3]'",
            setting="profile",
        )


def check_region(region: str) -> str:
    """`region`, or WrongRegion: it becomes a part of header fields and host names."""
    if not _REGION.fullmatch(region):
        raise errors.WrongRegion(f"{region[:40]!r} is no region: write one like eu-west-1")
    return region


def parse_endpoint(endpoint: str) -> SplitResult:
    """The parts of an endpoint's url; WrongEndpoint if no request can be sent to it."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not endpoint.isascii() or "@" in parts.netloc or parts.query or parts.fragment:
        raise errors.WrongEndpoint(
            "what the stack, AWS_ENDPOINT_URL or the AWS config file names is no endpoint: write "
            "https://host:port, without a user or password in it"
        )
    return parts


def has_botocore() -> bool:
    return importlib.util.find_spec("botocore") is not None


class Place(msgspec.Struct, frozen=True):
    """Where requests go, and what they need to be accepted there."""

    settings: BucketSettings
    endpoint: str
    """With the bucket in its host name, if that is how the bucket is addressed."""
    config: dict[str, Any]
    """What is particular to one cloud, as obstore's client takes it."""
    ca_bundle: str | None
    chain: CredentialChain | None
    """Where the credentials come from; None if obstore finds them."""

    @property
    def where(self) -> str:
        """How messages name the bucket."""
        return f"bucket {self.settings.bucket} at {self.endpoint}"

    @property
    def direct(self) -> bool:
        """Whether bytes come from S3 as they are: nothing encrypts them, and no proxy passes them
        on."""
        return self.endpoint.startswith("http:") and self.settings.cloud == "s3" and not self.proxy

    @property
    def proxy(self) -> str | None:
        """The proxy on the way, without user and password."""
        return _proxy_for(urlsplit(self.endpoint))

    def open(self, read_s: float, **config: Any) -> Any:
        """A client of obstore that waits so long for the next byte; it makes no request."""
        timeouts, store = self.settings.timeouts, obstore_module("obstore.store")
        options: dict[str, Any] = {
            "allow_http": self.endpoint.startswith("http:"),
            "connect_timeout": _duration(timeouts.connect_s),
            "read_timeout": _duration(read_s),
            "timeout": _duration(timeouts.total_s),
            "pool_max_idle_per_host": str(self.settings.connections),
            "user_agent": f"kvtier/{__version__}",
        }
        try:
            if self.ca_bundle is not None and not options["allow_http"]:
                options["root_certificate"] = Path(self.ca_bundle).read_bytes()
            return getattr(store, _CLASSES[self.settings.cloud])(
                self.settings.bucket,
                prefix=self.settings.prefix.strip("/") or None,
                client_options=options,
                retry_config={"max_retries": 0},
                **self.config,
                **config,
            )
        except OSError as error:
            problem = f"the ca_bundle {self.ca_bundle} cannot be read: {error}"
            raise errors.TLSRefused(problem) from None
        except (ValueError, obstore_module("obstore.exceptions").BaseError) as error:
            text = str(error)  # which may quote a key
            if "certificate" in text.lower() or "pem" in text.lower():
                raise errors.TLSRefused(f"the ca_bundle {self.ca_bundle} cannot be read") from None
            raise errors.NoCredentials(
                f"no client of {self.settings.cloud}:// can be made ({type(error).__name__}): "
                "check the account and the variables that name it"
            ) from None


_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}


def find_place(settings: BucketSettings) -> Place:
    """Where these settings lead; makes no request. Raises Misconfigured."""
    check_settings(settings)
    chain = None
    ca_bundle = settings.ca_bundle
    if settings.cloud == "s3":
        chain = CredentialChain(settings.profile) if has_botocore() else None
        ca_bundle = ca_bundle or (chain.ca_bundle if chain else os.environ.get("AWS_CA_BUNDLE"))
        endpoint, config = _s3(settings, chain)
    elif settings.cloud == "gs":
        endpoint = settings.endpoint or "https://storage.googleapis.com"
        config = {"base_url": endpoint} if settings.endpoint else {}
    else:
        endpoint = settings.endpoint or "https://blob.core.windows.net"
        config = {"endpoint": endpoint} if settings.endpoint else {}
    parts = parse_endpoint(endpoint)
    _proxy_for(parts)  # which raises if it cannot be used
    ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")
    return Place(settings, parts.geturl().rstrip("/"), config, ca_bundle, chain)


def _s3(settings: BucketSettings, chain: CredentialChain | None) -> tuple[str, dict[str, Any]]:
    """The endpoint, with the bucket in it where it is addressed so, and the client's options."""
    named = os.environ
    region = settings.region or (chain.region if chain else named.get("AWS_REGION"))
    region = check_region(region or named.get("AWS_DEFAULT_REGION") or "us-east-1")
    endpoint = settings.endpoint
    if endpoint is None and chain is not None:
        endpoint = chain.find_endpoint(region)
    if endpoint is None:
        endpoint = named.get("AWS_ENDPOINT_URL_S3") or named.get("AWS_ENDPOINT_URL")
    parts = parse_endpoint(endpoint or f"https://s3.{region}.amazonaws.com")
    style = settings.addressing
    if style == "auto":  # the host name only where that is known to work
        aws = settings.endpoint is None and (parts.hostname or "").endswith(_AWS)
        style = "virtual" if aws and _DNS_BUCKET.fullmatch(settings.bucket) else "path"
    if style == "virtual":
        parts = parts._replace(netloc=f"{settings.bucket}.{parts.netloc}")
    found = parts.geturl().rstrip("/")
    config: dict[str, Any] = {
        "endpoint": found,
        "region": region,
        "virtual_hosted_style_request": style == "virtual",
        "unsigned_payload": True,  # every record carries its own checksum
    }
    if chain is not None:
        config["credential_provider"] = chain.provide
    return found, config


def _duration(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(seconds, 86400.0))


def obstore_module(module: str) -> Any:
    """A module of the `object` extra; raises ExtraMissing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ExtraMissing("a bucket", "object") from error


def _proxy_for(endpoint: SplitResult) -> str | None:
    """The proxy on the way to this endpoint, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as host and
    port. obstore's client looks at the same variables; it would pass by one that it cannot use."""
    proxies = getproxies()
    url = proxies.get(endpoint.scheme) or proxies.get("all")
    if not url or proxy_bypass(endpoint.netloc):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError:
        raise _unusable("it cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise _unusable(f"a proxy is not spoken to by {parts.scheme or 'such a scheme'}")
    if not parts.hostname:
        raise _unusable("it names no host")
    return f"{parts.hostname}:{port}"


def _unusable(problem: str) -> errors.ProxyRefused:
    return errors.ProxyRefused(
        f"HTTP_PROXY or HTTPS_PROXY cannot be used, {problem}: write http://host:port, or name the "
        "endpoint's host in NO_PROXY"
    )
