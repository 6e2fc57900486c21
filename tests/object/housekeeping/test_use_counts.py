"""Lists of uses: what servers have counted adds up, once, and what is strange counts nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import UnwellStore, created, nothing_at_all
from support.processes.clocks import Clock

from kvtier.backends.object import manifests as manifest
from kvtier.backends.object import use_counts as uses_module
from kvtier.backends.object.manifests import ADDED, HEAD_BYTES, USED, Entries
from kvtier.backends.object.object_names import retained_prefix, uses_prefix
from kvtier.backends.object.stores.errors import StoreError, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.use_counts import Uses, count_uses, retained_blocks
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

KEYS = make_keys(8)
PREFIX = uses_prefix(NAMESPACE.id)


def entries_of(kind: int, keys: Sequence[BlockKey], counts: Sequence[int]) -> Entries:
    none = [0] * len(keys)
    return manifest.pack_entries(kind, keys, none, counts, none)


BLOCKS = entries_of(ADDED, KEYS, [12288] * len(KEYS))
BLOCKS["generation"] = 3


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def counted(store: FileStore) -> list[int]:
    return count_uses(store, NAMESPACE.id, BLOCKS)[0].tolist()


def names(store: FileStore) -> list[str]:
    return [info.name for info in store.list(PREFIX)]


def served(store: FileStore, *requests: Sequence[BlockKey]) -> None:
    """A server, from its start to its end."""
    uses = Uses(store, NAMESPACE.id, secrets.token_hex(8), 600.0)
    for keys in requests:
        uses.note(keys)
    uses.close()


def test_all_servers_count_together(store: FileStore) -> None:
    assert counted(store) == [0] * 8
    served(store, KEYS[:2], KEYS[:1])
    served(store, KEYS[1:3])
    served(store)
    assert counted(store) == [2, 2, 1, 0, 0, 0, 0, 0]
    assert len(names(store)) == 2, "who has nothing to say writes nothing"


def test_a_list_is_written_when_it_is_due(store: FileStore) -> None:
    clock = Clock(0.0)
    uses = Uses(store, NAMESPACE.id, secrets.token_hex(8), 600.0, clock=clock)
    for at, expected in ((1.0, 0), (601.0, 2), (602.0, 2), (1202.0, 4)):
        clock.now = at
        uses.note(KEYS[:1])
        uses.look()
        assert counted(store)[0] == expected


def test_many_lists_become_one(store: FileStore) -> None:
    for _ in range(40):
        served(store, KEYS[:2], KEYS[:1])
        assert len(names(store)) < 16
    assert counted(store)[:3] == [80, 40, 0]


class Undeletable(FileStore):
    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        return {name: Unavailable("not now") for name in names}


def test_what_is_joined_but_still_there_counts_once(store: FileStore, tmp_path: Path) -> None:
    for _ in range(15):
        served(store, KEYS[:1])
    for _ in range(3):  # three join at once, and none comes to delete
        served(Undeletable(tmp_path / "store"), KEYS[:1])
    assert len(names(store)) > 16
    assert counted(store)[0] == 18
    served(store)
    served(store, KEYS[:1])
    assert len(names(store)) == 1
    assert counted(store)[0] == 19


def test_a_store_that_is_away_costs_no_count(tmp_path: Path) -> None:
    store, clock = UnwellStore(tmp_path / "store"), Clock(0.0)
    well, store.fails = store.fails, nothing_at_all
    uses = Uses(store, NAMESPACE.id, "ab" * 8, 600.0, clock=clock)
    uses.note(KEYS[:1])
    clock.now = 600.0
    uses.look()  # raises nothing: all else that is due must be done
    clock.now = 601.0
    uses.look()  # not at every look
    store.fails = well
    clock.now = 1200.0
    uses.look()
    assert counted(store)[0] == 1


def test_a_list_of_retained_blocks_is_tried_again_and_goes_with_its_server(tmp_path: Path) -> None:
    store, clock, writer = UnwellStore(tmp_path / "store"), Clock(0.0), "ab" * 8
    uses = Uses(store, NAMESPACE.id, writer, 600.0, clock=clock)
    uses.retain(dict.fromkeys(KEYS[:2], 2e9))
    well, store.fails = store.fails, nothing_at_all
    clock.now += 600.0
    uses.look()
    store.fails = well
    assert list(store.list(retained_prefix(NAMESPACE.id))) == []
    for _ in range(2):
        clock.now += 600.0
        uses.look()
        found = retained_blocks(store, NAMESPACE.id, [writer])
        assert [keys_of(entries) for entries in found] == [KEYS[:2]]
    uses.close()
    assert list(store.list(retained_prefix(NAMESPACE.id))) == []


def written(store: FileStore, name: str, entries: Entries, namespace: bytes | None = None) -> None:
    digest = NAMESPACE.digest if namespace is None else namespace
    store.put(f"{PREFIX}{name}-0000000000", manifest.pack(digest, entries))


def test_what_is_strange_counts_nothing_and_goes(store: FileStore) -> None:
    right = entries_of(USED, KEYS[:1], [7])
    written(store, "a" * 16, right)
    written(store, "b" * 16, entries_of(ADDED, KEYS, [7] * 8))
    written(store, "c" * 16, right, namespace=b"another space..!")
    store.put(f"{PREFIX}{'d' * 16}-0000000000", [memoryview(b"")])
    store.put(f"{PREFIX}{'e' * 16}-0000000000", [memoryview(bytes(1000))])
    newer = b"".join(manifest.pack(NAMESPACE.digest, right))
    newer = newer[:8] + b"\2\0" + newer[10:]
    store.put(f"{PREFIX}{'f' * 16}-0000000000", [memoryview(newer)])
    store.put(f"{PREFIX}readme", [memoryview(b"mine")])
    assert counted(store) == [7, 0, 0, 0, 0, 0, 0, 0]
    for _ in range(11):
        served(store, KEYS[:1])
    assert counted(store)[0] == 18
    left = names(store)
    assert len(left) == 3, "their sum, what a newer kvtier wrote, and what is not kvtier's"
    assert f"{PREFIX}{'f' * 16}-0000000000" in left
    assert f"{PREFIX}readme" in left


def test_a_list_too_long_is_not_read(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses_module, "_LIST_BYTES_MAX", 200)
    written(store, "a" * 16, entries_of(USED, KEYS[:1], [7]))
    written(store, "b" * 16, entries_of(USED, KEYS, [7] * 8))
    assert counted(store) == [7, 0, 0, 0, 0, 0, 0, 0]


def test_lists_that_are_too_long_together_are_read_and_joined_in_turn(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to a bucket decides how much lies there, not how much a reader holds."""
    for name in range(40):
        written(store, f"{name:016x}", entries_of(USED, KEYS, [1] * 8))
    size = HEAD_BYTES + 8 * 64
    monkeypatch.setattr(uses_module, "_LISTS_BYTES_MAX", 5 * size)
    held = most = 0
    get = store.get

    def weigh(name: str, into: memoryview, **more: Any) -> int | None:
        nonlocal held, most
        held += len(into)
        most = max(most, held)
        return get(name, into, **more)

    store.get = weigh  # type: ignore[method-assign]
    assert counted(store) == [5] * 8
    rounds = 0
    while len(names(store)) >= 16:
        held, rounds = 0, rounds + 1
        assert rounds < 20
        served(store, KEYS[:1])
    assert most <= 5 * size
    monkeypatch.setattr(uses_module, "_LISTS_BYTES_MAX", 1 << 20)
    assert counted(store) == [40 + rounds, *[40] * 7], "none is lost, none counts twice"


