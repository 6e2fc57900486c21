"""From a url and settings to a store with retries and a circuit breaker."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kvtier.backends.object.client.s3_settings import ConnectionSettings, S3Settings
from kvtier.backends.object.stores.circuit_breaker import BreakerPolicy, BreakerStore
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.backends.object.stores.store import Store


class StoreSettings(ConnectionSettings, frozen=True, kw_only=True):
    """Which store, how to reach it, and when to retry or to leave it alone."""

    url: str
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()


class Location(NamedTuple):
    """What a url names: a folder, or a bucket and the prefix of all names in it."""

    folder: Path | None
    bucket: str = ""
    prefix: str = ""


def parse_url(url: str) -> Location:
    """What this url names; raises WrongEndpoint, which does not quote the url: it may hold a
    password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    path = unquote(parts.path)
    if parts.scheme == "s3" and "@" in parts.netloc:
        raise WrongEndpoint("a user name stands in the url: credentials come from the environment")
    if not (parts.query or parts.fragment or "\0" in path):
        if parts.scheme == "file" and path and not parts.netloc:
            return Location(Path(path))
        if parts.scheme == "s3" and parts.netloc:
            return Location(None, parts.netloc, path)
    raise WrongEndpoint("this url names no store: write s3://bucket/prefix or file:///folder")


def open_store(settings: StoreSettings) -> Store:
    """The store that `settings.url` names, with retries and a circuit breaker around it.

    Raises StoreError if the settings cannot be right; makes no request.
    """
    inner: Store
    folder, bucket, prefix = parse_url(settings.url)
    if folder is not None:
        inner = FileStore(folder)
    else:
        connection = {
            name: getattr(settings, name) for name in ConnectionSettings.__struct_fields__
        }
        inner = S3Store(S3Settings(bucket=bucket, prefix=prefix, **connection))
    guarded = BreakerStore(inner, settings.breaker)
    return RetryingStore(guarded, settings.retry, settings.timeouts.total_s)
