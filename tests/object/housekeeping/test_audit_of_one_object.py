"""What one listing makes of one object of ours, by what is written down and when it was stored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import RECORD, LockedStore

from kvtier.backends.object.housekeeping import foreign_blocks
from kvtier.backends.object.housekeeping.audit import AuditInput, AuditResult, audit
from kvtier.backends.object.lock_yield import LockYield
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries, pack_entries
from kvtier.backends.object.manifests.merge import merge
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

NOW = 1e9
READ_S = 60.0
[KEY] = make_keys(1)
NAME = block_name(NAMESPACE.id, KEY)
NOTHING = pack_entries(ADDED, [], [], [], [])


class Case:
    """A store in which one object was stored at some time, or was not."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(folder / "store")
        self.known = True
        """Whether the object is offered."""
        self.others: list[BlockKey] = []
        """Offered, too, and not there."""

    def put(self, ago_s: float, size: int = RECORD) -> None:
        self.store.put(NAME, [memoryview(bytes(size))])
        os.utime(self.store.root / NAME, (NOW - ago_s,) * 2)

    def audit(
        self, entries: Entries = NOTHING, queued: Entries = NOTHING, **more: Any
    ) -> AuditResult:
        stated = Reconciliation(entries)
        known = [(key, 0) for key in [KEY, *self.others]] if self.known else []
        stated.compare(known, [], LockYield(lambda: None))
        stated.date_unrecorded(queued)
        asked: dict[str, Any] = {
            "namespace": NAMESPACE.id,
            "recorded": stated,
            "capacity": 1 << 40,
            "needs_room": False,
            "too_old_s": -1e18,
            "reader_grace_s": READ_S,
            "writers_died": False,
            "now": NOW,
        }
        return audit(self.store, AuditInput(**(asked | more)), LockYield(lambda: None))

    @property
    def stays(self) -> bool:
        return self.store.head(NAME) is not None


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def stated(kind: int, ago_s: float, size: int = RECORD) -> Entries:
    return pack_entries(kind, [KEY], [0], [size], [int((NOW - ago_s) * 1e6)])


def found(finding: AuditResult) -> tuple[int, int]:
    """How many blocks are new, and how many gone."""
    return len(finding.orphans), len(finding.gone)


def test_what_is_there_as_it_is_stated_is_no_news(case: Case) -> None:
    case.put(500.0)
    assert found(case.audit(stated(ADDED, 500.0))) == (0, 0)
    assert found(case.audit()) == (1, 0), "of this nothing is written down"
    assert case.stays


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize(("removed_s", "stored_s"), [(10.0, 20.0), (100.0, 200.0)])
def test_what_is_removed_stays_as_long_as_somebody_may_read_it(
    case: Case, removed_s: float, stored_s: float, dead: bool
) -> None:
    """Unless servers died, one of which may have removed it: nobody else deletes it then."""
    case.put(stored_s)
    case.known = False
    assert found(case.audit(stated(REMOVED, removed_s), writers_died=dead)) == (0, 0)
    assert case.stays == (removed_s < READ_S and not dead)


@pytest.mark.parametrize(("ahead_s", "believed"), [(3500.0, True), (3700.0, False)])
def test_a_removal_by_a_clock_that_is_ahead_is_believed_within_an_hour(
    case: Case, ahead_s: float, believed: bool
) -> None:
    """Later it would lie there uncounted until then."""
    case.put(100.0)
    case.known = False
    assert found(case.audit(stated(REMOVED, -ahead_s))) == (int(not believed), 0)
    assert case.stays


@pytest.mark.parametrize(("removed_s", "stored_s"), [(20.0, 10.0), (1000.0, 10.0)])
def test_what_was_stored_again_since_its_removal_is_not_deleted(
    case: Case, removed_s: float, stored_s: float
) -> None:
    case.put(stored_s)
    case.known = False
    assert found(case.audit(stated(REMOVED, removed_s))) == (0, 0), "its writer will say so"
    assert case.stays
    finding = case.audit(stated(REMOVED, removed_s), writers_died=True)
    assert found(finding) == (1, 0), "its writer may have died"
    assert finding.orphans.times == [NOW - stored_s]
    assert case.stays


