"""What a caretaker relays of small manifests: nothing is lost, whoever dies or sleeps meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from support.object.manual_keepers import UnwellStore
from support.object.simulated_fleet import CountingStore, Fleet

from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, REMOVED, Entries, merge, pack_entries
from kvtier.backends.object.object_names import (
    caretaker_writer,
    is_of_caretaker,
    manifest_prefix,
    new_writer,
    parse_manifest,
)
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

KEYS = make_keys(6)


class Failing(UnwellStore):
    """A store that is away from a number of writes on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writes_left = 1 << 30
        self.fails = self._write

    def _write(self, call: str, name: str) -> Unavailable | None:
        self.writes_left -= call in ("put", "delete")
        return Unavailable("away") if self.writes_left < 0 and call in ("put", "delete") else None


@pytest.fixture
def store(tmp_path: Path) -> Failing:
    return Failing(tmp_path / "store")


def caretaker(store: FileStore, term: int) -> Journal:
    return Journal(store, NAMESPACE.id, caretaker_writer(term))


def say(journal: Journal, kind: int, keys: Sequence[BlockKey], at_us: int) -> None:
    journal.append(pack_entries(kind, keys, 0, 100 if kind == ADDED else 0, at_us))


def there(entries: Entries) -> list[BlockKey]:
    return sorted(keys_of(entries[entries["kind"] == ADDED]))


def small(store: FileStore) -> list[str]:
    names = (parse_manifest(info.name) for info in store.list(manifest_prefix(NAMESPACE.id)))
    return [name for name in names if name and not is_of_caretaker(name)]


def test_others_read_one_manifest_a_round_and_the_small_ones_go(store: Failing) -> None:
    keeper, reader = caretaker(store, 1), Journal(store, NAMESPACE.id)
    heard = [reader.read_all()]
    for at, key in enumerate(KEYS):
        for server in (Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)):
            say(server, ADDED, [key], 10 + at)
        assert len(reader.read_new(relayed=True)) == 0, "not before it is relayed"
        keeper.read_to_relay()
        keeper.relay()
        heard.append(reader.read_new(relayed=True))
        assert there(heard[-1]) == [key]
        assert len(small(store)) == 2, "the last ones stay for a round"
    keeper.read_to_relay()
    keeper.relay()
    assert small(store) == []
    assert there(Journal(store, NAMESPACE.id).read_all(relayed=True)) == sorted(KEYS)
    assert len(merge(heard)) == len(KEYS)


@pytest.mark.parametrize("writes", range(4))
def test_a_caretaker_that_dies_amid_it_is_made_up_for(store: Failing, writes: int) -> None:
    """Before or after each of its writes: a manifest, another, and deletes."""
    reader, server = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    dying = Failing(store.root)
    dying.writes_left = writes
    first = caretaker(dying, 1)
    first.read_all(relayed=True)
    for at in range(3):
        say(server, ADDED, KEYS[2 * at : 2 * at + 2], 10 * at)
        with suppress(Unavailable):
            first.read_to_relay()
            first.relay()
    assert dying.writes_left < 0
    second = caretaker(store, 2)
    second.read_all(relayed=True)
    second.read_to_relay()
    second.relay()
    assert there(reader.read_all(relayed=True)) == sorted(KEYS)


def test_a_caretaker_that_was_asleep_relays_nothing_that_is_gone(store: Failing) -> None:
    server, sleeper, awake = (Journal(store, NAMESPACE.id), *(caretaker(store, n) for n in (1, 2)))
    reader = Journal(store, NAMESPACE.id)
    say(server, ADDED, KEYS[:4], 10)
    sleeper.read_to_relay()  # and falls asleep
    awake.read_to_relay()
    awake.relay()
    say(awake, REMOVED, KEYS[:2], 20)
    say(server, ADDED, KEYS[4:], 30)
    awake.read_to_relay()
    awake.relay()
    assert there(reader.read_all(relayed=True)) == sorted(KEYS[2:])
    sleeper.relay()  # late, and once more, which deletes what it had read
    sleeper.read_to_relay()
    sleeper.relay()
    late = reader.read_new(relayed=True)
    assert set(there(late)) <= set(KEYS[:4]), "said again"
    assert there(Journal(store, NAMESPACE.id).read_all(relayed=True)) == sorted(KEYS[2:])
    assert there(Journal(store, NAMESPACE.id).read_all()) == sorted(KEYS[2:])


def test_what_a_full_store_did_not_take_is_relayed_later(store: Failing) -> None:
    keeper = caretaker(store, 1)
    say(Journal(store, NAMESPACE.id), ADDED, KEYS[:3], 10)
    keeper.read_to_relay()
    store.writes_left = 0
    with pytest.raises(Unavailable):
        keeper.relay()
    store.writes_left = 1 << 30
    say(Journal(store, NAMESPACE.id), ADDED, KEYS[3:], 20)
    keeper.read_to_relay()
    keeper.relay()
    assert there(Journal(store, NAMESPACE.id).read_all(relayed=True)) == sorted(KEYS)


def test_servers_and_caretakers_never_write_under_the_same_name(store: Failing) -> None:
    assert not any(is_of_caretaker(f"{new_writer()}-0000000000") for _ in range(1000))
    assert is_of_caretaker(f"{caretaker_writer((1 << 33) - 1)}-0000000000")
    first = caretaker(store, 1)
    say(first, ADDED, KEYS[:1], 10)
    again = caretaker(store, 1)  # the same term begins anew: its first look had failed
    again.read_all()
    say(again, ADDED, KEYS[1:], 20)
    assert there(Journal(store, NAMESPACE.id).read_all()) == sorted(KEYS)


def test_a_server_that_slept_while_removals_were_forgotten_offers_none_of_their_blocks() -> None:
    fleet = Fleet(CountingStore(), 2, blocks_a_second=0.5, capacity_blocks=200)
    fleet.run(300.0)
    sleeper = 1 - fleet.caretaker()
    fleet.stop(sleeper, 900.0)
    fleet.run(920.0)
    fleet.rate = 0.0
    fleet.run(20.0)
    _, tier = fleet.servers[sleeper]
    assert len(list(tier.offered())) > 100
    assert set(tier.offered()) <= fleet.blocks()
