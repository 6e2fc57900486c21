"""From a url and settings to a store with retries and a circuit breaker."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import CLOUDS, BucketSettings, Cloud
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.stores.store import Store


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


def open_store(
    url: str,
    reached: BucketSettings | None = None,
    *,
    retry: RetryPolicy | None = None,
) -> Store:
    """The store that a url names, with retries and a circuit breaker around it. `reached` says
    how a bucket is reached.

    Raises StoreError if the settings cannot be right; makes no request.
    """
    inner: Store
    reached = reached or BucketSettings()
    folder, bucket, prefix, cloud = parse_url(url)
    if folder is not None:
        inner = FileStore(folder)
    else:
        named = msgspec.structs.replace(reached, cloud=cloud, bucket=bucket, prefix=prefix)
        inner = BucketStore(named)
    return RetryingStore(inner, retry or RetryPolicy(), reached.timeouts.total_s)
