"""From a url and a few settings to a store that can be relied on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kvtier.backends.object.stores.circuit_breaker import BreakerPolicy, BreakerStore
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.s3_store import Reach, S3Settings, S3Store
from kvtier.backends.object.stores.store import Store


class StoreSettings(Reach, frozen=True, kw_only=True):
    """Which store, how to reach it, and how patient to be with it."""

    url: str
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()


class Place(NamedTuple):
    """What a url names: a folder, or a bucket and what all names in it begin with."""

    folder: Path | None
    bucket: str = ""
    prefix: str = ""


def place_of(url: str) -> Place:
    """What this url names; raises WrongEndpoint, without a word of it: it may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    path = unquote(parts.path)
    if parts.scheme == "s3" and "@" in parts.netloc:
        raise WrongEndpoint("a user name stands in the url: credentials come from the environment")
    if not (parts.query or parts.fragment or "\0" in path):
        if parts.scheme == "file" and path and not parts.netloc:
            return Place(Path(path))
        if parts.scheme == "s3" and parts.netloc:
            return Place(None, parts.netloc, path)
    raise WrongEndpoint("this url names no store: write s3://bucket/prefix or file:///folder")


def open_store(settings: StoreSettings) -> Store:
    """The store that `settings.url` names, with retries and a circuit breaker around it.

    Raises StoreError if the settings cannot be right; makes no request.
    """
    inner: Store
    folder, bucket, prefix = place_of(settings.url)
    if folder is not None:
        inner = FileStore(folder)
    else:
        reach = {name: getattr(settings, name) for name in Reach.__struct_fields__}
        inner = S3Store(S3Settings(bucket=bucket, prefix=prefix, **reach))
    guarded = BreakerStore(inner, settings.breaker)
    return RetryingStore(guarded, settings.retry, settings.timeouts.total_s)
