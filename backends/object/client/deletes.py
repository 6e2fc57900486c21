"""Deletes from a bucket: in bulk, or one by one where the store refuses bulk deletes.

Not every store that speaks S3 knows bulk deletes, and the refusals differ: 501, 405, 400 with any
code, a page of HTML. So every refusal counts that is about the request, and not about these
credentials or this moment. Whether it was one shows when single deletes then work.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from html import escape

from kvtier.backends.object.client.bucket_client import (
    ERROR_BODY_BYTES_MAX,
    BucketClient,
    error_body,
)
from kvtier.backends.object.client.parallel_requests import in_parallel
from kvtier.backends.object.client.status_errors import MISSING_CODES, error_code, response_error
from kvtier.backends.object.client.xml_rows import RowParser
from kvtier.backends.object.stores.errors import (
    ObjectTooLarge,
    RateLimited,
    StoreError,
    WrongEndpoint,
)

_log = logging.getLogger(__name__)

_BULK_KEYS_MAX = 1000
"""The keys that one request may name."""
_FEW = 4
"""So few keys are deleted one by one: whether the store knows bulk deletes does not matter then."""
_SINGLE_BATCH = 32
"""Few enough to end soon: between batches the keeper renews its claim, or closes."""


class Deletes:
    """Deletes keys of one bucket in the way that its store knows. Thread-safe."""

    def __init__(self, client: BucketClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._takes_bulk: bool | None = None
        """None if that is not known yet."""

    @property
    def at_once(self) -> int:
        return _BULK_KEYS_MAX if self._takes_bulk else _SINGLE_BATCH

    def delete(self, keys: Sequence[str], end: float) -> Mapping[str, StoreError]:
        """The keys that the store would not delete, and why; raises StoreError."""
        if len(keys) <= _FEW:
            return _failed(keys, [self._delete_one(key, end) for key in keys])
        if self._takes_bulk is False:
            return self._delete_singly(keys, end)
        failed: dict[str, StoreError] = {}
        try:
            for start in range(0, len(keys), _BULK_KEYS_MAX):
                failed |= self._delete_bulk(keys[start : start + _BULK_KEYS_MAX], end)
        except (WrongEndpoint, ObjectTooLarge) as error:
            singly = self._delete_singly(keys, end)
            if len(singly) < len(keys):
                self._note_refusal(error)
            return singly
        self._takes_bulk = True
        return failed

    def _delete_bulk(self, keys: Sequence[str], end: float) -> dict[str, StoreError]:
        where = self._client.where
        failed: dict[str, StoreError] = {}
        content = self._client.query("POST", "delete", end, *_bulk_request(keys))
        if b"DeleteResult" not in content and (code := error_code(content)):
            raise response_error(500, code, {}, where)  # some send it with status 200
        for key, code in RowParser("DeleteResult", "Error", _key_and_code).rows(content):
            if code in MISSING_CODES:
                continue
            error = response_error(403, code, {}, where)
            busy = isinstance(error, RateLimited) or code == "ServiceUnavailable"
            # it is unknown which keys are deleted, or the error is not about this key
            if key not in keys or busy:
                raise error
            failed[key] = error
        return failed

    def _delete_one(self, key: str, end: float) -> StoreError | None:
        """Why the store would not delete this key. Raises StoreError if the reason is not about
        this key."""
        with self._client.exchange("DELETE", key, end) as response:
            done = response.status in (200, 202, 204)
            body = response.read(ERROR_BODY_BYTES_MAX) if done else error_body(response)
            code = error_code(body)
            # a 404 without a code is a proxy's page, and the object may be behind it
            if code in MISSING_CODES or (done and not code):
                return None
            error = self._client.error(response, body)
            if error.unwell and code != "AccessDenied":  # which may be about this object alone
                raise error
            return error

    def _delete_singly(self, keys: Sequence[str], end: float) -> Mapping[str, StoreError]:
        return _failed(keys, in_parallel(lambda key: self._delete_one(key, end), keys))

    def _note_refusal(self, refusal: StoreError) -> None:
        """A store that took bulk deletes before is tried once more: a proxy may have answered in
        its place."""
        with self._lock:
            before = self._takes_bulk
            self._takes_bulk = None if before else False
        if before is None:
            _log_once(str(refusal).partition(": ")[0])


def _bulk_request(keys: Sequence[str]) -> tuple[dict[str, str], bytes]:
    """Header fields and body of a request to delete these keys and to report only errors. Some
    stores insist on an MD5 sum."""
    named = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    named = named.replace("\r", "&#xD;").replace("\n", "&#xA;")  # parsers would change line ends
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    body = f'<Delete xmlns="{space}">{named}<Quiet>true</Quiet></Delete>'.encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    headers = {"content-md5": base64.b64encode(digest).decode(), "content-type": "application/xml"}
    return headers, body


def _key_and_code(fields: Mapping[str, str]) -> tuple[str, str]:
    return fields.get("Key", ""), fields.get("Code", "")


@functools.lru_cache  # a tier has several clients of one store
def _log_once(refusal: str) -> None:
    _log.warning("%s to a bulk delete: objects are deleted one by one", refusal)


def _failed(keys: Sequence[str], outcomes: Sequence[StoreError | None]) -> Mapping[str, StoreError]:
    return {key: error for key, error in zip(keys, outcomes, strict=True) if error is not None}
