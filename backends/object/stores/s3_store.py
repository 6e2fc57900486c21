"""Any S3-compatible bucket as an object store.

Objects travel over our own connections, straight from and into the caller's memory. All requests
have the same deadlines, certificates and errors.
"""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Iterator, Mapping, Sequence

from kvtier.backends.object.client.bucket_client import (
    ERROR_BODY_BYTES_MAX,
    BucketClient,
    error_body,
)
from kvtier.backends.object.client.deletes import Deletes
from kvtier.backends.object.client.http.connection import Response
from kvtier.backends.object.client.listing import Page, list_query, name_from_key
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.client.status_errors import MISSING_CODES, error_code
from kvtier.backends.object.stores.errors import (
    EndlessListing,
    StoreError,
    UnknownRequest,
    WrongEndpoint,
)
from kvtier.backends.object.stores.store import (
    OWN_PREFIX,
    Buffer,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    first_bytes,
    is_name,
    wrong_length,
)

_PAGES_MAX = 1 << 20
"""Of one listing: pages may hold few of the objects that were asked for, or none of ours."""


class S3Store(Store):
    """A prefix of a bucket. Opening it makes no request."""

    def __init__(self, settings: S3Settings) -> None:
        self._bucket = settings.bucket
        self._total_s = settings.timeouts.total_s
        prefix = settings.prefix.strip("/")
        self._prefix = prefix + "/" if prefix else ""
        self._conditional = settings.conditional_put
        self._client = BucketClient(settings)
        self._deletes = Deletes(self._client)

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r}, prefix={self._prefix!r}, at={self._client.address})"

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
        self, name: str, buffers: Sequence[Buffer], headers: dict[str, str], end: float
    ) -> PutOutcome:
        with self._client.exchange("PUT", self._key(name), end, headers, buffers) as response:
            if response.status in (200, 201, 204):
                body = response.read(ERROR_BODY_BYTES_MAX)
                if error_code(body):  # some stores begin to answer before they have finished
                    raise self._client.error(response, body)
                return PutOutcome.STORED
            if headers and response.status == 412:
                response.read(ERROR_BODY_BYTES_MAX)
                return PutOutcome.ALREADY_THERE
            raise self._client.error(response)

    def get(
        self,
        name: str,
        into: Sequence[Buffer],
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        room = sum(view.nbytes for view in into)
        headers = {}
        if offset is not None:
            headers["range"] = f"bytes={offset}-{offset + room - 1}"
        where = self._client.where
        with self._client.exchange(
            "GET", self._key(name), self._end(deadline), headers
        ) as response:
            if response.status not in (200, 206):
                self._check_missing(response)
                return None
            if replaced_by := _replacement(response.headers):
                raise WrongEndpoint(f"{where} answers with {replaced_by}: look for a proxy between")
            ranged = "content-range" in response.headers  # some servers send it with a 200
            if ranged != ("range" in headers):
                raise WrongEndpoint(f"{where} does not know range requests")
            length = response.length
            if length is None:
                raise WrongEndpoint(f"{where} does not state how long an object is")
            if length > room or (offset is not None and length != room):
                raise wrong_length(name, length)
            response.read_into(first_bytes(into, length))
            return length

    def _check_missing(self, response: Response) -> None:
        """Raises StoreError unless the response says that there is no such object."""
        body = error_body(response)
        code = error_code(body)
        if response.status == 404 and code in MISSING_CODES:
            return
        raise self._client.error(response, body, reading=bool(code))  # a proxy's page has no code

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        with self._client.exchange("HEAD", self._key(name), self._end(deadline)) as response:
            if response.status == 404:
                return None
            if response.status != 200 or response.length is None:
                raise self._client.error(response, reading=True)
            modified_s = _seconds(response.headers.get("last-modified", ""))
            return ObjectInfo(name, response.length, modified_s)

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        start = self._prefix + check_prefix(prefix)
        start_after = self._prefix + after if after else ""
        token = ""
        seen: set[int] = set()
        for _ in range(_PAGES_MAX):
            query = list_query(start, start_after, token)
            page = Page(self._client.query("GET", query, self._end(deadline)))
            first = True
            for found in page:
                if first:  # a store may give a new token for an old page
                    self._check_new(f"first {found.key}", seen)
                    first = False
                name = name_from_key(self._prefix, found.key)
                if name is not None and name > after and is_name(name):
                    yield ObjectInfo(name, found.size, found.modified_s)
            if not page.token:
                return
            token = page.token
            self._check_new(f"token {token}", seen)
        where = self._client.where
        raise EndlessListing(f"{where} lists more than {_PAGES_MAX} pages: {OWN_PREFIX}")

    def _check_new(self, what: str, seen: set[int]) -> None:
        """Raises WrongEndpoint if a listing goes round in a circle."""
        mark = hash(what)
        if mark in seen:
            raise WrongEndpoint(
                f"{self._client.where} lists the same page again: check the endpoint"
            )
        seen.add(mark)

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        keys = [self._key(name) for name in names]
        failed = self._deletes.delete(keys, self._end(deadline))
        return {key.removeprefix(self._prefix): error for key, error in failed.items()}

    @property
    def deletes_at_once(self) -> int:
        return self._deletes.at_once

    def close(self) -> None:
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _end(self, deadline: float | None) -> float:
        return time.monotonic() + self._total_s if deadline is None else deadline


def _replacement(headers: Mapping[str, str]) -> str:
    """What a proxy has put in the place of an object; empty if it is the object. The length of the
    body would not show it."""
    encoding = headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity", "aws-chunked"):  # the last: as it was sent to the store
        return "something packed in place of an object"
    page = headers.get("content-type", "").lower().startswith("text/html")
    return "a web page in place of an object" if page else ""


def _seconds(http_date: str) -> float:
    """Seconds since the epoch; 0 if the server gives no date that can be read."""
    try:
        return email.utils.parsedate_to_datetime(http_date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