@pytest.mark.parametrize(
    ("stored_s", "removed_s", "stays"), [(100, 100.9, False), (99.5, 100, True)]
)
def test_a_time_rounded_up_to_the_second_brings_nothing_back(
    case: Case, stored_s: float, removed_s: float, stays: bool
) -> None:
    """OpenStack Swift's is: what was removed within that second seems to be stored after it."""
    case.put(stored_s)
    case.known = False
    finding = case.audit(stated(REMOVED, removed_s), writers_died=True, reader_grace_s=1000.0)
    assert found(finding) == (int(stays), 0)
    assert case.stays == stays


def test_what_is_removed_and_offered_still_is_said_to_be_gone(case: Case) -> None:
    case.put(500.0)
    assert found(case.audit(stated(REMOVED, 200.0), reader_grace_s=1000.0)) == (0, 1)
    assert case.stays, "somebody may be reading it"


def test_what_nobody_has_written_down_for_long_after_a_removal_goes(case: Case) -> None:
    case.put(500.0)
    case.known = False
    assert found(case.audit(stated(REMOVED, 1000.0), writers_died=True)) == (0, 0)
    assert not case.stays


@pytest.mark.parametrize("size", [RECORD, RECORD // 2])
def test_what_is_too_old_is_deleted_and_said_to_be_gone(case: Case, size: int) -> None:
    case.put(500.0)
    entries = stated(ADDED, 500.0, size)
    expected = int(size != RECORD), 0
    assert found(case.audit(entries, too_old_s=NOW - 500.5)) == expected
    assert case.stays
    assert found(case.audit(entries, too_old_s=NOW - 500.0)) == (0, 1)
    assert not case.stays


@pytest.mark.parametrize("ago_s", [500.0, -500.0])
def test_what_nobody_wrote_down_is_as_old_as_its_object_but_of_no_time_to_come(
    case: Case, ago_s: float
) -> None:
    case.put(ago_s)
    case.known = False
    finding = case.audit()
    assert finding.orphans.times == [min(NOW, NOW - ago_s)]
    assert (finding.orphans.keys, finding.orphans.sizes) == ([KEY], [RECORD])


def test_a_size_that_is_corrected_is_of_the_later_time(case: Case) -> None:
    case.put(500.0)
    for ago_s, since in ((400.0, 400.0), (600.0, 500.0)):
        finding = case.audit(stated(ADDED, ago_s, RECORD + 1))
        assert finding.orphans.times == [NOW - since]
        assert finding.orphans.sizes == [RECORD]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("ago_s", [500.0, 10.0])
def test_what_is_stated_or_offered_and_not_there_is_gone(
    case: Case, ago_s: float, known: bool
) -> None:
    case.known = known
    finding = case.audit(stated(ADDED, ago_s))
    assert (finding.gone.keys, finding.gone.times) == ([KEY], [NOW])
    finding = case.audit(stated(ADDED, -ago_s))
    assert finding.gone.times == [NOW + ago_s], "after all that is written down"
    finding = case.audit(stated(REMOVED, ago_s))
    assert found(finding) == (0, int(known))
    assert found(case.audit()) == (0, int(known)), "nothing is written down about it"


class Late(FileStore):
    """A listing that does not show what is there."""

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        return iter(())


def test_what_has_come_since_the_listing_began_is_not_taken_for_gone(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.store = Late(tmp_path / "store")
    case.put(10.0)
    assert found(case.audit(stated(ADDED, 10.0))) == (0, 0)
    assert found(case.audit()) == (0, 0), "offered, and not written down yet"
    assert found(case.audit(stated(ADDED, 500.0))) == (0, 0), "a listing that late is not whole"


def test_what_waits_to_be_written_down_is_no_older_than_that(tmp_path: Path) -> None:
    """Others may lie there without a word since somebody has deleted everything."""
    case = Case(tmp_path)
    case.store = Late(tmp_path / "store")
    case.put(1.0)
    case.others = make_keys(2, start=1)
    assert found(case.audit(queued=stated(ADDED, 1.0))) == (0, 2)


@pytest.mark.parametrize(("ago_s", "gone"), [(119.0, 1), (121.0, 2)])
def test_of_what_is_not_listed_the_latest_tells_of_all_but_what_is_young(
    tmp_path: Path, ago_s: float, gone: int
) -> None:
    case = Case(tmp_path)
    case.store = Late(tmp_path / "store")
    case.put(ago_s)
    latest = pack_entries(ADDED, make_keys(1, start=1), [0], [RECORD], [int((NOW - 120.5) * 1e6)])
    assert found(case.audit(merge([stated(ADDED, ago_s), latest]))) == (0, gone)


# -- other namespaces --------------------------------------------------------------------------

OTHERS = "ab" * 16, "cd" * 16


def fill(store: FileStore, namespace: str, ages_s: Sequence[float]) -> list[str]:
    names = [block_name(namespace, key) for key in make_keys(len(ages_s))]
    for name, ago_s in zip(names, ages_s, strict=True):
        store.put(name, [memoryview(bytes(RECORD))])
        os.utime(store.root / name, (NOW - ago_s,) * 2)
    return names


def left(store: FileStore, names: Sequence[str]) -> list[bool]:
    return [store.head(name) is not None for name in names]


def test_too_much_costs_others_their_share_and_of_that_the_oldest(case: Case) -> None:
    """Of sixteen blocks eight are too many, and twelve are those of others."""
    fill(case.store, NAMESPACE.id, [9000.0] * 4)
    first = fill(case.store, OTHERS[0], [100.0 * at for at in range(1, 9)])
    second = fill(case.store, OTHERS[1], [250.0, 350.0, 2000.0, 3000.0])
    finding = case.audit(capacity=8 * RECORD)
    # six blocks and a byte: the older of them all, whosever they are
    assert left(case.store, first) == [True] * 3 + [False] * 5
    assert left(case.store, second) == [True, True, False, False]
    assert finding.foreign == {OTHERS[0]: 3 * RECORD, OTHERS[1]: 2 * RECORD}
    assert len(finding.orphans) == 4, "of our own the oldest go by what we use"


@pytest.mark.parametrize(
    ("capacity", "needs_room", "gone"), [(8, False, 0), (8, True, 1), (9, True, 0)]
)
def test_a_namespace_that_needs_room_takes_a_sixteenth_of_the_budget_unless_that_is_free(
    case: Case, capacity: int, needs_room: bool, gone: int
) -> None:
    names = fill(case.store, OTHERS[0], [100.0 * at for at in range(1, 9)])
    finding = case.audit(capacity=capacity * RECORD, needs_room=needs_room)
    assert left(case.store, names) == [True] * (8 - gone) + [False] * gone
    assert finding.foreign == {OTHERS[0]: (8 - gone) * RECORD}


def test_only_so_many_of_the_oldest_are_remembered(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_blocks, "_CANDIDATES_MAX", 3)
    names = fill(case.store, OTHERS[0], [100.0, 800.0, 300.0, 700.0, 500.0, 600.0])
    finding = case.audit(capacity=0)
    assert left(case.store, names) == [True, False, True, False, True, False]
    assert finding.foreign == {OTHERS[0]: 3 * RECORD}


def test_what_others_have_and_could_not_be_deleted_is_still_counted(case: Case) -> None:
    [locked, other] = fill(case.store, OTHERS[0], [100.0, 200.0])
    case.store = LockedStore(case.store.root, locked.__eq__)
    finding = case.audit(capacity=0)
    assert left(case.store, [locked, other]) == [True, False]
    assert finding.foreign == {OTHERS[0]: RECORD}
