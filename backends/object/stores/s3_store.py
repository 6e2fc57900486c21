"""Any S3-compatible bucket as an object store.

Objects travel over our own connections, straight from and into the caller's memory. Bulk deletes
are built and parsed by botocore's client and sent over the same connections, so that the same
deadlines, certificates and errors hold for all of them.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal
from urllib.parse import quote, urlsplit

import msgspec

from kvtier import __version__
from kvtier.backends.object.client.bulk_client import BulkClient
from kvtier.backends.object.client.connections import Pool, Response
from kvtier.backends.object.client.credentials import Signer, check_region, request_head
from kvtier.backends.object.client.deletes import Deletes
from kvtier.backends.object.client.endpoint import address, address_of, parts_of
from kvtier.backends.object.client.listing import Page, list_query, name_below
from kvtier.backends.object.client.proxy import proxy_for
from kvtier.backends.object.client.sockets import Timeouts, Trust
from kvtier.backends.object.client.status_errors import MISSING_CODES, error_code, explain_answer
from kvtier.backends.object.stores.errors import (
    EndlessListing,
    ExpiredToken,
    NoSuchBucket,
    ObjectTooLarge,
    StoreError,
    UnknownRequest,
    WrongEndpoint,
    WrongRegion,
)
from kvtier.backends.object.stores.store import (
    OWN_PREFIX,
    Buffer,
    GetOutcome,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    first_bytes,
    is_name,
    wrong_length,
)

_ERROR_BODY_BYTES_MAX = 64 << 10
_PAGE_BYTES_MAX = 8 << 20
_PAGES_MAX = 1 << 20
"""Of one listing: they may hold few of the objects that were asked for, or none that is ours."""
_DELETED = re.compile(rb"<(?:\w+:)?(?:DeleteResult|Error)\b")
_ROTATED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"}
"""Said of credentials that were rotated, whether key and secret or the secret alone; and 401 is."""
_AGENT = {"user-agent": f"kvtier/{__version__}"}
"""Firewalls in front of stores let nobody pass who does not say what he is."""
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a bucket. Credentials never stand here: see `signing`."""

    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    ca_bundle: str | None = None
    profile: str | None = None
    conditional_put: bool = True
    connections: int = 64
    timeouts: Timeouts = Timeouts()


class S3Settings(Reach, frozen=True, kw_only=True):
    """Which bucket, and what every name in it begins with."""

    bucket: str
    prefix: str = ""


