"""Single objects that may not be read, where all others may: they cost no more than themselves."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.object.manual_keepers import opened
from support.object.object_servers import (
    HostileServer,
    Peer,
    ServerProcess,
    answer,
    error_body,
    pass_on,
)
from support.object.s3_client_helpers import retrying_bucket

from kvtier.backends.object.inspection import garbage as gc
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import ReadOnlyKeeper
from kvtier.backends.object.manifests import ADDED, pack_entries
from kvtier.backends.object.object_names import block_name, description_name
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.use_counts import Uses, used_blocks
from kvtier.slab.layout import keys_of
from kvtier.system.disk import AnyPath, Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Presence

RECORD = 12288
ANOTHERS = answer(403, error_body("AccessDenied"))
REFUSALS = {
    "another's": ANOTHERS,
    "archived": answer(403, error_body("InvalidObjectState")),
    "a key that is disabled": answer(400, error_body("KMS.DisabledException")),
}


class Guard:
    """Before a real server; answers those who would read what is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.closed: Callable[[bytes], bool] = lambda target: False
        self.said = ANOTHERS

    def serve(self, peer: Peer, head: bytes) -> None:
        body = peer.read_body(head)
        method, target, _ = head.split(b" ", 2)
        reads = method in (b"GET", b"HEAD") and b"list-type" not in target
        if reads and self.closed(target.partition(b"?")[0]):
            said = self.said if method == b"GET" else answer(403)
        else:
            said = pass_on(self._port, head, body)
        peer.sendall(said)

    def close(self, *names: str) -> None:
        self.closed = lambda target: any(target.endswith(name.encode()) for name in names)


@pytest.fixture
def guard(rclone_server: ServerProcess) -> Guard:
    return Guard(rclone_server.port)


@pytest.fixture
def store(guard: Guard, request: pytest.FixtureRequest) -> Iterator[Store]:
    """With retries and a circuit, which what is closed must not open."""
    with HostileServer(guard.serve) as server:
        prefix = request.node.name.translate(str.maketrans("[]' ", "----"))
        store = retrying_bucket(prefix=f"closed/{prefix}", endpoint=server.endpoint)
        store.put(description_name(NAMESPACE.id), [memoryview(NAMESPACE.to_json())])
        yield store
        store.close()


def tell(store: Store, some: list[BlockKey]) -> str:
    """A manifest of these; its name."""
    before = set(manifests(store))
    columns = [0] * len(some), [RECORD] * len(some), [10**15] * len(some)
    Journal(store, NAMESPACE.id).append(pack_entries(ADDED, some, *columns))
    [name] = set(manifests(store)) - before
    return name


def manifests(store: Store) -> list[str]:
    return [info.name for info in store.list(f"{NAMESPACE.id}/manifest/")]


def listed_keys(journal: Journal) -> set[BlockKey]:
    return set(keys_of(journal.read_all()))


