"""What can go wrong with an object store.

Each class answers three questions that decide what happens next: is it worth trying again
(`retryable`), does it say that the store is unwell (`unwell`, which the circuit breaker counts),
and which setting must change (`setting`)?
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator

from kvtier.errors import KVTierError


class StoreError(KVTierError):
    """Base of everything that a `Store` raises."""

    retryable = False
    unwell = False
    setting = ""
    """Which setting is wrong, or empty if no setting would help."""

    def __init__(self, problem: str, *, setting: str | None = None) -> None:
        super().__init__(problem)
        if setting is not None:
            self.setting = setting


class InvalidName(StoreError):
    """An object name that no store of kvtier would write."""


class LengthMismatch(StoreError):
    """The object is longer or shorter than the reader expected: treat it as corrupt."""


class Archived(LengthMismatch):
    """The object can only be listed and deleted: it is worth no more than a damaged one."""


class StoreFull(StoreError):
    """The store or the folder has no room left."""

    setting = "capacity"


class ObjectTooLarge(StoreError):
    """More bytes than the reader takes, or than the store takes in one object."""


class TransientError(StoreError):
    """The store, or the way to it, is unwell for now: worth another try."""

    retryable = True
    unwell = True


class Unavailable(TransientError):
    """Connection refused, reset or cut short, or an internal error of the server."""


class TimedOut(TransientError):
    """No byte for longer than the idle timeout, or not finished by the deadline."""

    setting = "timeouts"


class RateLimited(TransientError):
    """The store asks for fewer requests (503 SlowDown, 429)."""


class Conflict(StoreError):
    """Another writer is putting the same name at this moment."""

    retryable = True


class Misconfigured(StoreError):
    """The store refuses what we ask: no retry helps until a setting changes."""

    unwell = True


class NoSuchBucket(Misconfigured):
    setting = "url"


class AccessDenied(Misconfigured):
    setting = "credentials"


class Forbidden(AccessDenied):
    """This object may not be read: it is another's, say, or encrypted with another's key. That says
    nothing of the store and of other objects."""

    unwell = False


class NoCredentials(Misconfigured):
    setting = "credentials"


class ExpiredToken(Misconfigured):
    setting = "credentials"


class WrongRegion(Misconfigured):
    setting = "region"


class WrongEndpoint(Misconfigured):
    setting = "endpoint"


class EndlessListing(Misconfigured):
    """More is listed than kvtier can have stored, or than memory should hold."""

    setting = "url"


class UnknownRequest(WrongEndpoint):
    """The store does not know this kind of request, or one of its header fields."""


class ClockSkew(Misconfigured):
    setting = "clock"


class TLSRefused(Misconfigured):
    """No TLS there, or a certificate that is not trusted; `setting` depends on the reason."""

    setting = "ca_bundle"


class ProxyRefused(Misconfigured):
    setting = "HTTPS_PROXY"


class CircuitOpen(StoreError):
    """The store was unwell a moment ago and is not asked until the next trial."""


@contextlib.contextmanager
def map_os_errors(what: str) -> Iterator[None]:
    """Turn OSError into StoreError."""
    try:
        yield
    except OSError as error:
        reason = f"{what}: {error.strerror}"
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise StoreFull(f"{reason}: free some room or lower the budget") from error
            case errno.EACCES | errno.EPERM | errno.EROFS:
                raise AccessDenied(f"{reason}: give the right to write and read") from error
            case errno.ENOENT | errno.ENOTDIR:
                raise NoSuchBucket(f"{reason}: create the folder or correct the url") from error
            case errno.EISDIR | errno.ELOOP | errno.ENAMETOOLONG:
                raise InvalidName(f"{reason}: the place is taken by something else") from error
            case _:
                raise Unavailable(reason) from error


def check_deadline(deadline: float | None, what: str) -> None:
    """Raises TimedOut if the deadline is over."""
    if deadline is not None and time.monotonic() >= deadline:
        raise TimedOut(f"no time left for {what}")