class S3Store(Store):
    """A prefix of a bucket. Opening it makes no request."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        prefix = settings.prefix.strip("/")
        self._prefix = prefix + "/" if prefix else ""
        self._conditional = settings.conditional_put
        check_reach(settings)
        self._signer = Signer(settings.region, settings.profile)
        bulk = BulkClient(self._signer, settings.endpoint, settings.bucket, self._send_built)
        endpoint = bulk.endpoint
        bulk.style = style = _addressing(settings, endpoint)
        self._address, base = address(endpoint, settings.bucket, style)
        self._bucket_target = base.rstrip("/") or "/"
        self._base = base + quote(self._prefix, safe="/-_.~")
        self._host = self._address.place.removesuffix(":443" if self._address.tls else ":80")
        self._origin = f"{self._address.scheme}://{self._host}"
        self._where = f"bucket {settings.bucket} at {self._address}"
        self._deletes = Deletes(bulk, self._delete_one)
        ca_bundle = settings.ca_bundle or self._signer.ca_bundle
        proxy = proxy_for(self._address)
        # a proxy carries requests to http:// on; to https:// it is a tunnel
        carried = proxy is not None and not self._address.tls
        self._form = self._origin if carried else ""
        self._extra = _AGENT | (proxy.headers() if proxy is not None and carried else {})
        self._pool = Pool(
            self._address,
            settings.timeouts,
            proxy=proxy,
            tls=Trust(ca_bundle) if self._address.tls else None,
            keep_max=settings.connections,
        )

    def __repr__(self) -> str:
        return f"S3Store({self._settings.bucket!r}, prefix={self._prefix!r}, at={self._address})"

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        end = self._end(deadline)
        if if_absent and self._conditional:
            with contextlib.suppress(UnknownRequest):
                return self._put(name, buffers, {"if-none-match": "*"}, end)
            outcome = self._put(name, buffers, {}, end)
            self._conditional = False  # content-addressed names make overwriting harmless
            return outcome
        return self._put(name, buffers, {}, end)

    def _put(
        self, name: str, buffers: Sequence[Buffer], extra: dict[str, str], end: float
    ) -> PutOutcome:
        size = sum(view.nbytes for view in buffers)
        head = self._request("PUT", name, extra, size, end)
        with self._pool.exchange("PUT", head, buffers, end) as answer:
            if answer.status in (200, 201, 204):
                body = answer.read(_ERROR_BODY_BYTES_MAX)
                if error_code(body):  # some begin to answer before they have finished
                    raise self._explained(answer, body)
                return PutOutcome.STORED
            if extra and answer.status == 412:
                answer.read(_ERROR_BODY_BYTES_MAX)
                return PutOutcome.ALREADY_THERE
            raise self._refusal(answer)

    def get(
        self,
        name: str,
        into: Sequence[Buffer],
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> GetOutcome:
        wanted = sum(view.nbytes for view in into)
        extra = {}
        if offset is not None:
            if wanted == 0:
                return (
                    GetOutcome.FOUND if self.head(name, deadline=deadline) else GetOutcome.MISSING
                )
            extra["range"] = f"bytes={offset}-{offset + wanted - 1}"
        found = self._fetch(name, into, extra, lambda size: size == wanted, self._end(deadline))
        return GetOutcome.MISSING if found is None else GetOutcome.FOUND

    def get_up_to(
        self, name: str, into: Sequence[Buffer], *, deadline: float | None = None
    ) -> int | None:
        room = sum(view.nbytes for view in into)
        return self._fetch(name, into, {}, lambda size: size <= room, self._end(deadline))

    def _fetch(
        self,
        name: str,
        into: Sequence[Buffer],
        extra: dict[str, str],
        fits: Callable[[int], bool],
        end: float,
    ) -> int | None:
        """Read a body that fits into the buffers; its length, None if there is no such object."""
        head = self._request("GET", name, extra, 0, end)
        with self._pool.exchange("GET", head, (), end) as answer:
            if answer.status not in (200, 206):
                self._missing_or_raise(answer)
                return None
            if made := _made_of_it(answer.headers):  # of which the length says nothing
                raise WrongEndpoint(f"{self._where} answers with {made}: look for a proxy between")
            ranged = "content-range" in answer.headers  # some servers send it with a 200
            if ranged != ("range" in extra):
                raise WrongEndpoint(f"{self._where} does not know range requests")
            length = answer.length
            if length is None:
                raise WrongEndpoint(f"{self._where} does not state how long an object is")
            if not fits(length):
                raise wrong_length(name, length)
            answer.read_into(first_bytes(into, length))
            return length

    def _missing_or_raise(self, answer: Response) -> None:
        body = _error_body(answer)
        code = error_code(body)
        if answer.status == 404 and code in MISSING_CODES:
            return
        raise self._explained(answer, body, reading=bool(code))  # a page of a proxy's has none

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        end = self._end(deadline)
        head = self._request("HEAD", name, {}, 0, end)
        with self._pool.exchange("HEAD", head, (), end) as answer:
            if answer.status == 404:
                return None
            if answer.status != 200 or answer.length is None:
                raise self._explained(answer, _error_body(answer), reading=True)
            return ObjectInfo(name, answer.length, _when(answer.headers.get("last-modified", "")))

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        start = self._prefix + check_prefix(prefix)
        behind = self._prefix + after if after else ""
        token = ""
        seen: set[int] = set()  # also what pages begin with: a token may be new for an old page
        for _ in range(_PAGES_MAX):
            page = self._page(list_query(start, behind, token), self._end(deadline))
            first = True
            for found in page:
                if first:
                    self._seen_once(f"first {found.key}", seen)
                    first = False
                name = name_below(self._prefix, found.key)
                if name is not None and name > after and is_name(name):
                    yield ObjectInfo(name, found.size, found.modified_s)
            if not page.token:
                return
            token = page.token
            self._seen_once(f"token {token}", seen)
        raise EndlessListing(f"{self._where} lists more than {_PAGES_MAX} pages: {OWN_PREFIX}")

    def _seen_once(self, what: str, seen: set[int]) -> None:
        mark = hash(what)
        if mark in seen:
            raise WrongEndpoint(f"{self._where} lists the same page again: check the endpoint")
        seen.add(mark)

    def _page(self, query: str, end: float) -> Page:
        target = f"{self._bucket_target}?{query}"
        headers = self._signer.sign("GET", self._origin + target, {"host": self._host}, end)
        head = self._head_of("GET", target, headers, 0)
        with self._pool.exchange("GET", head, (), end) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            body = answer.read(_PAGE_BYTES_MAX)
        return Page(body)

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        keys = [self._prefix + check_name(name) for name in names]
        failed = self._deletes.delete(keys, self._end(deadline))
        return {key.removeprefix(self._prefix): error for key, error in failed.items()}

    @property
    def deletes_at_once(self) -> int:
        return self._deletes.at_once

    def _delete_one(self, key: str, end: float) -> StoreError | None:
        head = self._request("DELETE", key.removeprefix(self._prefix), {}, 0, end)
        with self._pool.exchange("DELETE", head, (), end) as answer:
            done = answer.status in (200, 202, 204)
            body = answer.read(_ERROR_BODY_BYTES_MAX) if done else _error_body(answer)
            code = error_code(body)
            # a 404 without a code is a page of a proxy's, behind which the object may well be
            if code in MISSING_CODES or (done and not code):
                return None
            error = self._explained(answer, body)
            if error.unwell and code != "AccessDenied":  # perhaps to this one
                raise error
            return error

    def close(self) -> None:
        self._pool.close()

    def _request(
        self, method: str, name: str, extra: dict[str, str], body_bytes: int, end: float
    ) -> bytes:
        target = self._base + check_name(name)
        all_headers = {"host": self._host, **extra}
        headers = self._signer.sign(method, self._origin + target, all_headers, end)
        return self._head_of(method, target, headers, body_bytes)

    def _head_of(self, method: str, target: str, headers: dict[str, str], body_bytes: int) -> bytes:
        # not signed: some change it on the way
        plain = {"accept-encoding": "identity"} if method == "GET" else {}
        all_headers = {**headers, **plain, **self._extra}
        return request_head(method, self._form + target, all_headers, body_bytes)

    def _send_built(
        self, method: str, url: str, headers: dict[str, str], body: bytes, deadline: float
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request that botocore has built and signed."""
        parts = urlsplit(url)
        if address_of(parts) != self._address:
            raise WrongRegion(f"{self._where} sends us elsewhere: correct the region or endpoint")
        target = parts.path + ("?" + parts.query if parts.query else "")
        headers.pop("User-Agent", None)  # it is not signed, and ours is like that of all else
        length = headers.pop("Content-Length", None)
        head = self._head_of(method, target, {"host": self._host, **headers}, len(body))
        if length is not None and int(length) != len(body):
            raise WrongEndpoint("a request was built with a body of unknown length")
        with self._pool.exchange(method, head, [memoryview(body)], deadline) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            answered = answer.read(_PAGE_BYTES_MAX)
            # declarations of entities, which botocore's parser would follow, or an answer to
            # something else, in which it would find no errors
            if b"<!" in answered or b"\0" in answered or not _DELETED.search(answered):
                raise WrongEndpoint(f"{self._where} does not answer as an S3 store would")
            return answer.status, answer.headers, answered

    def _refusal(self, answer: Response) -> StoreError:
        return self._explained(answer, _error_body(answer))

    def _explained(self, answer: Response, body: bytes, *, reading: bool = False) -> StoreError:
        code = error_code(body)
        error = explain_answer(answer.status, code, answer.headers, self._where, reading=reading)
        if isinstance(error, ExpiredToken) or code in _ROTATED or answer.status == 401:
            self._signer.renew()
        return error

    def _end(self, deadline: float | None) -> float:
        latest = time.monotonic() + self._settings.timeouts.total_s
        return latest if deadline is None else deadline


