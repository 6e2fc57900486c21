"""What an S3 answer that is not a success means: one table, at the edge.

Of a server's answer only its status, its error code and a few fields are ever quoted: error bodies
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
_TOKEN_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "InvalidTokenId",
    "TokenRefreshRequired",
}
_CLOCK_CODES = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_FULL_CODES = {
    "QuotaExceeded",
    "ObjectQuotaExceeded",
    "ServiceQuotaExceeded",
    "InsufficientStorage",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
}
_WEATHER_CODES = {
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
"""Of a 400 from a store that does not know what it was asked for. Others are of what was sent."""
_KEY_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AccountProblem"}


def error_code(body: bytes) -> str:
    """The error code in an S3 error body, empty where there is none."""
    found = _CODE.search(body)
    return found.group(1).decode() if found else ""


def explain_answer(
    status: int, code: str, headers: Mapping[str, str], where: str, *, reading: bool = False
) -> StoreError:
    """The error for an answer of this status and code from the bucket or endpoint `where`, when one
    object was to be read, or for anything else."""
    error = _explained(status, code, headers, where)
    if reading and status != 401 and type(error) is AccessDenied and code not in _KEY_CODES:
        said = str(error).partition(": ")[0]
        return Forbidden(f"{said}: allow these credentials to read the object, and to use its key")
    return error


def _explained(status: int, code: str, headers: Mapping[str, str], where: str) -> StoreError:
    said = f"{where} answered {status}{' ' + code if code else ''}"
    if status == 429 or code in _RATE_CODES or (status == 503 and code != "ServiceUnavailable"):
        return RateLimited(f"{said}: fewer requests, please", retry_after_s=_retry_after_s(headers))
    return _by_code(status, code, headers, said) or _by_status(status, code, said)


def _by_code(status: int, code: str, headers: Mapping[str, str], said: str) -> StoreError | None:
    if code == "NoSuchBucket":
        return NoSuchBucket(f"{said}: create the bucket or correct its name in the url")
    if code in _TOKEN_CODES:
        return ExpiredToken(f"{said}: renew the session token of these credentials")
    if code in _CLOCK_CODES:
        return ClockSkew(f"{said}: the clock of this machine is wrong; set it by NTP")
    if code in _REGION_CODES or status in (301, 302, 307, 308):
        region = headers.get("x-amz-bucket-region", "")
        hint = f"set region to {region}" if _REGION.fullmatch(region) else "correct the region"
        return WrongRegion(f"{said}: the bucket is elsewhere; {hint} (and the endpoint, if any)")
    if code in _FULL_CODES or status == 507:
        return StoreFull(f"{said}: the store is full; lower the capacity or run gc")
    if code in _KEY_CODES:
        return AccessDenied(f"{said}: the access key or its secret is wrong")
    if code.startswith("KMS."):
        return AccessDenied(f"{said}: enable the key that encrypts objects there, or allow its use")
    if code == "EntityTooLarge":
        return ObjectTooLarge(f"{said}: the store does not take objects of this size")
    if code == "InvalidObjectState":
        return Archived(f"{said}: the object is archived; exempt this prefix from that rule")
    if code == "InvalidRange":
        return LengthMismatch(f"{said}: the object is shorter than expected")
    if code in _WEATHER_CODES:
        return Unavailable(said, retry_after_s=_retry_after_s(headers))
    return None


def _by_status(status: int, code: str, said: str) -> StoreError:
    if status == 407:
        return ProxyRefused(f"{said}: correct user and password in HTTP_PROXY")
    if status in (401, 403):
        return AccessDenied(
            f"{said}: allow these credentials to list the bucket and to get, put and delete objects"
        )
    if status == 409:
        return Conflict(f"{said}: another writer has this name in hand")
    if status == 413:
        return ObjectTooLarge(f"{said}: the store does not take objects of this size")
    if status == 416:
        return LengthMismatch(f"{said}: the object is shorter than expected")
    if status == 408 or (status >= 500 and status != 501):
        return Unavailable(said)
    unknown = status == 501 or (status == 400 and code in _UNKNOWN_CODES)
    kind = UnknownRequest if unknown else WrongEndpoint
    if code:
        return kind(f"{said}: the store does not accept this request; check the endpoint")
    return kind(f"{said}, but not as an S3 store would: check the endpoint")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    stated = headers.get("retry-after", "")
    return min(float(stated), _RETRY_AFTER_MAX_S) if stated.isdecimal() else 0.0
