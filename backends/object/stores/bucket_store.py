"""A bucket of any cloud as an object store, by obstore: a client in Rust, with its own threads.

obstore's calls block and know one timeout for all of them. So a call that has less time than that
is made by a thread which its caller leaves behind at the call's own deadline.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.clouds import BucketSettings, Place, find_place, obstore_module
from kvtier.backends.object.stores.reader import Reader, Unreachable
from kvtier.backends.object.stores.store import (
    OWN_PREFIX,
    Buffer,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    in_parallel,
    is_name,
    wrong_length,
)
from kvtier.system.calls import AbandonableCalls

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_PAGE = 1000
_PAGES_MAX = 1 << 20
"""Of one listing: pages may hold few of the objects that were asked for, or none of ours."""
_SIGNED_FOR = timedelta(minutes=5)
_REPEATS_MAX = 16
"""Some stores list an object twice that is written meanwhile."""
_SOON_S = 0.1
_FEW = 4
"""So few objects are deleted one by one: whether the store knows bulk deletes does not matter."""
_SINGLE_BATCH = 32
"""Few enough to end soon: between batches the caretaker confirms its lease."""


class _Clients(NamedTuple):
    """obstore's clients of one bucket: an upload may keep it waiting longer than a read."""

    place: Place
    reads: Any
    writes: Any
    singles: Any
    """Deletes one object by a request of its own."""
    reader: Reader | None


