"""From a url and a few settings to a store that can be relied on."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from kvtier.backends.object.breaker import BreakerPolicy, BreakerStore
from kvtier.backends.object.errors import WrongEndpoint
from kvtier.backends.object.files import FileStore
from kvtier.backends.object.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.s3 import Reach, S3Settings, S3Store
from kvtier.backends.object.store import Store


class StoreSettings(Reach, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about reaching a store that a user may set."""

    url: str
    sync: bool = False
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()


def open_store(settings: StoreSettings) -> Store:
    """The store that `settings.url` names, with retries and a circuit breaker around it.

    Raises StoreError if the settings cannot be right; makes no request.
    """
    inner: Store
    parts = urlsplit(settings.url)
    if parts.scheme == "file" and parts.path and not parts.netloc:
        inner = FileStore(unquote(parts.path), sync=settings.sync)
    elif parts.scheme == "s3" and parts.hostname and not parts.username:
        reach = {name: getattr(settings, name) for name in Reach.__struct_fields__}
        inner = S3Store(S3Settings(bucket=parts.netloc, prefix=unquote(parts.path), **reach))
    else:
        raise WrongEndpoint("a store's url is s3://bucket/prefix or file:///folder")
    guarded = BreakerStore(inner, settings.breaker)
    return RetryingStore(guarded, settings.retry, settings.timeouts.total_s)
