"""Closing a tier: what matters most first, within seconds, whatever the store does."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import RECORD, opened

from kvtier.backends.object import keeper as keeper_module
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
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
        self.calls: list[str] = []
        self.longest_s = 0.0
        self.fails: Any = None

    def _note(self, what: str, name: str, deadline: float | None) -> None:
        kinds = ("manifest", "servers", "caretaker", "namespace.json", "uses", "blocks")
        self.calls.append(f"{what} {next(kind for kind in kinds if kind in name)}")
        left = float("inf") if deadline is None else deadline - time.monotonic()
        self.longest_s = max(self.longest_s, left)
        if self.fails is not None and self.fails(name):
            raise TimedOut("it takes too long")

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        if "/blocks/" not in name:
            self._note("put", name, more.get("deadline"))
        return super().put(name, buffers, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        for name in names:
            self._note("delete", name, more.get("deadline"))
        return super().delete(names, **more)


def busy(store: FileStore) -> Keeper:
    """With something of each kind still to do."""
    keeper, _ = opened(store)
    for key in KEYS:
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    keeper.outbox.added(KEYS[1:], [0] * 3, [RECORD] * 3)
    keeper.outbox.removed([(KEYS[0], 0)])
    keeper.uses.note(KEYS)
    return keeper


def test_what_matters_most_comes_first_and_all_in_few_requests(tmp_path: Path) -> None:
    store = WatchedStore(tmp_path / "store")
    keeper = busy(store)
    store.calls.clear()
    store.longest_s = 0.0
    keeper.close()
    assert store.calls == [
        "put manifest",
        "delete servers",
        "put caretaker",
        "put namespace.json",
        "put uses",
    ]
    assert store.longest_s <= keeper_module._CLOSE_S
    assert list(store.list("servers/")) == []
    late, _ = opened(store)
    assert late.caretaker is not None, "its place is free at once"
    late.close()


@pytest.mark.parametrize("stuck", ["manifest", "servers", "caretaker", "namespace.json", "uses"])
def test_a_request_that_fails_at_the_end_is_logged_once(
    tmp_path: Path, stuck: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = WatchedStore(tmp_path / "store")
    keeper = busy(store)
    store.fails = lambda name: stuck in name
    keeper.close()
    store.fails = None
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == (stuck != "uses")
    recorded = len(Journal(store, NAMESPACE.id).read_all())
    assert recorded == (0 if stuck == "manifest" else 4)
    late, _ = opened(store)
    assert late.caretaker is not None, "it is not alive, whatever lies there"
    late.close()


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
    keeper._next_look = 0.0
    keeper.start()
    assert listing.wait(60)
    keeper.close()
    store.endless = False
    assert len(Journal(store, NAMESPACE.id).read_all()) == 4


def test_closing_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_module, "_CLOSE_S", 0.1)
    held, release, closed = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Iterator[ObjectInfo]:
        held.set()
        assert release.wait(60)
        return iter(())

    store = FileStore(tmp_path / "store")
    keeper = busy(store)
    keeper._next_look = 0.0
    store.list = hang  # type: ignore[method-assign]
    store.close = closed.set  # type: ignore[method-assign]
    keeper.start()
    assert held.wait(60)
    keeper.close()
    assert "does not answer" in caplog.text
    assert closed.is_set(), "connections that nobody uses are not left behind"
    release.set()
    assert keeper._thread is not None
    keeper._thread.join(60)


def test_a_store_that_is_revoked(tmp_path: Path) -> None:
    inner = FileStore(tmp_path / "store")
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
    assert [info.name for info in revocable.list()] == ["a", "b"]
    revocable.delete(["a"])
    assert inner.head("a") is None