class BucketStore(Store):
    """A prefix of a bucket. Opening it makes no request."""

    def __init__(self, settings: BucketSettings) -> None:
        self._settings = settings
        self._timeouts = settings.timeouts
        self._conditional = settings.conditional_put
        self._takes_bulk: bool | None = None
        """Whether the store knows bulk deletes; None if that is not known yet."""
        self._lock = threading.Lock()
        self._calls = AbandonableCalls("kvtier-store", 4 * settings.connections)
        self._obstore = obstore_module("obstore")
        self._connected: _Clients | None = self._connect()

    def __repr__(self) -> str:
        settings = self._settings
        place = self._connected.place.endpoint if self._connected else "?"
        return f"BucketStore({settings.bucket!r}, prefix={settings.prefix!r}, at={place})"

    def _connect(self) -> _Clients:
        place = find_place(self._settings)
        reads = place.open(self._timeouts.idle_s)
        writes = place.open(self._timeouts.upload_s)
        single = {"disable_bulk_delete": True} if self._settings.cloud == "s3" else {}
        singles = place.open(self._timeouts.idle_s, **single)
        reader = None
        if place.direct:
            sign = functools.partial(self._sign, reads, place.chain is None)
            reader = Reader(place, sign, self._bounded)
        return _Clients(place, reads, writes, singles, reader)

    def _sign(self, client: Any, hangs: bool, name: str, end: float) -> str:
        """The url of an object to GET. `hangs`: obstore may have to ask for credentials first."""

        def sign() -> str:
            return str(self._obstore.sign(client, "GET", name, _SIGNED_FOR))

        return self._bounded(sign, end, "a signature") if hangs else sign()

    def _bounded(self, call: Callable[[], _T], end: float, what: str) -> _T:
        """What the call returns or raises; TimedOut at `end`."""
        left = end - time.monotonic()
        if left <= 0:
            raise errors.TimedOut(f"no time left for {what}")
        try:
            return self._calls.run(call, left)
        except TimeoutError:
            raise errors.TimedOut(f"{what} did not end in time") from None
        except RuntimeError as error:
            raise errors.Unavailable(f"no thread makes the request: {error}") from error

    def _clients(self, end: float) -> _Clients:
        """The clients, made anew after a certificate was refused: the authorities may have been
        replaced. Credentials are looked up here, where a caller waits no longer than its call."""
        with self._lock:
            if self._connected is None:
                self._connected = self._connect()
            found = self._connected
        if found.place.chain is not None:
            found.place.chain.credentials(end)
        return found

    def _call(
        self,
        what: str,
        call: Callable[[_Clients], _T],
        deadline: float | None,
        *,
        reading: bool = False,
        may_miss: bool = False,
        once: bool = False,
    ) -> _T:
        """Make a call of obstore; raises StoreError. `may_miss`: raises FileNotFoundError if there
        is no such object. `once`: it is a single request, which the client's own timeout ends; if
        that is soon enough, no other thread is needed."""
        end = self._end(deadline)
        clients = self._clients(end)
        try:
            if once and end - time.monotonic() > self._timeouts.total_s - _SOON_S:
                return call(clients)
            return self._bounded(functools.partial(call, clients), end, what)
        except errors.StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - obstore's errors have no base of their own
            response = errors.response_in(error)
            if may_miss and response is not None and response.missing:
                raise FileNotFoundError(what) from None
            if response is not None:
                raise self._meaning(response, clients.place, reading=reading) from None
            raise self._client_meaning(error, clients.place) from None
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise errors.Unavailable(
                f"obstore itself failed at {what}"
            ) from error  # a panic in Rust

    def _client_meaning(self, error: Exception, place: Place) -> errors.StoreError:
        meaning = errors.client_error(error, place)
        if isinstance(meaning, errors.TLSRefused):
            self._connected = None  # the authorities are read anew
        return meaning

    def _meaning(
        self, response: errors.Response, place: Place, *, reading: bool
    ) -> errors.StoreError:
        if response.rotated and place.chain is not None:
            place.chain.renew()
        return errors.response_error(response, place.where, reading=reading)

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        check_name(name)
        views = [view.cast("B") for view in buffers if view.nbytes]
        body: Any = views[0] if len(views) == 1 else views or b""
        if if_absent and self._conditional:
            with contextlib.suppress(errors.UnknownRequest):
                return self._put(name, body, "create", deadline)
            outcome = self._put(name, body, "overwrite", deadline)
            self._conditional = False  # content-addressed names make overwriting harmless
            return outcome
        return self._put(name, body, "overwrite", deadline)

    def _put(self, name: str, body: Any, mode: str, deadline: float | None) -> PutOutcome:
        def put(clients: _Clients) -> PutOutcome:
            try:
                self._obstore.put(clients.writes, name, body, mode=mode, use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                response = errors.response_in(error)
                code = response.code if response is not None else ""
                if mode == "create" and not code.endswith("Conflict"):
                    return PutOutcome.ALREADY_THERE
                raise
            return PutOutcome.STORED

        return self._call(name, put, deadline, once=True)

    def get(
        self,
        name: str,
        into: Buffer,
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        check_name(name)
        room = len(into)
        end = self._end(deadline)
        clients = self._clients(end)
        if clients.reader is not None:
            with contextlib.suppress(Unreachable):
                found = clients.reader.get(name, into, offset, end)
                if not isinstance(found, errors.Response):
                    return found
                if found.missing:
                    return None
                raise self._meaning(found, clients.place, reading=True)

        def get(clients: _Clients) -> tuple[int, Any]:
            options = None if offset is None else {"range": (offset, offset + room)}
            found = self._obstore.get(clients.reads, name, options=options)
            if replaced_by := errors.replacement(found.attributes):
                where = clients.place.where
                raise errors.WrongEndpoint(
                    f"{where} answers with {replaced_by}: look for a proxy between"
                )
            start, stop = found.range
            if stop - start > room or (offset is not None and stop - start != room):
                raise wrong_length(name, found.meta["size"])
            return stop - start, found.bytes()

        try:
            length, body = self._call(name, get, end, reading=True, may_miss=True, once=True)
        except FileNotFoundError:
            return None
        # without the GIL
        np.copyto(np.frombuffer(into[:length], np.uint8), np.frombuffer(body, np.uint8))
        return length

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        check_name(name)

        def head(clients: _Clients) -> Any:
            try:
                return self._obstore.head(clients.reads, name)
            except FileNotFoundError:  # a HEAD says no more than the status
                return None

        found = self._call(name, head, deadline, reading=True)
        if found is None:
            return None
        return ObjectInfo(name, found["size"], _seconds(found["last_modified"]))

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        # obstore's prefixes are whole folders
        folder = check_prefix(prefix).rpartition("/")[0]
        clients = self._clients(self._end(deadline))
        pages = self._obstore.list(
            clients.reads, folder or None, offset=after or None, chunk_size=_PAGE
        )
        firsts, repeats = set[int](), 0
        for _ in range(_PAGES_MAX):
            page = self._call("a listing", lambda _: next(pages, None), deadline)
            if page is None:
                return
            for at, found in enumerate(page):
                name = found["path"]
                if hash(name) in firsts:  # a store may give a new token for an old page
                    repeats += 1
                    if repeats > _REPEATS_MAX:
                        problem = "lists the same names again and again: check the endpoint"
                        raise errors.WrongEndpoint(f"{clients.place.where} {problem}")
                if at == 0:
                    firsts.add(hash(name))
                if name.startswith(prefix) and name > after and is_name(name):
                    yield ObjectInfo(name, found["size"], _seconds(found["last_modified"]))
        where = clients.place.where
        raise errors.EndlessListing(f"{where} lists more than {_PAGES_MAX} pages: {OWN_PREFIX}")

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, errors.StoreError]:
        names = [check_name(name) for name in names]
        end = self._end(deadline)
        if len(names) <= _FEW or self._takes_bulk is False:
            return self._delete_singly(names, end)
        try:
            gone = self._call("a bulk delete", functools.partial(self._delete_bulk, names), end)
        except (errors.WrongEndpoint, errors.ObjectTooLarge) as error:
            singly = self._delete_singly(names, end)
            if len(singly) < len(names):
                self._note_refusal(error)
            return singly
        self._takes_bulk = True
        return {} if gone else self._delete_singly(names, end)

    def _delete_bulk(self, names: Sequence[str], clients: _Clients) -> bool:
        """Whether all are deleted. obstore names the first that is not, and the others may be."""
        try:
            self._obstore.delete(clients.writes, names)
        except Exception as error:
            if "DeleteFailed" not in str(error):
                raise
            return False
        return True

    def _delete_singly(self, names: Sequence[str], end: float) -> Mapping[str, errors.StoreError]:
        failed = in_parallel(lambda name: self._delete_one(name, end), names)
        return {name: error for name, error in zip(names, failed, strict=True) if error is not None}

    def _delete_one(self, name: str, end: float) -> errors.StoreError | None:
        """Why the store would not delete this object. Raises StoreError if the reason is not about
        this object."""
        try:
            self._call(
                name,
                lambda clients: self._obstore.delete(clients.singles, name),
                end,
                may_miss=True,
            )
        except FileNotFoundError:
            return None
        except errors.StoreError as error:
            if error.unwell and " AccessDenied:" not in str(error):  # which may be this one's alone
                raise
            return error
        return None

    def _note_refusal(self, refusal: errors.StoreError) -> None:
        """A store that took bulk deletes before is tried once more: a proxy may have answered in
        its place."""
        with self._lock:
            before = self._takes_bulk
            self._takes_bulk = None if before else False
        if before is None:
            _log_once(str(refusal).partition(": ")[0])

    @property
    def deletes_at_once(self) -> int:
        return _PAGE if self._takes_bulk else _SINGLE_BATCH

    def close(self) -> None:
        self._calls.close()
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None and connected.reader is not None:
            connected.reader.close()

    def _end(self, deadline: float | None) -> float:
        return time.monotonic() + self._timeouts.total_s if deadline is None else deadline


def _seconds(when: datetime | None) -> float:
    """Seconds since the epoch; 0 if the server gives no date."""
    return when.timestamp() if when is not None else 0.0


@functools.lru_cache  # a tier has several clients of one store
def _log_once(refusal: str) -> None:
    _log.warning("%s to a bulk delete: objects are deleted one by one", refusal)
