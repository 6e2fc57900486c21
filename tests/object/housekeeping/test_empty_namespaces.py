"""Namespaces without a block: all that told of them goes, and nothing that somebody needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import LockedStore
from support.object.object_servers import ServerProcess
from support.object.object_subjects import FOLDER, BucketSubject

from kvtier.backends.object import namespaces as empty_namespaces
from kvtier.backends.object import open_for
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED
from kvtier.backends.object.object_names import SERVERS, ServerName, description_name
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, Rig, Subject, make_keys
from kvtier.types import Namespace

HOUR = 3600.0
OLD = Namespace(facts={"model": "retired"}, group_bytes=NAMESPACE.group_bytes)
SERVER = ServerName(OLD.id, "ab" * 16, "cd" * 8, 9, 3)


def retire(folder: Path) -> FileStore:
    """A store in which a model was served, whose blocks others have deleted since."""
    rig = Rig(FOLDER, folder, blocks=8, namespace=OLD)
    keys = rig.put(make_keys(4))
    rig.tier.touch(keys)
    rig.close()
    store = FileStore(folder / "store")
    store.put(str(SERVER), [])  # one that was killed
    store.delete([info.name for info in store.list(f"{OLD.id}/blocks/")])
    assert {kind(info.name) for info in store.list()} >= {"servers", "manifest", "namespace.json"}
    return store


def kind(name: str) -> str:
    parts = name.split("/")
    return parts[0] if parts[0] == "servers" else parts[1]


def age(store: FileStore, seconds: float, having: str = "") -> None:
    for info in store.list():
        if having in info.name:
            os.utime(store.root / info.name, (time.time() - seconds,) * 2)


def left(store: FileStore) -> set[str]:
    return {info.name for info in store.list() if OLD.id in info.name}


def gone(store: FileStore) -> bool:
    return empty_namespaces.remove(store, OLD.id, time.time()) and not left(store)


def test_all_that_tells_of_it_goes(tmp_path: Path) -> None:
    store = retire(tmp_path)
    age(store, 2 * HOUR)
    assert gone(store)
    assert empty_namespaces.remove(store, OLD.id, time.time()), "nothing is left to be removed"


@pytest.mark.parametrize("locked", ["manifest", "namespace.json"])
def test_what_cannot_be_deleted_keeps_what_goes_after_it(tmp_path: Path, locked: str) -> None:
    """What is left of manifests can still be read."""
    retire(tmp_path)
    store = LockedStore(tmp_path / "store", lambda name: locked in name)
    age(store, 2 * HOUR)
    assert not empty_namespaces.remove(store, OLD.id, time.time())
    kinds = {kind(name) for name in left(store)}
    assert kinds == {"namespace.json", locked}


def test_the_audit_of_another_model_does_it(tmp_path: Path) -> None:
    store = retire(tmp_path)
    other = Rig(FOLDER, tmp_path, blocks=8)
    keys = other.put(make_keys(2))
    other.settle()
    assert left(store), "it is too young"
    age(store, 2 * HOUR, OLD.id)
    other.settle()
    assert not left(store)
    other.settle()
    assert other.get(keys) == keys
    assert store.head(description_name(NAMESPACE.id)) is not None
    other.close()


@pytest.mark.parametrize("young", ["manifest", "namespace.json", "servers"])
def test_what_is_young_keeps_the_rest(tmp_path: Path, young: str) -> None:
    store = retire(tmp_path)
    age(store, 2 * HOUR)
    age(store, HOUR / 2, young)
    before = left(store)
    assert not gone(store)
    assert left(store) == before


@pytest.mark.parametrize(
    "name",
    [
        f"{OLD.id}/blocks/00/11/" + "0011" + "ab" * 34 + "-0",
        f"{OLD.id}/blocks2/anything",
        f"{OLD.id}/manifest/mine",
        f"{OLD.id}/more/of-a-newer-kvtier",
    ],
)
def test_blocks_and_what_is_not_known_keep_the_rest(tmp_path: Path, name: str) -> None:
    store = retire(tmp_path)
    store.put(name, [memoryview(b"x")])
    age(store, 2 * HOUR)
    before = left(store)
    assert name in before
    assert not gone(store)
    assert left(store) == before


def test_a_description_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    """A loss of power does that to a file that was new."""
    retire(tmp_path).close()
    description = tmp_path / "store" / description_name(OLD.id)
    description.write_bytes(b"")
    rig = Rig(FOLDER, tmp_path, blocks=8, namespace=OLD)
    rig.settle()
    assert description.read_bytes() == OLD.to_json()
    rig.close()


class Meanwhile(FileStore):
    """Something happens before a certain call of a store."""

    def __init__(self, inner: Store, at: int, deed: Callable[[], None]) -> None:
        self.inner, self.left, self.deed = inner, at, deed

    def _step(self) -> None:
        if self.left == 0:
            self.deed()
        self.left -= 1

    def list(self, *arguments: Any, **more: Any) -> Iterator[ObjectInfo]:
        self._step()
        return self.inner.list(*arguments, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        self._step()
        return self.inner.delete(names, **more)


SERVER_PARAMS = [pytest.param(name, marks=pytest.mark.s3) for name in ("rclone", "moto", "azurite")]


@pytest.fixture(params=["folder", *SERVER_PARAMS])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "folder":
        return FOLDER
    server: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    return BucketSubject(server.endpoint)


@pytest.mark.parametrize(
    "at", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 6))]
)
def test_a_server_that_comes_at_any_moment_loses_nothing(
    tmp_path: Path, subject: Subject, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(empty_namespaces, "GRACE_S", -HOUR)  # whatever has just been written is old
    before = Rig(subject, tmp_path, blocks=8, namespace=OLD)
    before.put(make_keys(4))
    before.close()
    store = open_for(before.settings)
    store.delete([info.name for info in store.list(f"{OLD.id}/blocks/")])
    rigs: list[Rig] = []
    keys = make_keys(3, start=10)

    def come() -> None:
        rigs.append(Rig(subject, tmp_path, blocks=8, namespace=OLD))
        rigs[0].settle()
        assert rigs[0].put(keys) == keys
        rigs[0].tier.flush()

    empty_namespaces.remove(Meanwhile(store, at, come), OLD.id, time.time())
    if not rigs:
        come()
    [rig] = rigs
    assert rig.get(keys) == keys
    stated = Journal(store, OLD.id).read_all()
    assert set(keys_of(stated[stated["kind"] == ADDED])) >= set(keys)
    assert [info for info in store.list(SERVERS) if OLD.id in info.name]
    rig.settle()
    assert rig.get(keys) == keys
    assert rig.put(make_keys(1, start=20)), "nobody was taken for dead"
    assert store.head(description_name(OLD.id)) is not None
    other = Rig(subject, tmp_path, blocks=8, namespace=OLD)
    assert other.get(keys) == keys
    for each in (other, rig):
        each.close()
    store.close()
