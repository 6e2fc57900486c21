"""Closing a tier: what matters most first, within seconds, whatever the store does."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.object.manual_keepers import opened

from kvtier.backends.object.housekeeping import keeper as keeper_module
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import StoreError, TimedOut
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome
from kvtier.backends.object.stores.wrapper import RevocableStore
from kvtier.testing.subject import NAMESPACE, make_keys

KEYS = make_keys(4)


class WatchedStore(FileStore):
    """Remembers calls, and how long each might take; some may fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, str]] = []
        self.longest_s = 0.0
        self.fails: Any = None

    def _note(self, what: str, name: str, deadline: float | None) -> None:
        self.calls.append((what, name))
        left = float("inf") if deadline is None else deadline - time.monotonic()
        self.longest_s = max(self.longest_s, left)
        if self.fails is not None and self.fails(what, name):
            raise TimedOut("it takes too long")

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        self._note("put", name, more.get("deadline"))
        return super().put(name, buffers, **more)

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        self._note("list", prefix, more.get("deadline"))
        return super().list(prefix, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        self._note("delete", names[0] if names else "", more.get("deadline"))
        return super().delete(names, **more)


def busy(store: FileStore) -> Keeper:
    """With something of each kind still to do."""
    keeper, _ = opened(store)
    for key in KEYS:
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(12288))])
    keeper.outbox.added(KEYS[1:], [0] * 3, [12288] * 3)
    keeper.outbox.delete(1, [(KEYS[0], 0)])
    keeper.outbox.removed(KEYS[:1], [0])
    keeper.uses.note(KEYS)
    return keeper


def test_what_matters_most_comes_first_and_all_in_few_requests(tmp_path: Path) -> None:
    store = WatchedStore(tmp_path / "store")
    keeper = busy(store)
    store.calls.clear()
    store.longest_s = 0.0
    keeper.close()
    kinds = [
        (what, next(kind for kind in ("blocks", "manifest", "claims", "uses") if kind in name))
        for what, name in store.calls
    ]
    assert kinds == [
        ("delete", "blocks"),
        ("put", "manifest"),
        ("put", "claims"),
        ("delete", "claims"),
        ("put", "uses"),
        ("list", "uses"),
    ]
    assert store.longest_s <= keeper_module._CLOSE_S
    [claim] = [info.name for info in store.list("claims/")]
    assert claim.endswith("-cn")
    assert "-0-" in claim, "nothing is left to be found"


@pytest.mark.parametrize("stuck", ["blocks", "manifest", "claims", "uses"])
def test_a_request_that_fails_at_the_end_is_said_once_and_keeps_no_other_from_being_made(
    tmp_path: Path, stuck: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = WatchedStore(tmp_path / "store")
    keeper = busy(store)
    store.fails = lambda what, name: stuck in name
    keeper.close()
    store.fails = None
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == (stuck in ("manifest", "claims"))
    claims = [info.name for info in store.list("claims/")]
    assert claims[-1].endswith("-cn") == (stuck != "claims")
    clean = "-0-" in claims[-1].replace(NAMESPACE.id, "")
    assert clean == (stuck == "uses"), "what may be there unknown to manifests stays claimed"
    stated = len(Journal(store, NAMESPACE).read_all())
    assert stated == (0 if stuck == "manifest" else 4)


def test_deleting_much_does_not_keep_what_was_stored_from_being_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletes take all the time that they are given."""
    monkeypatch.setattr(keeper_module, "_CLOSE_SHARES", (0.5, 0.0))
    store = WatchedStore(tmp_path / "store")
    keeper = busy(store)
    store.calls.clear()
    keeper.close()
    assert store.calls[0][0] == "put"
    assert len(Journal(store, NAMESPACE).read_all()) == 4
    [claim] = [info.name for info in store.list("claims/")]
    assert "-0-" not in claim.replace(NAMESPACE.id, ""), "what is still there stays claimed"


def test_who_is_in_the_midst_of_something_ends_with_its_present_request(tmp_path: Path) -> None:
    """The keeper reads page after page of a listing that never ends."""
    listing, gone_on = threading.Event(), threading.Event()

    class Endless(WatchedStore):
        endless = False

        def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
            if self.endless and prefix.endswith("/manifest/"):
                for number in itertools.count():
                    listing.set()
                    if number > 10:
                        gone_on.wait(0.01)
                    yield ObjectInfo(f"{prefix}{0:016x}-{0:010d}", 0, 0.0)
            yield from super().list(prefix, **more)

    store = Endless(tmp_path / "store")
    keeper = busy(store)
    store.endless = True
    keeper.schedule.next_look = 0.0
    keeper.start()
    assert listing.wait(60)
    keeper.close()
    store.endless = False
    assert len(Journal(store, NAMESPACE).read_all()) == 4


def test_a_store_that_is_revoked(tmp_path: Path) -> None:
    inner = WatchedStore(tmp_path / "store")
    revocable = RevocableStore(inner)
    revocable.put("a", [memoryview(b"1")])
    revocable.put("b", [memoryview(b"2")])
    listed = revocable.list()
    assert next(listed).name == "a"
    revocable.revoke()
    for call in (
        lambda: next(listed),
        lambda: revocable.head("a"),
        lambda: list(revocable.list()),
    ):
        with pytest.raises(TimedOut):
            call()
    revocable.revoke(time.monotonic() + 60.0)
    inner.longest_s = 0.0
    assert [info.name for info in revocable.list(deadline=time.monotonic() + 1000.0)] == [
        "a",
        "b",
    ]
    revocable.delete(["a"])
    assert inner.longest_s <= 60.0
    assert repr(revocable) == f"RevocableStore({inner!r})"


def test_what_nobody_thought_of_ends_no_keeper_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory runs out, say, while a manifest is read: the next look may well succeed."""
    thrice, looked = threading.Event(), threading.Event()

    class Astray(WatchedStore):
        left = 0

        def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
            if self.left:
                self.left -= 1
                if not self.left:
                    thrice.set()
                raise MemoryError
            if thrice.is_set():
                looked.set()
            return super().list(prefix, **more)

    store = Astray(tmp_path / "store")
    keeper = busy(store)
    store.left = 3
    keeper.schedule.next_look = 0.0
    keeper.limits = msgspec.structs.replace(keeper.limits, refresh_s=0.01)
    keeper.schedule._refresh_s = 0.01
    keeper.start()
    assert looked.wait(60)
    keeper.close()
    [said] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert said.exc_info is not None
