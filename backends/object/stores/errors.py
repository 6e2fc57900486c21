"""What can go wrong with an object store, each error naming the setting to look at.

Three questions decide what happens next, and every class answers them itself: is it worth trying
again (`retryable`), does it say that the store is unwell (`unwell`, which the circuit breaker
counts), and is it the configuration that must change (`setting`)?
"""

from __future__ import annotations

from kvtier.errors import KVTierError


class StoreError(KVTierError):
    """Base of everything a `Store` raises."""

    retryable = False
    unwell = False
    setting = ""
    """Which setting is wrong, or empty where no setting would help."""

    def __init__(self, problem: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class InvalidName(StoreError):
    """An object name that no store of ours would ever write."""


class LengthMismatch(StoreError):
    """The object is longer or shorter than the reader was told: treat it as corrupt."""


class Archived(LengthMismatch):
    """The object is where it can only be listed and deleted: of no more use than a damaged one."""


class StoreFull(StoreError):
    """The store or the folder has no room left."""

    setting = "capacity"


class ObjectTooLarge(StoreError):
    """More bytes than the reader is ready to take, or than the store takes in one object."""


class Weather(StoreError):
    """The store or the way to it is unwell for now: worth another try."""

    retryable = True
    unwell = True


class Unavailable(Weather):
    """Connection refused, reset or cut short, or an internal error of the server."""


class TimedOut(Weather):
    """No byte for longer than the idle timeout, or not finished by the deadline."""

    setting = "timeouts"


class RateLimited(Weather):
    """The store asks for fewer requests (503 SlowDown, 429)."""


class Conflict(StoreError):
    """Another writer is putting the same name at this moment."""

    retryable = True


class Misconfigured(StoreError):
    """The store answers, but not to us: no retry helps until a setting changes."""

    unwell = True


class NoSuchBucket(Misconfigured):
    setting = "url"


class AccessDenied(Misconfigured):
    setting = "credentials"


class Forbidden(AccessDenied):
    """This object may not be read: it is another's, say, or encrypted with another's key. Of the
    store, and of other objects, that says nothing."""

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
    """The store does not know this kind of request, or a header of it."""


class ClockSkew(Misconfigured):
    setting = "clock"


class TLSRefused(Misconfigured):
    setting = "ca_bundle"


class SpeaksNoTLS(TLSRefused):
    setting = "endpoint"


class WrongHost(TLSRefused):
    """The certificate is of a host of another name."""

    setting = "endpoint"


class OutOfTime(TLSRefused):
    """The certificate has ended, or is yet to begin."""

    setting = "clock"


class ProxyRefused(Misconfigured):
    setting = "HTTPS_PROXY"


class CircuitOpen(StoreError):
    """The store was unwell a moment ago and is left alone until the next trial."""
