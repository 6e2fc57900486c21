"""What an S3 response that is not a success means.

Messages quote only the status, the error code and a few header fields of a response: error bodies
repeat access keys, tokens and signatures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Archived,
    ClockSkew,
    Conflict,
    ExpiredToken,
    Forbidden,
    LengthMismatch,
    NoSuchBucket,
    ObjectTooLarge,
    ProxyRefused,
    RateLimited,
    StoreError,
    StoreFull,
    Unavailable,
    UnknownRequest,
    WrongEndpoint,
    WrongRegion,
)

_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9_.]{1,80})\s*</Code>")
_REGION = re.compile(r"[a-z0-9-]{2,32}")
_RETRY_AFTER_MAX_S = 60.0

MISSING_CODES = ("NoSuchKey", "NotFound")
_RATE_CODES = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
    "RequestThrottled",
    "BandwidthLimitExceeded",
}
_REGION_CODES = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_TRANSIENT_CODES = {
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "IncompleteBody",
    "OperationAborted",
}
_UNKNOWN_CODES = {
    "",
    "BadRequest",
    "InvalidArgument",
    "InvalidRequest",
    "NotImplemented",
    "NotSupported",
    "UnsupportedHeader",
    "UnsupportedOperation",
}
"""A 400 with one of these says that the store does not know such a request."""
_KEY_CODES = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AccountProblem")
_Meaning = tuple[type[StoreError], str]
_FULL: _Meaning = StoreFull, "the store is full; lower the capacity or run gc"
_TOO_LARGE: _Meaning = ObjectTooLarge, "the store does not take objects of this size"
_TOO_SHORT: _Meaning = LengthMismatch, "the object is shorter than expected"
_TOKEN: _Meaning = ExpiredToken, "renew the session token of these credentials"
_CLOCK: _Meaning = ClockSkew, "the clock of this machine is wrong; set it by NTP"
_BY_CODE: dict[str, _Meaning] = {
    "NoSuchBucket": (NoSuchBucket, "create the bucket or correct its name in the url"),
    "EntityTooLarge": _TOO_LARGE,
    "InvalidObjectState": (Archived, "the object is archived; exempt this prefix from that rule"),
    "InvalidRange": _TOO_SHORT,
    "ExpiredToken": _TOKEN,
    "ExpiredTokenException": _TOKEN,
    "InvalidToken": _TOKEN,
    "InvalidTokenId": _TOKEN,
    "TokenRefreshRequired": _TOKEN,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "RequestInTheFuture": _CLOCK,
    "QuotaExceeded": _FULL,
    "ObjectQuotaExceeded": _FULL,
    "ServiceQuotaExceeded": _FULL,
    "InsufficientStorage": _FULL,
    "XMinioStorageFull": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    **dict.fromkeys(_KEY_CODES, (AccessDenied, "the access key or its secret is wrong")),
}
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


def error_code(body: bytes) -> str:
    """The error code in an S3 error body, empty if there is none."""
    found = _CODE.search(body)
    return found.group(1).decode() if found else ""


def response_error(
    status: int, code: str, headers: Mapping[str, str], where: str, *, reading: bool = False
) -> StoreError:
    """The error for a response of this status and code from the bucket or endpoint `where`.
    `reading`: the request was to read one object."""
    error = _error_for(status, code, headers, where)
    if reading and status != 401 and type(error) is AccessDenied and code not in _KEY_CODES:
        said = str(error).partition(": ")[0]
        return Forbidden(f"{said}: allow these credentials to read the object, and to use its key")
    return error


def _error_for(status: int, code: str, headers: Mapping[str, str], where: str) -> StoreError:
    said = f"{where} answered {status}{' ' + code if code else ''}"
    if status == 429 or code in _RATE_CODES or (status == 503 and code != "ServiceUnavailable"):
        return RateLimited(f"{said}: fewer requests, please", retry_after_s=_retry_after_s(headers))
    if meaning := _BY_CODE.get(code):
        kind, remedy = meaning
        return kind(f"{said}: {remedy}")
    if code in _REGION_CODES or status in (301, 302, 307, 308):
        region = headers.get("x-amz-bucket-region", "")
        hint = f"set region to {region}" if _REGION.fullmatch(region) else "correct the region"
        return WrongRegion(f"{said}: the bucket is elsewhere; {hint} (and the endpoint, if any)")
    if code.startswith("KMS."):
        return AccessDenied(f"{said}: enable the key that encrypts objects there, or allow its use")
    if code in _TRANSIENT_CODES:
        return Unavailable(said, retry_after_s=_retry_after_s(headers))
    if meaning := _BY_STATUS.get(status):
        kind, remedy = meaning
        return kind(f"{said}: {remedy}")
    if status == 408 or (status >= 500 and status != 501):
        return Unavailable(said)
    unknown = status == 501 or (status == 400 and code in _UNKNOWN_CODES)
    refused = UnknownRequest if unknown else WrongEndpoint
    if code:
        return refused(f"{said}: the store does not accept this request; check the endpoint")
    return refused(f"{said}, but not as an S3 store would: check the endpoint")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    stated = headers.get("retry-after", "")
    return min(float(stated), _RETRY_AFTER_MAX_S) if stated.isdecimal() else 0.0
