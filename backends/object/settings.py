"""The settings of an object tier, and the store that they name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import CLOUDS, BucketSettings, Cloud, Timeouts
from kvtier.backends.object.stores.clouds import check_settings as check_bucket_settings
from kvtier.backends.object.stores.errors import Misconfigured, WrongEndpoint
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.store import Store
from kvtier.errors import ConfigError, NotHere
from kvtier.settings import (
    Duration,
    Threads,
    TierSettings,
    WritePolicy,
    check_capacity,
    standing_folder,
)
from kvtier.system.disk import Disk

_DURATIONS_MIN = {
    "refresh": Duration(0.01),
    "audit": Duration(0.1),
    "age_max": Duration(1.0),
    "connect_timeout": Duration(0.001),
    "idle_timeout": Duration(0.001),
}
"""With less, the store is asked without a pause, or no request can ever succeed."""


class ObjectSettings(TierSettings, frozen=True, kw_only=True, tag="object"):
    """Blocks in a bucket or in a folder, shared by all servers with the same url.

    Credentials are never written here: they come from the environment, a profile or a role, as for
    every other tool of that cloud.
    """

    url: str
    """s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder. Only objects
    below it are ever touched."""
    endpoint: str | None = None
    """A server other than the cloud's own, like https://minio.example:9000."""
    region: str | None = None
    """The region of an s3:// bucket, if neither the environment nor the profile names it."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket is in the path or in the host name; auto: the host for AWS, else path."""
    ca_bundle: str | None = None
    """A file with the certificates of the authorities to trust; without it, what AWS_CA_BUNDLE,
    the profile or REQUESTS_CA_BUNDLE names, or the system's."""
    profile: str | None = None
    """The AWS profile to take credentials from."""
    conditional_put: bool = True
    """Ask the store to refuse a block that it already has (If-None-Match)."""
    codec: Literal["auto", "none", "zstd", "split-zstd"] = "auto"
    """How payloads are compressed; auto: none in a folder, else what suits the data type."""
    age_max: Duration | None = None
    """Blocks that were stored longer ago than this are deleted."""
    refresh: Duration = Duration(5.0)
    """How often to look at what other servers have added and removed."""
    audit: Duration = Duration(600.0)
    """How often one of the servers lists everything, to find what no server has written down."""
    connect_timeout: Duration = Duration(1.0)
    """How long to wait for a connection."""
    idle_timeout: Duration = Duration(2.0)
    """How long to wait for the next byte; for the answer to an upload at least 15s."""
    threads: Threads = 32
    """How many objects are transferred at once."""
    unreachable: Literal["degrade", "refuse"] = "degrade"
    """What to do if the store cannot be used at start: go on without it until it can, or stop."""

    @property
    def only_read(self) -> bool:
        """Whether nothing in the store may be changed."""
        return self.write is WritePolicy.NEVER


class Location(NamedTuple):
    """What a url names: a folder, or a bucket of a cloud and the prefix of all names in it."""

    folder: Path | None
    bucket: str = ""
    prefix: str = ""
    cloud: Cloud = "s3"


def parse_url(url: str) -> Location:
    """What this url names; raises WrongEndpoint, which does not quote the url: it may hold a
    password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    path = unquote(parts.path)
    cloud = next((name for name in CLOUDS if name == parts.scheme), None)
    if cloud and "@" in parts.netloc:
        raise WrongEndpoint("a user name stands in the url: credentials come from the environment")
    if not (parts.query or parts.fragment or "\0" in path):
        if parts.scheme == "file" and path and not parts.netloc:
            return Location(Path(path))
        if cloud and parts.netloc:
            return Location(None, parts.netloc, path, cloud)
    raise WrongEndpoint(
        "this url names no store: write s3://bucket/prefix (or gs://, az://) or file:///folder"
    )


def open_for(settings: ObjectSettings) -> Store:
    """The store that a tier with these settings uses, with retries and a circuit breaker around it.
    Raises StoreError if the settings cannot be right; makes no request."""
    location = parse_url(settings.url)
    inner = (
        FileStore(location.folder)
        if location.folder is not None
        else BucketStore(_bucket(settings, location))
    )
    return RetryingStore(inner, RetryPolicy(), _total_s(settings))


def _total_s(settings: ObjectSettings) -> float:
    return max(settings.load_deadline.seconds, settings.store_deadline.seconds)


def _bucket(settings: ObjectSettings, location: Location) -> BucketSettings:
    return BucketSettings(
        cloud=location.cloud,
        bucket=location.bucket,
        prefix=location.prefix,
        endpoint=settings.endpoint,
        region=settings.region,
        addressing=settings.addressing,
        ca_bundle=settings.ca_bundle,
        profile=settings.profile,
        conditional_put=settings.conditional_put,
        connections=settings.threads,
        timeouts=Timeouts(
            settings.connect_timeout.seconds,
            settings.idle_timeout.seconds,
            _total_s(settings),
            upload_s=max(Timeouts().upload_s, settings.idle_timeout.seconds),
        ),
    )


def capacity_of(settings: ObjectSettings) -> int:
    """The budget in bytes."""
    folder = parse_url(settings.url).folder
    if folder is None:
        return settings.capacity.resolve(0)
    return settings.capacity.resolve(
        Disk().total_bytes(folder if folder.exists() else folder.parent)
    )


def check_settings(settings: ObjectSettings, record_bytes: int) -> None:
    """Raises ConfigError on settings that cannot work here."""
    try:
        location = parse_url(settings.url)
    except Misconfigured as error:
        raise _config_error("url", error) from error
    for name, least in _DURATIONS_MIN.items():
        found: Duration | None = getattr(settings, name)
        if found is not None and found.seconds < least.seconds:
            raise ConfigError(f".{name}", f"{found} is too short", f"write at least {least}")
    if location.folder is not None:
        standing_folder(location.folder, ".url", only_read=settings.only_read)
    elif settings.capacity.share is not None:
        problem, remedy = "a bucket has no size of its own", 'write a size, like "2TiB"'
        raise ConfigError(".capacity", problem, remedy)
    check_capacity(settings.capacity, capacity_of(settings), record_bytes)
    if location.folder is None:
        _check_bucket(settings, location)


def _check_bucket(settings: ObjectSettings, location: Location) -> None:
    if importlib.util.find_spec("obstore") is None:
        extra = "s3" if location.cloud == "s3" else "object"
        remedy = f"pip install 'kvtier[{extra}]'"
        raise NotHere(".url", f"an {location.cloud}:// store needs an optional package", remedy)
    try:
        check_bucket_settings(_bucket(settings, location))
    except Misconfigured as error:
        raise _config_error(error.setting, error) from error
    if settings.ca_bundle and not Path(settings.ca_bundle).is_file():
        problem = f"there is no file {settings.ca_bundle}"
        raise NotHere(".ca_bundle", problem, "name one with certificates, in PEM")


def _config_error(setting: str, error: Misconfigured) -> ConfigError:
    problem, _, remedy = str(error).partition(": ")
    return ConfigError(f".{setting}", problem, remedy)
