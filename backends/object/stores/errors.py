"""What can go wrong with an object store, and what responses and errors of obstore's client mean.

Each class answers three questions that decide what happens next: is it worth trying again
(`retryable`), does it say that the store is unwell (`unwell`, which the circuit breaker counts),
and which setting must change (`setting`)?

obstore has few kinds of error, and says the rest in words. Messages here quote only the status and
the error code of a response: bodies repeat access keys, tokens and signatures, and so do urls.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from kvtier.backends.object.stores.clouds import Place


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


# -- responses -------------------------------------------------------------------------------------

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]{1,80})\s*</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{2,32})</Region>")
_STATUS = re.compile(r"status code: (\d{3})")
_ONE_OF_MANY = re.compile(r"request failed for key .*\(code: (\w{1,80})\)")
"""What a bulk delete says of one object: a status, or an error code."""
_BODY_CHARS_MAX = 64 << 10
MISSING_CODES = ("NoSuchKey", "NotFound", "BlobNotFound")
_ROTATED = "InvalidAccessKeyId SignatureDoesNotMatch InvalidSecurity"
"""Of credentials that were rotated, whether key and secret or the secret alone."""
_KEY = f"{_ROTATED} AccountProblem AuthenticationFailed"
_UNKNOWN = (
    "BadRequest InvalidArgument InvalidRequest NotImplemented NotSupported UnsupportedHeader "
    "UnsupportedOperation InvalidHeaderValue"
)
"""A 400 with one of these says that the store does not know such a request."""

_Meaning = tuple[type[StoreError], str]
_UNAVAILABLE: _Meaning = Unavailable, ""
_BUSY: _Meaning = RateLimited, "fewer requests, please"
_TOKEN: _Meaning = ExpiredToken, "renew the session token of these credentials"
_ELSEWHERE: _Meaning = WrongRegion, ""
_SAID_BY: dict[_Meaning, str] = {
    _BUSY: "429 SlowDown Throttling ThrottlingException TooManyRequests RequestLimitExceeded "
    "RequestThrottled BandwidthLimitExceeded",
    _UNAVAILABLE: "408 InternalError ServiceUnavailable RequestTimeout IncompleteBody "
    "OperationAborted OperationTimedOut ContainerBeingDeleted",
    _ELSEWHERE: "301 302 307 308 PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
    "IllegalLocationConstraintException",
    (NoSuchBucket, "create the bucket or correct its name in the url"): "NoSuchBucket "
    "ContainerNotFound",
    (ObjectTooLarge, "the store does not take objects of this size"): "413 EntityTooLarge",
    (
        Archived,
        "the object is archived; exempt this prefix from that rule",
    ): "InvalidObjectState BlobArchived",
    (LengthMismatch, "the object is shorter than expected"): "416 InvalidRange",
    _TOKEN: "ExpiredToken ExpiredTokenException InvalidToken InvalidTokenId TokenRefreshRequired "
    "InvalidAuthenticationInfo",
    (ClockSkew, "the clock of this machine is wrong; set it by NTP"): "RequestTimeTooSkewed "
    "RequestExpired RequestInTheFuture",
    (StoreFull, "the store is full; lower the capacity or run gc"): "507 QuotaExceeded "
    "ObjectQuotaExceeded ServiceQuotaExceeded InsufficientStorage XMinioStorageFull "
    "XMinioAdminBucketQuotaExceeded",
    (AccessDenied, "the access key or its secret is wrong"): _KEY,
    (
        AccessDenied,
        "allow these credentials to list the bucket and to get, put and delete objects",
    ): "401 403",
    (ProxyRefused, "correct user and password in HTTP_PROXY"): "407",
    (Conflict, "another writer has this name in hand"): "409",
}
_MEANINGS = {word: meaning for meaning, words in _SAID_BY.items() for word in words.split()}
"""By error code, and by status, which counts where the code is not known."""


def replacement(fields: Mapping[str, str]) -> str:
    """What a proxy has put in the place of an object; empty if it is the object. The length of the
    body would not show it."""
    named = {name.lower(): value.lower() for name, value in fields.items()}
    if named.get("content-encoding", "") not in ("", "identity", "aws-chunked"):
        return "something packed in place of an object"
    page = named.get("content-type", "").startswith("text/html")
    return "a web page in place of an object" if page else ""


class Response(NamedTuple):
    """A response that is not a success: its status, and the start of its body."""

    status: int
    body: str = ""

    @property
    def code(self) -> str:
        """The error code in the body, empty if there is none."""
        found = _CODE.search(self.body)
        return found.group(1) if found else ""

    @property
    def missing(self) -> bool:
        """Whether the store says that there is no such object. A 404 without a code is a proxy's
        page, and the object may be behind it."""
        return self.status == 404 and self.code in MISSING_CODES

    @property
    def rotated(self) -> bool:
        """Whether new credentials may help."""
        return (
            self.status == 401
            or self.code in _ROTATED.split()
            or _MEANINGS.get(self.code) == _TOKEN
        )


def response_in(error: Exception) -> Response | None:
    """The response that made obstore raise this error, if there was one."""
    text = str(error)[:_BODY_CHARS_MAX]
    status = _STATUS.search(text)
    if status is not None:
        return Response(int(status.group(1)), text[status.end() :])
    if one := _ONE_OF_MANY.search(text):
        code = one.group(1)
        if code != "404":
            return (
                Response(int(code)) if code.isdecimal() else Response(403, f"<Code>{code}</Code>")
            )
        missing = "ContainerNotFound" if "container does not exist" in text else "BlobNotFound"
        return Response(404, f"<Code>{missing}</Code>")
    if "redirect without LOCATION" in text:
        return Response(301)
    _, said, body = text.partition("Server returned error response: ")  # with status 200
    return Response(500, body) if said else None


def response_error(response: Response, where: str, *, reading: bool = False) -> StoreError:
    """What a response from the bucket or endpoint `where` means. `reading`: the request was to read
    one object."""
    status, code = response.status, response.code
    kind, remedy = _meaning(status, code)
    said = f"{where} answered {status}{' ' + code if code else ''}"
    if kind is WrongRegion:
        region = _REGION.search(response.body)
        hint = f"set region to {region.group(1)}" if region else "correct the region"
        remedy = f"the bucket is elsewhere; {hint} (and the endpoint, if any)"
    elif reading and kind is AccessDenied and status != 401 and code and code not in _KEY.split():
        return Forbidden(f"{said}: allow these credentials to read the object, and to use its key")
    return kind(f"{said}: {remedy}" if remedy else said)


def _meaning(status: int, code: str) -> _Meaning:
    if status == 429 or (status == 503 and code != "ServiceUnavailable"):
        return _BUSY
    if code in _MEANINGS:
        return _MEANINGS[code]
    if status in (301, 302, 307, 308):
        return _ELSEWHERE
    if code.startswith("KMS."):
        return AccessDenied, "enable the key that encrypts objects there, or allow its use"
    if meaning := _MEANINGS.get(str(status)):
        return meaning
    if status >= 500 and status != 501:
        return _UNAVAILABLE
    unknown = status == 501 or (status == 400 and code in ("", *_UNKNOWN.split()))
    kind = UnknownRequest if unknown else WrongEndpoint
    if code:
        return kind, "the store does not accept this request; check the endpoint"
    return kind, "that is not what an object store says: check the endpoint"


# -- errors of the client --------------------------------------------------------------------------

_NO_STORE = ("Parse(", "Metadata {", "Header {", "Got invalid", "NotPartial", "UnexpectedRange")
"""What obstore says of a response that it cannot understand."""


def client_error(error: Exception, place: Place) -> StoreError:
    """What an error of obstore means behind which there is no response. Its words name the parts
    of the client (reqwest, hyper, rustls) that failed."""
    text = str(error)
    where, proxy = place.where, place.proxy
    way, wrong = (f"proxy {proxy}", ProxyRefused) if proxy else (place.endpoint, WrongEndpoint)
    if "kind: Timeout" in text:
        return TimedOut(f"{where} does not answer")
    if "169.254.169.254" in text or "oauth2" in text or "metadata.google" in text:
        return NoCredentials(
            "no credentials are handed out: name an account or a key, or give this machine a role"
        )
    if "InvalidCertificate" in text:
        return _certificate_error(text, where)
    if "InvalidContentType" in text or "InvalidMessage" in text:
        return TLSRefused(
            f"{where} refuses TLS: is the endpoint http:// rather than https://?",
            setting="endpoint",
        )
    if "AlertReceived" in text:
        return TLSRefused(f"{where} refuses TLS: it wants to know who asks, or another version")
    if "ProxyAuthRequired" in text or "proxy authorization" in text:
        return ProxyRefused(f"the {way} answered 407: correct user and password in HTTPS_PROXY")
    if "dns error" in text:
        if "Temporary failure" in text:
            return Unavailable(f"no name server says for now where {way} is")
        return wrong(f"the name of {way} cannot be resolved: check it")
    if "ConnectionRefused" in text:
        return Unavailable(f"nothing listens at {way}: it is down, or elsewhere")
    if "InvalidRangeRequest" in text:
        return LengthMismatch("the object is shorter than expected")
    if any(words in text for words in _NO_STORE):
        return WrongEndpoint(
            f"{where} does not answer as an object store would: check the endpoint"
        )
    if "InvalidPath" in type(error).__name__ or "parsing Path" in text:
        return WrongEndpoint(
            f"{where} lists names with empty parts: write a url whose prefix is kvtier's own",
            setting="url",
        )
    return Unavailable(f"the connection to {where} broke")


def _certificate_error(text: str, where: str) -> TLSRefused:
    said = f"the certificate of {where} is not trusted"
    if "NotValidForName" in text:
        remedy = "write the endpoint as its certificate does, or addressing: path"
        return TLSRefused(f"{said} (another host's): {remedy}", setting="endpoint")
    if "CaUsedAsEndEntity" in text:
        remedy = "have its authority sign one for the server (CA:FALSE), and name the authority"
        return TLSRefused(f"{said} (it is an authority's own): {remedy} as ca_bundle")
    if "Expired" in text or "NotValidYet" in text:
        remedy = "have it renewed, if the clock of this machine is right"
        return TLSRefused(f"{said} (out of its time): {remedy}", setting="clock")
    return TLSRefused(f"{said}: name its authority as ca_bundle")
