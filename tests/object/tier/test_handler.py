"""What a handler does with room that is not its own yet or any more, and with what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import LockedStore

from kvtier.backends.object import handler as handler_module
from kvtier.backends.object.handler import ObjectHandler, ObjectSpec
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import StoreError, StoreFull, TimedOut, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.record.codec import Codec
from kvtier.record.record import Header, seal, verify
from kvtier.testing.subject import NAMESPACE, blank, make_keys, sealed
from kvtier.types import Outcome

KEYS = make_keys(2)
VICTIMS = [block_name(NAMESPACE.id, key) for key in make_keys(2, start=10)]
NAMES = [block_name(NAMESPACE.id, key) for key in KEYS]
OK = Outcome.OK


class Watched(LockedStore):
    """Says in which order it was asked, and refuses what it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []
        self.error: StoreError | None = None
        self.between: Callable[[], None] = lambda: None

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        self.asked.append(f"put {name}")
        if self.error is not None:
            raise self.error
        return super().put(name, buffers, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        self.asked += [f"delete {name}" for name in names]
        failed = super().delete(names, **more)
        self.between()
        return failed


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


@pytest.fixture
def handler(store: Watched) -> ObjectHandler:
    return ObjectHandler(store, NAMESPACE, Codec.RAW, threads=1, load_s=10, store_s=10)


def put(handler: ObjectHandler, until: float = 1e18) -> list[Outcome]:
    """Both blocks, in the room of the victims."""
    spec = ObjectSpec([0, 0], [[VICTIMS[0]], [VICTIMS[1]]], until)
    return handler.store(spec, KEYS, [sealed(key) for key in KEYS])


def test_what_was_evicted_goes_before_anything_is_written(
    store: Watched, handler: ObjectHandler
) -> None:
    assert put(handler) == [OK, OK]
    assert store.asked == [f"delete {name}" for name in VICTIMS] + [f"put {name}" for name in NAMES]


def test_who_was_first_to_store_a_block_is_left_alone(
    store: Watched, handler: ObjectHandler
) -> None:
    store.put(NAMES[0], [memoryview(b"the same, perhaps in another form")])
    assert put(handler) == [OK, OK]
    info = store.head(NAMES[0])
    assert info is not None
    assert info.size == 33


def test_nothing_is_written_to_room_that_could_not_be_made(
    store: Watched, handler: ObjectHandler
) -> None:
    store.locked = VICTIMS[1].__eq__
    assert put(handler) == [Outcome.IO_ERROR] * 2
    assert list(store.list()) == []


def test_nothing_is_deleted_or_written_after_the_claim_has_ended(
    store: Watched, handler: ObjectHandler
) -> None:
    assert put(handler, until=handler_module.clock()) == [Outcome.TIMEOUT] * 2
    assert store.asked == []


def test_nothing_is_written_when_the_claim_ends_amid_it(
    store: Watched, handler: ObjectHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine sleeps, and deadlines with it."""
    now = [100.0]
    monkeypatch.setattr(handler_module, "clock", lambda: now[0])
    store.between = lambda: now.append(now.pop() + 60.0)
    assert put(handler, until=160.0) == [Outcome.TIMEOUT] * 2
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StoreFull("full"), Outcome.NO_SPACE),
        (TimedOut("late"), Outcome.TIMEOUT),
        (Unavailable("away"), Outcome.IO_ERROR),
    ],
)
def test_a_block_that_the_store_does_not_take(
    store: Watched, handler: ObjectHandler, error: StoreError, outcome: Outcome
) -> None:
    store.error = error
    assert put(handler) == [outcome] * 2


def test_a_call_has_no_more_time_than_its_claim(
    store: Watched, handler: ObjectHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_module, "clock", lambda: 100.0)
    monkeypatch.setattr(handler_module.time, "monotonic", lambda: 5.0)
    deadlines = []
    plain = FileStore.put

    def note(*arguments: Any, deadline: float | None = None, **more: Any) -> PutOutcome:
        deadlines.append(deadline)
        return plain(*arguments, **more)

    monkeypatch.setattr(FileStore, "put", note)
    assert put(handler, until=103.0) == [OK, OK]
    assert put(handler, until=1000.0) == [OK, OK]
    assert deadlines == [8.0, 8.0, 15.0, 15.0]


@pytest.mark.parametrize(
    ("codec", "wrong"),
    [
        (Codec.RAW, "length"),
        (Codec.ZSTD, "length"),
        (Codec.ZSTD, "stored_bytes"),
        (Codec.ZSTD, "payload_bytes"),
    ],
)
def test_an_object_of_another_length_than_it_says_is_damaged(
    store: Watched, codec: Codec, wrong: str
) -> None:
    handler = ObjectHandler(store, NAMESPACE, codec, threads=1, load_s=10, store_s=10)
    key, record, into = KEYS[0], blank(), blank()
    seal(record, Header(key, NAMESPACE.digest, NAMESPACE.payload_bytes))
    assert handler.store(ObjectSpec([0]), [key], [record]) == [OK]
    path = store.root / NAMES[0]
    data = bytearray(path.read_bytes())
    assert (len(data) < len(record)) == (codec is Codec.ZSTD)
    assert handler.load(ObjectSpec([0]), [key], [into]) == [OK]
    assert verify(into, key, NAMESPACE.digest) is OK
    assert Header.read(into).stored_bytes == NAMESPACE.payload_bytes, "as it lies there now"
    if wrong == "length":
        del data[-1:]
    else:
        header = Header.read(memoryview(data))
        setattr(header, wrong, getattr(header, wrong) - 1)
        header.write(memoryview(data))
    path.write_bytes(data)
    assert handler.load(ObjectSpec([0]), [key], [into]) == [Outcome.CORRUPT]
    assert handler.load(ObjectSpec([1]), [key], [into]) == [Outcome.GONE]
