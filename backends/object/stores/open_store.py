"""From a url and settings to a store with retries and a circuit breaker."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores.circuit_breaker import BreakerPolicy, BreakerStore
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.backends.object.stores.store import Store


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


def open_store(
    url: str,
    s3: S3Settings | None = None,
    *,
    retry: RetryPolicy | None = None,
    breaker: BreakerPolicy | None = None,
) -> Store:
    """The store that a url names, with retries and a circuit breaker around it. `s3` says how to
    reach a bucket.

    Raises StoreError if the settings cannot be right; makes no request.
    """
    inner: Store
    s3 = s3 or S3Settings()
    folder, bucket, prefix = parse_url(url)
    if folder is not None:
        inner = FileStore(folder)
    else:
        inner = S3Store(msgspec.structs.replace(s3, bucket=bucket, prefix=prefix))
    guarded = BreakerStore(inner, breaker or BreakerPolicy())
    return RetryingStore(guarded, retry or RetryPolicy(), s3.timeouts.total_s)
