"""A tier that is only read needs no right to write, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object import object_servers
from support.object.manual_keepers import opened

from kvtier import Stack
from kvtier.backends.object.keeper import ReadOnlyKeeper
from kvtier.backends.object.object_names import block_name, is_of_caretaker
from kvtier.backends.object.stores.errors import AccessDenied, StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Outcome, Presence

KEYS = make_keys(8)
SLOT = record_bytes(NAMESPACE.payload_bytes)


class ReadOnlyStore(FileStore):
    """A folder that may only be read."""

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        raise AccessDenied(f"no right to write {name}")

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        raise AccessDenied("no right to delete")

    def sweep(self, older_than_s: float) -> Iterator[int]:
        raise AccessDenied("no right to sweep")


def stack_of(folder: Path, url: str, **more: Any) -> dict[str, Any]:
    (folder / "host").mkdir(parents=True, exist_ok=True)
    host = {"kind": "cpu", "path": str(folder / "host"), "capacity": 32 * SLOT}
    store = {"kind": "object", "url": url, "capacity": "64MiB", "refresh": "100ms", **more}
    mover = {"mode": "threads"}
    return {"version": 1, "name": folder.name, "mover": mover, "tiers": [host, store]}


def everything(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """But for what the caretaker writes all the time."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and "caretaker" not in path.parts
        and not (path.parent.name == "manifest" and is_of_caretaker(path.name))
    ]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def fill(stack: Stack, keys: Sequence[BlockKey]) -> None:
    assert len(stack.store({key: payload(key) for key in keys})) == len(keys)
    assert stack.settle()


def until(true: Callable[[], bool]) -> None:
    """Only a mistake lets it take minutes."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class World:
    """A tier that is only read, over a folder into which others write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.url = f"file://{self.folder}"
        self.writer = Stack.open(stack_of(folder / "writer", self.url), NAMESPACE)
        self.write(KEYS[:4])
        store = ReadOnlyStore(self.folder)
        # with room for one block
        self.keeper, self.tier = opened(store, SLOT, kind=ReadOnlyKeeper, refresh_s=0.0)

    def write(self, keys: Sequence[BlockKey]) -> None:
        """And wait until the caretaker has relayed it, and deleted what it relayed."""
        fill(self.writer, keys)
        self.writer.chain.tiers[-1].flush()
        manifests = self.folder / NAMESPACE.id / "manifest"
        until(lambda: all(is_of_caretaker(path.name) for path in manifests.iterdir()))

    def hits(self) -> list[BlockKey]:
        self.keeper.run_once()
        self.tier.tick()
        found = zip(KEYS, self.tier.lookup(KEYS), strict=True)
        return [key for key, at in found if at is Presence.HIT]

    def fail(self, key: BlockKey, outcome: Outcome) -> None:
        self.tier.prepare_load([key])
        self.tier.complete_load([key], {key: outcome})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.tier.close()
    world.writer.close()


def test_it_knows_what_others_write_and_leaves_it_whatever_the_budget_says(world: World) -> None:
    assert world.hits() == KEYS[:4]
    world.write(KEYS[4:])
    assert world.hits() == KEYS
    before = everything(world.folder)
    world.keeper.refresh()
    assert world.hits() == KEYS
    world.tier.flush()
    assert everything(world.folder) == before
    assert not world.tier.prepare_store(make_keys(1, start=99)).keys


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.GONE])
def test_what_fails_is_not_offered_again(world: World, outcome: Outcome) -> None:
    before = everything(world.folder)
    world.fail(KEYS[0], outcome)
    assert world.hits() == KEYS[1:4]
    assert world.hits() == KEYS[1:4]
    world.keeper.refresh()
    assert world.hits() == KEYS[1:4], "what is known to be bad is not tried again and again"
    assert everything(world.folder) == before


def test_what_others_remove_is_gone(world: World) -> None:
    theirs = world.writer.chain.tiers[-1]
    theirs.forget(KEYS[:2])
    theirs.flush()
    until(lambda: world.hits() == KEYS[2:4])


def test_it_says_whether_the_store_is_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise AccessDenied("not now")

    assert not world.tier.unwell
    for audit in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "list", fail)
            assert world.hits() == KEYS[:4]
            assert world.tier.unwell
        world.keeper._next_look = 0.0
        world.keeper._next_audit = 0.0 if audit else world.keeper._steady() + 600
        assert world.hits() == KEYS[:4]
        assert not world.tier.unwell


def test_it_lists_no_blocks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[str] = []
    listed = FileStore.list

    def watch(store: FileStore, prefix: str = "", **more: Any) -> Any:
        prefixes.append(prefix)
        return listed(store, prefix, **more)

    monkeypatch.setattr(ReadOnlyStore, "list", watch)
    world.keeper.refresh()
    world.hits()
    assert set(prefixes) == {f"{NAMESPACE.id}/manifest/", "caretaker/"}


def test_weather_at_the_start_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stack.open(stack_of(tmp_path / "writer", f"file://{tmp_path}/store"), NAMESPACE) as writer:
        fill(writer, KEYS)
    reader = stack_of(tmp_path / "reader", f"file://{tmp_path}/store", write="never")
    with monkeypatch.context() as patched:

        def fail(*arguments: object, **more: object) -> None:
            raise AccessDenied("not now")

        patched.setattr(FileStore, "list", fail)
        stack = Stack.open(reader, NAMESPACE)
    with stack:
        until(lambda: stack.chain.lookup(KEYS).count(Presence.MISS) == 0)


@pytest.mark.s3
def test_a_server_that_lets_nobody_write(tmp_path: Path) -> None:
    with object_servers.rclone(tmp_path) as server:
        there = {"endpoint": server.endpoint}
        with Stack.open(stack_of(tmp_path / "writer", "s3://bucket/p", **there), NAMESPACE) as own:
            own.chain.tiers[-1].refresh()  # until a caretaker is elected, who gives it room
            fill(own, KEYS)
    before = everything(tmp_path / "data")
    with object_servers.rclone(tmp_path, None, "--read-only") as server:
        there = {"endpoint": server.endpoint, "write": "never", "unreachable": "refuse"}
        with Stack.open(stack_of(tmp_path / "reader", "s3://bucket/p", **there), NAMESPACE) as own:
            assert own.load(KEYS) == {key: payload(key) for key in KEYS}
            assert own.chain.chain_stats().hits[-1] == len(KEYS)
    assert everything(tmp_path / "data") == before
    assert block_name(NAMESPACE.id, KEYS[0]) in {
        str(path.relative_to(tmp_path / "data/bucket/p")) for path in before
    }