def test_absurd_counts_stay_counts(store: FileStore) -> None:
    for name in "ab":
        written(store, name * 16, entries_of(USED, KEYS[:2], [(1 << 63) - 1, 1]))
    assert counted(store)[:2] == [(1 << 32) - 1, 2]
    for _ in range(14):
        served(store, KEYS[:1])
    assert counted(store)[:2] == [(1 << 32) - 1, 2]


def test_memory_and_lists_are_bounded(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses_module, "_BLOCKS_MAX", 100)
    monkeypatch.setattr(uses_module, "_JOINED_MAX", 50)
    many = make_keys(2000, start=100)
    uses = Uses(store, NAMESPACE.id, secrets.token_hex(8), 600.0)
    for start in range(0, 2000, 20):
        uses.note([*KEYS[:2], *many[start : start + 20]])
        uses.look()
        assert len(uses._counts) <= 100
    uses.close()
    assert counted(store)[:3] == [100, 100, 0]
    for _ in range(15):
        served(store, many[:60])
    (only,) = names(store)
    info = store.head(only)
    assert info is not None
    assert info.size < 5000
    assert counted(store)[:2] == [50, 50], "old uses count less when there is no room for all"


def test_many_blocks(store: FileStore) -> None:
    many = make_keys(10_000)
    served(store, *(many for _ in range(10)))
    blocks = entries_of(ADDED, many, [1] * len(many))
    assert (count_uses(store, NAMESPACE.id, blocks)[0] == 10).all()


def test_a_join_that_is_cut_short_counts_nothing_twice(store: FileStore) -> None:
    """The sum of a sum and others is there, and so is that first sum, which is listed before."""
    others = [f"{number:016x}-0000000000" for number in range(31)]
    first, second = f"{'a' * 16}-0000000000", f"{'b' * 16}-0000000000"
    sums = ((first, 16, others[:16]), (second, 31, [first, *others[16:]]))
    for name, count, covers in sums:
        entries = entries_of(USED, KEYS[:1], [count])
        store.put(f"{PREFIX}{name}", manifest.pack(NAMESPACE.digest, entries, covers))
    assert counted(store)[0] == 31


def test_what_else_lies_there_does_not_hide_lists(store: FileStore) -> None:
    for number in range(70):
        store.put(f"{PREFIX}0-note-{number}", [memoryview(b"mine")])
    for _ in range(40):
        served(store, KEYS[:1])
        assert len(names(store)) < 70 + 16
    assert counted(store)[0] == 40


def test_what_cannot_be_deleted_is_not_joined_at_every_look(tmp_path: Path) -> None:
    clock = Clock(0.0)
    store = Undeletable(tmp_path / "store")
    uses = Uses(store, NAMESPACE.id, secrets.token_hex(8), 600.0, clock=clock)
    for _ in range(40):
        clock.now += 600.0
        uses.note(KEYS[:1])
        uses.look()
    assert len(names(store)) <= 40 + 2
    assert counted(store)[0] == 40


def test_what_is_noted_while_the_store_is_away_takes_no_more_than_counts(tmp_path: Path) -> None:
    store = UnwellStore(tmp_path / "store")
    store.fails = nothing_at_all
    keeper, _ = created(store)
    for _ in range(100):
        keeper.uses.note(KEYS)
        keeper.run_once()
    assert len(keeper.uses._noted) == 0
    assert len(keeper.uses._counts) == len(KEYS)
