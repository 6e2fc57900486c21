"""A tier over a store that is away, slow, full, lying or emptied by others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvtier.backends.object import BACKEND, ObjectSettings, budget, handler
from kvtier.backends.object.object_names import block_name, parse_block
from kvtier.backends.object.stores.errors import StoreError, StoreFull, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome
from kvtier.backends.object.stores.wrapper import WrappedStore
from kvtier.errors import MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity, Duration
from kvtier.testing.subject import NAMESPACE, blank, make_keys, prove, sealed
from kvtier.types import BlockKey, Outcome, Presence

RECORD = 12288
BLOCKS = 8
_T = TypeVar("_T")


class FailingStore(WrappedStore):
    """A folder whose every call fails while there is an error."""

    def __init__(self, folder: Path) -> None:
        self.inner = FileStore(folder)
        super().__init__(self.inner)
        self.error: StoreError | None = None

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        if self.error is not None:
            raise self.error
        return call(deadline)

    def list(self, *names: Any, **more: Any) -> Iterator[ObjectInfo]:
        return self._call(lambda _: self.inner.list(*names, **more), None)


class Pair:
    """A tier and its handler on one store, and the whole ways in and out."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.store = FailingStore(folder / "store")
        self.settings = ObjectSettings(
            url=f"file://{folder}/store",
            capacity=Capacity(size=ByteSize(BLOCKS * RECORD)),
            refresh=Duration(0.05),
            **settings,  # type: ignore[arg-type]
        )
        context = TierContext(NAMESPACE)
        self.tier = BACKEND.open_tier(self.settings, context, self.store)
        self.handler = BACKEND.open_handler(self.settings, context, self.store)

    def put(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        reserved = self.tier.prepare_store(keys)
        records = [sealed(key) for key in reserved.keys]
        outcomes = self.handler.store(reserved.spec, reserved.keys, records)
        failed = {k: o for k, o in zip(reserved.keys, outcomes, strict=True) if not o.ok}
        self.tier.complete_store(reserved.keys, failed)
        return outcomes

    def get(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        spec = self.tier.prepare_load(keys)
        records = [blank() for _ in keys]
        outcomes = [
            prove(record, key) if outcome.ok else outcome
            for key, record, outcome in zip(
                keys, records, self.handler.load(spec, keys, records), strict=True
            )
        ]
        blamed = {
            k: o
            for k, o in zip(keys, outcomes, strict=True)
            if o in (Outcome.GONE, Outcome.CORRUPT)
        }
        self.tier.complete_load(keys, blamed)
        return outcomes

    def settle(self) -> None:
        self.tier.flush()
        self.tier.refresh()
        self.tier.tick()

    def close(self) -> None:
        self.handler.close()
        self.tier.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_a_store_that_goes_away_and_comes_back(pair: Pair) -> None:
    keys = make_keys(4)
    assert pair.put(keys) == [Outcome.OK] * 4
    pair.store.error = Unavailable("away")
    assert pair.get(keys) == [Outcome.IO_ERROR] * 4
    assert pair.put(make_keys(2, start=50)) == [Outcome.IO_ERROR] * 2
    assert pair.tier.lookup(keys) == [Presence.HIT] * 4  # weather is nothing against a block
    pair.settle()
    pair.store.error = None
    pair.settle()
    assert pair.get(keys) == [Outcome.OK] * 4
    assert pair.put(make_keys(4, start=50)) == [Outcome.OK] * 4
    assert pair.tier.stats().bytes_used == 8 * RECORD


def test_who_starts_beside_a_full_store_serves_what_is_there(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(4)
    pair.put(keys)
    pair.settle()

    def full(*_: object, **__: object) -> PutOutcome:
        raise StoreFull("full: not even an empty object may be added")

    monkeypatch.setattr(FileStore, "put", full)
    late = Pair(tmp_path)
    assert late.get(keys) == [Outcome.OK] * 4
    assert late.tier.prepare_store(make_keys(1, start=50)).keys == []
    monkeypatch.undo()
    late.settle()
    assert late.get(keys) == [Outcome.OK] * 4
    late.close()


def test_a_full_store_is_rid_of_what_is_too_old_though_something_is_to_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else makes room there: it would stay full."""
    pair = Pair(tmp_path, age_max=Duration(3600.0))
    old, [new] = make_keys(3), make_keys(1, start=50)
    pair.put(old)
    pair.settle()
    paths = [tmp_path / "store" / block_name(NAMESPACE.id, key) for key in old]
    for path in paths:
        os.utime(path, (time.time() - 7200.0,) * 2)
    put = FileStore.put

    def take_the_last_block(self: FileStore, name: str, *args: Any, **options: Any) -> PutOutcome:
        if not parse_block(name) and any(path.exists() for path in paths):
            raise StoreFull("full")
        return put(self, name, *args, **options)

    monkeypatch.setattr(FileStore, "put", take_the_last_block)
    assert pair.put([new]) == [Outcome.OK]
    pair.settle()
    assert [path.exists() for path in paths] == [False] * 3
    assert pair.tier.lookup([*old, new]) == [Presence.MISS] * 3 + [Presence.HIT]
    pair.settle()
    pair.close()
    late = Pair(tmp_path)
    assert late.get([new]) == [Outcome.OK]
    late.close()


def test_a_machine_that_slept_between_two_blocks_writes_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(3)
    names = [block_name(NAMESPACE.id, key) for key in keys]
    slept = 0.0
    monkeypatch.setattr(handler, "clock", lambda: budget.clock() + slept)
    put = pair.store.inner.put

    def sleep_behind(*args: object, **options: object) -> PutOutcome:
        nonlocal slept
        slept = 1e6
        return put(*args, **options)  # type: ignore[arg-type]

    pair.store.inner.put = sleep_behind  # type: ignore[method-assign]
    assert pair.put(keys) == [Outcome.OK, Outcome.TIMEOUT, Outcome.TIMEOUT]
    assert [pair.store.inner.head(name) is not None for name in names] == [True, False, False]


def test_lookups_never_wait_for_the_store(pair: Pair) -> None:
    """The keeper hangs in the store; the tier answers."""
    held, release = threading.Event(), threading.Event()
    inner_list = pair.store.inner.list

    def hang(*args: object, **options: object) -> Iterator[ObjectInfo]:
        held.set()
        release.wait()
        return inner_list(*args, **options)  # type: ignore[arg-type]

    keys = make_keys(4)
    pair.put(keys)
    pair.store.list = hang  # type: ignore[method-assign]
    refreshing = threading.Thread(target=pair.tier.refresh)
    refreshing.start()
    assert held.wait(30)
    assert pair.tier.lookup(keys) == [Presence.HIT] * 4
    assert pair.put(make_keys(4, start=9)) == [Outcome.OK] * 4
    pair.tier.forget(keys[:1])
    pair.tier.tick()
    release.set()
    refreshing.join()


@pytest.mark.parametrize("codec", ["none", "zstd", "split-zstd"])
def test_any_codec_is_read_by_every_reader(tmp_path: Path, codec: str) -> None:
    (key,) = make_keys(1)
    record = sealed(key)
    writer = Pair(tmp_path, codec=codec)
    reserved = writer.tier.prepare_store([key])
    assert writer.handler.store(reserved.spec, [key], [record]) == [Outcome.OK]
    writer.tier.complete_store([key])
    writer.close()
    reader = Pair(tmp_path, codec="none")
    into = blank()
    assert reader.handler.load(reader.tier.prepare_load([key]), [key], [into]) == [Outcome.OK]
    assert into[: len(record)] == record
    reader.tier.complete_load([key])
    reader.close()


def test_what_the_user_keeps_in_the_same_place_is_never_touched(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    mine = [
        "notes",
        f"{NAMESPACE.id}/blocks/ab/readme",
        f"{NAMESPACE.id}/manifest/mine",
        f"{NAMESPACE.id}/blocks/00/11/{'ab' * 36}-0",  # almost a block, in the wrong folder
    ]
    for name in mine:
        pair.store.inner.put(name, [memoryview(b"keep me")])
    for start in range(0, 100, 8):
        pair.put(make_keys(8, start=start))
    pair.settle()
    pair.tier.clear()
    pair.settle()
    left = [info.name for info in pair.store.inner.list() if not parse_block(info.name)]
    assert set(mine) <= set(left)
    pair.close()


def test_an_unusable_store_is_refused_or_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FailingStore(tmp_path / "store")
    store.error = Unavailable("nobody there")
    settings = ObjectSettings(
        url=f"file://{tmp_path}/store",
        capacity=Capacity(size=ByteSize(BLOCKS * RECORD)),
        refresh=Duration(0.01),
        unreachable="refuse",
    )
    with pytest.raises(MediumError, match="nobody there"):
        BACKEND.open_tier(settings, TierContext(NAMESPACE), store)
    caplog.set_level(logging.WARNING)
    pair = Pair(tmp_path)
    keys = make_keys(2)
    pair.put(keys)
    pair.close()
    tier = BACKEND.open_tier(
        ObjectSettings(
            url=settings.url,
            capacity=settings.capacity,
            refresh=Duration(0.01),
        ),
        TierContext(NAMESPACE),
        store,
    )
    assert "nobody there" in caplog.text
    assert tier.lookup(keys) == [Presence.MISS] * 2
    store.error = None
    tier.refresh()
    assert tier.lookup(keys) == [Presence.HIT] * 2
    tier.close()