@pytest.mark.s3
@pytest.mark.parametrize("why", REFUSALS)
def test_a_closed_manifest_costs_only_itself_and_stays(
    store: Store, guard: Guard, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    keys = make_keys(8)
    names = [tell(store, keys[at : at + 1]) for at in range(8)]
    guard.said = REFUSALS[why]
    guard.close(*names[:7])  # in a row more than the circuit would bear
    journal = Journal(store, NAMESPACE.id)
    for _ in range(2):
        assert listed_keys(journal) == {keys[7]}
        assert len(journal.read_new()) == 0
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("7 manifests may not be read")
    for key in make_keys(20, start=50):
        journal.append(pack_entries(ADDED, [key], [0], [RECORD], [10**15]))
    assert journal.worth_joining()
    journal.join(journal.read_all())
    journal.drop_damaged()
    assert set(manifests(store)) > set(names[:7])
    guard.close()
    assert listed_keys(journal) == {*keys, *make_keys(20, start=50)}, "it is tried again"


@pytest.mark.s3
def test_the_only_manifest_may_be_closed(store: Store, guard: Guard) -> None:
    guard.close(tell(store, make_keys(2)))
    assert listed_keys(Journal(store, NAMESPACE.id)) == set()
    store.delete([description_name(NAMESPACE.id)])
    assert listed_keys(Journal(store, NAMESPACE.id)) == set()


@pytest.mark.s3
@pytest.mark.parametrize("described", [True, False])
def test_where_nothing_may_be_read_the_credentials_are_wrong(
    store: Store, guard: Guard, described: bool
) -> None:
    tell(store, make_keys(2))
    if not described:
        store.delete([description_name(NAMESPACE.id)])
    guard.closed = lambda target: True
    journal = Journal(store, NAMESPACE.id)
    for look in (journal.read_all, journal.read_new):
        with pytest.raises(errors.AccessDenied, match="allow these credentials to get") as caught:
            look()
        assert not isinstance(caught.value, errors.Forbidden)
        assert caught.value.unwell
    guard.close()
    assert len(journal.read_new()) == 2, "nothing of it is remembered"


@pytest.mark.s3
def test_a_key_that_is_wrong_is_no_matter_of_one_object(store: Store, guard: Guard) -> None:
    guard.close(tell(store, make_keys(1)), tell(store, make_keys(2)))
    guard.said = answer(403, error_body("InvalidAccessKeyId"))
    with pytest.raises(errors.AccessDenied, match="secret is wrong"):
        Journal(store, NAMESPACE.id).read_all()


@pytest.mark.s3
def test_a_listing_finds_what_closed_manifests_tell_of(store: Store, guard: Guard) -> None:
    keys = make_keys(3)
    for key in keys:
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    name = tell(store, keys)
    guard.close(name)
    keeper, tier = opened(store)
    keeper.refresh()  # which waits for the election of a caretaker
    tier.tick()
    assert tier.lookup(keys) == [Presence.HIT] * 3
    keeper.refresh()
    tier.tick()
    assert tier.lookup(keys) == [Presence.HIT] * 3
    keeper.close()
    assert name in manifests(store)
    reader, seen = opened(store, kind=ReadOnlyKeeper)
    assert seen.lookup(keys) == [Presence.HIT] * 3, "it was written down"
    reader.close()


@pytest.mark.s3
def test_a_closed_list_of_uses_counts_nothing(store: Store, guard: Guard) -> None:
    keys = make_keys(2)
    for number, key in enumerate(keys):
        Uses(store, NAMESPACE.id, f"{number:016x}", 0.0).carry({key: (3, 1e9)})
    first = next(store.list(f"{NAMESPACE.id}/uses/")).name
    guard.close(first)
    found = used_blocks(store, NAMESPACE.id)
    assert found is not None
    assert len(found) == 1


@pytest.mark.s3
def test_a_closed_description_does_not_keep_garbage_from_being_collected(
    store: Store, guard: Guard
) -> None:
    store.put(block_name(NAMESPACE.id, make_keys(1)[0]), [memoryview(bytes(RECORD))])
    guard.close(description_name(NAMESPACE.id))
    found = gc.survey(store, 0, None, 0.0)
    assert gc.collect(store, found) == 1


class Others(Disk):
    """Some files are another user's."""

    def __init__(self) -> None:
        self.closed = ""

    def open_to_read(self, path: AnyPath) -> int:
        if self.closed and str(path).endswith(self.closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return super().open_to_read(path)


def test_a_file_of_another_user_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Others()
    store = FileStore(tmp_path / "store", disk=disk)
    keys = make_keys(2)
    names = [tell(store, [key]) for key in keys]
    disk.closed = names[0].rpartition("/")[2]
    with caplog.at_level(logging.WARNING):
        assert listed_keys(Journal(store, NAMESPACE.id)) == {keys[1]}
    assert "give this user the right to read it" in caplog.text
    assert manifests(store) == sorted(names)
