"""What it means when obstore's client fails, or when a response is not a success.

obstore has few kinds of error, and says the rest in words. Messages here quote only the status and
the error code of a response: bodies repeat access keys, tokens and signatures, and so do urls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvtier.backends.object.stores.clouds import Place
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Archived,
    ClockSkew,
    Conflict,
    ExpiredToken,
    Forbidden,
    LengthMismatch,
    NoCredentials,
    NoSuchBucket,
    ObjectTooLarge,
    ProxyRefused,
    RateLimited,
    StoreError,
    StoreFull,
    TimedOut,
    TLSRefused,
    Unavailable,
    UnknownRequest,
    WrongEndpoint,
    WrongRegion,
)

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]{1,80})\s*</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{2,32})</Region>")
_STATUS = re.compile(r"status code: (\d{3})")
_ONE_OF_MANY = re.compile(r"request failed for key .*\(code: (\w{1,80})\)")
"""What a bulk delete says of one object: a status, or an error code."""
_BODY_CHARS_MAX = 64 << 10

MISSING_CODES = ("NoSuchKey", "NotFound", "BlobNotFound")


def _codes(words: str) -> frozenset[str]:
    return frozenset(words.split())


_RATE_CODES = _codes(
    "SlowDown Throttling ThrottlingException TooManyRequests RequestLimitExceeded RequestThrottled "
    "BandwidthLimitExceeded"
)
_REGION_CODES = _codes(
    "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
    "IllegalLocationConstraintException"
)
_TRANSIENT_CODES = _codes(
    "InternalError ServiceUnavailable RequestTimeout IncompleteBody OperationAborted "
    "OperationTimedOut ContainerBeingDeleted"
)
_UNKNOWN_CODES = _codes(
    "BadRequest InvalidArgument InvalidRequest NotImplemented NotSupported UnsupportedHeader "
    "UnsupportedOperation InvalidHeaderValue"
) | {""}
"""A 400 with one of these says that the store does not know such a request."""
_ROTATED_CODES = _codes("InvalidAccessKeyId SignatureDoesNotMatch InvalidSecurity")
"""Of credentials that were rotated, whether key and secret or the secret alone."""
_KEY_CODES = _ROTATED_CODES | {"AccountProblem", "AuthenticationFailed"}
_Meaning = tuple[type[StoreError], str]
_BUCKET: _Meaning = NoSuchBucket, "create the bucket or correct its name in the url"
_ARCHIVED: _Meaning = Archived, "the object is archived; exempt this prefix from that rule"
_FULL: _Meaning = StoreFull, "the store is full; lower the capacity or run gc"
_TOO_LARGE: _Meaning = ObjectTooLarge, "the store does not take objects of this size"
_TOO_SHORT: _Meaning = LengthMismatch, "the object is shorter than expected"
_TOKEN: _Meaning = ExpiredToken, "renew the session token of these credentials"
_CLOCK: _Meaning = ClockSkew, "the clock of this machine is wrong; set it by NTP"
_DENIED_KEY: _Meaning = AccessDenied, "the access key or its secret is wrong"
_CODES: dict[_Meaning, str] = {
    _BUCKET: "NoSuchBucket ContainerNotFound",
    _TOO_LARGE: "EntityTooLarge",
    _ARCHIVED: "InvalidObjectState BlobArchived",
    _TOO_SHORT: "InvalidRange",
    _TOKEN: "ExpiredToken ExpiredTokenException InvalidToken InvalidTokenId TokenRefreshRequired "
    "InvalidAuthenticationInfo",
    _CLOCK: "RequestTimeTooSkewed RequestExpired RequestInTheFuture",
    _FULL: "QuotaExceeded ObjectQuotaExceeded ServiceQuotaExceeded InsufficientStorage "
    "XMinioStorageFull XMinioAdminBucketQuotaExceeded",
    _DENIED_KEY: " ".join(_KEY_CODES),
}
_BY_CODE = {code: meaning for meaning, codes in _CODES.items() for code in codes.split()}
_DENIED: _Meaning = (
    AccessDenied,
    "allow these credentials to list the bucket and to get, put and delete objects",
)
_BY_STATUS: dict[int, _Meaning] = {
    401: _DENIED,
    403: _DENIED,
    407: (ProxyRefused, "correct user and password in HTTP_PROXY"),
    409: (Conflict, "another writer has this name in hand"),
    413: _TOO_LARGE,
    416: _TOO_SHORT,
    507: _FULL,
}


_NO_STORE = ("Parse(", "Metadata {", "Header {", "Got invalid", "NotPartial", "UnexpectedRange")
"""What obstore says of a response that it cannot understand."""


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
            self.status == 401 or self.code in _ROTATED_CODES or _BY_CODE.get(self.code) == _TOKEN
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
    error = _error_for(response, where)
    reads = reading and status != 401 and type(error) is AccessDenied
    if reads and code and code not in _KEY_CODES:
        said = str(error).partition(": ")[0]
        return Forbidden(f"{said}: allow these credentials to read the object, and to use its key")
    return error


def _error_for(response: Response, where: str) -> StoreError:
    status, code = response.status, response.code
    said = f"{where} answered {status}{' ' + code if code else ''}"
    if status == 429 or code in _RATE_CODES or (status == 503 and code != "ServiceUnavailable"):
        return RateLimited(f"{said}: fewer requests, please")
    if meaning := _BY_CODE.get(code):
        kind, remedy = meaning
        return kind(f"{said}: {remedy}")
    if code in _REGION_CODES or status in (301, 302, 307, 308):
        region = _REGION.search(response.body)
        hint = f"set region to {region.group(1)}" if region else "correct the region"
        return WrongRegion(f"{said}: the bucket is elsewhere; {hint} (and the endpoint, if any)")
    if code.startswith("KMS."):
        return AccessDenied(f"{said}: enable the key that encrypts objects there, or allow its use")
    if code in _TRANSIENT_CODES:
        return Unavailable(said)
    if meaning := _BY_STATUS.get(status):
        kind, remedy = meaning
        return kind(f"{said}: {remedy}")
    if status == 408 or (status >= 500 and status != 501):
        return Unavailable(said)
    unknown = status == 501 or (status == 400 and code in _UNKNOWN_CODES)
    refused = UnknownRequest if unknown else WrongEndpoint
    if code:
        return refused(f"{said}: the store does not accept this request; check the endpoint")
    return refused(f"{said}, but not as an object store would: check the endpoint")


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
