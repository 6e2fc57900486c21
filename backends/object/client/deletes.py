"""Deleting from a bucket: by the thousand, or one by one where the store refuses that.

Not every store that speaks S3 knows bulk deletes, and what they say to one differs: 501, 405, 400
with any code, a page of HTML. So whatever is a refusal of the request, and not of these credentials
or of this moment, is taken for that; single deletes then show whether it was.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from kvtier.backends.object.client.bulk_client import DELETES_MAX, BulkClient
from kvtier.backends.object.client.parallel_requests import in_parallel
from kvtier.backends.object.stores.errors import ObjectTooLarge, StoreError, WrongEndpoint

_log = logging.getLogger(__name__)

_FEW = 4
"""So many cost less one by one than botocore's building and parsing of a bulk request."""
_SINGLY = 32
"""Few enough to end soon: between portions claims are renewed, and who closes goes."""

DeleteOne = Callable[[str, float], StoreError | None]
"""A key and a deadline; why the store would not delete it. Raises StoreError if it is no matter of
this key."""


class Deletes:
    """Deletes keys of one bucket, in the way that its store knows. Thread-safe."""

    def __init__(self, bulk: BulkClient, one: DeleteOne) -> None:
        self._bulk = bulk
        self._one = one
        self._lock = threading.Lock()
        self._takes_bulk: bool | None = None
        """None: that must be tried."""

    @property
    def at_once(self) -> int:
        return DELETES_MAX if self._takes_bulk else _SINGLY

    def delete(self, keys: Sequence[str], end: float) -> Mapping[str, StoreError]:
        """The keys that the store would not delete, and why; raises StoreError."""
        if len(keys) <= _FEW:
            return _failed(keys, [self._one(key, end) for key in keys])
        if self._takes_bulk is False:
            return self._singly(keys, end)
        try:
            failed = self._bulk.delete(keys, end)
        except (WrongEndpoint, ObjectTooLarge) as error:
            refusal = error
        else:
            self._takes_bulk = True
            return failed
        failed = self._singly(keys, end)
        if len(failed) < len(keys):
            self._remember(refusal)
        return failed

    def _singly(self, keys: Sequence[str], end: float) -> Mapping[str, StoreError]:
        return _failed(keys, in_parallel(lambda key: self._one(key, end), keys))

    def _remember(self, refusal: StoreError) -> None:
        """Try once more before a store that took bulk deletes is believed that it does not: a page
        of a proxy's may have stood in its way."""
        with self._lock:
            before = self._takes_bulk
            self._takes_bulk = None if before else False
        if before is None:
            _say(str(refusal).partition(": ")[0])


@functools.lru_cache  # a tier has several clients of one store
def _say(refusal: str) -> None:
    _log.warning("%s to a bulk delete: objects are deleted one by one", refusal)


def _failed(keys: Sequence[str], outcomes: Sequence[StoreError | None]) -> Mapping[str, StoreError]:
    return {key: error for key, error in zip(keys, outcomes, strict=True) if error is not None}