def _made_of_it(headers: Mapping[str, str]) -> str:
    """What somebody on the way has put in the place of an object; nothing if it is as it is."""
    encoding = headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity", "aws-chunked"):  # the last: as it was sent to the store
        return "something packed in place of an object"
    page = headers.get("content-type", "").lower().startswith("text/html")
    return "a web page in place of an object" if page else ""


def _error_body(answer: Response) -> bytes:
    """What a server says of an error; where that is a whole web page, the status must do."""
    try:
        return answer.read(_ERROR_BODY_BYTES_MAX)
    except ObjectTooLarge:
        return b""


def check_reach(settings: S3Settings) -> None:
    """Raises Misconfigured on settings that cannot work."""
    if not _BUCKET.fullmatch(settings.bucket):
        raise NoSuchBucket(f"{settings.bucket[:80]!r} is not a bucket name: correct the url")
    if settings.endpoint is not None:
        parts_of(settings.endpoint)
    if settings.region:
        check_region(settings.region)


def _addressing(settings: S3Settings, endpoint: str) -> str:
    """How the bucket is named in a request: in the host's name only where that is known to do."""
    if settings.addressing != "auto":
        return settings.addressing
    own = settings.endpoint is None and (parts_of(endpoint).hostname or "").endswith(_AWS)
    return "virtual" if own and _DNS_BUCKET.fullmatch(settings.bucket) else "path"


def _when(stated: str) -> float:
    """Seconds since the epoch of an HTTP date, 0 if the server gives none that can be read."""
    try:
        return email.utils.parsedate_to_datetime(stated).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
