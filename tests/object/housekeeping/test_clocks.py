"""Clocks that are ahead or behind, of servers and of stores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.object.manual_keepers import (
    RECORD,
    ListedStore,
    blocks_in,
    filled,
    opened,
)

from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome


@pytest.fixture
def store(tmp_path: Path) -> ListedStore:
    return ListedStore(tmp_path / "store")


@pytest.mark.parametrize("modified_s", [1e18, -1e18, 4e9])
def test_times_that_cannot_be(tmp_path: Path, store: ListedStore, modified_s: float) -> None:
    """Blocks that no manifest knows, of a time to come or of long ago: taken in, and removable."""
    keys = make_keys(3)
    store.hold(keys, modified_s)
    keeper, tier = opened(store)
    assert tier.stats().blocks == 3
    store.blocks = []
    keeper.refresh()
    keeper.close()
    keeper, tier = opened(store)
    assert tier.stats().blocks == 0, "a removal outlasts what it removes"


@pytest.mark.parametrize("at_us", [5 * 10**15, (1 << 53) - 1, 1 << 53, 1 << 62])
def test_an_entry_by_a_clock_that_is_ahead_is_removed(
    store: ListedStore, caplog: pytest.LogCaptureFixture, at_us: int
) -> None:
    keys = make_keys(3)
    entries = pack_entries(ADDED, keys, [0] * 3, [RECORD] * 3, [0] * 3)
    entries["time_us"] = at_us
    Journal(store, NAMESPACE.id).append(entries)
    for _ in range(2):
        keeper, tier = opened(store)
        assert tier.stats().blocks == 0
        left = Journal(store, NAMESPACE.id).read_all()
        assert not (left["kind"] == ADDED).any()
        keeper.close()
    damaged = {record.args for record in caplog.records}
    assert len(damaged) <= 1, "only what was strange to begin with, never what corrects it"


def test_a_block_by_a_clock_that_is_far_ahead_is_found_gone_and_all_else_written_down(
    store: ListedStore, caplog: pytest.LogCaptureFixture
) -> None:
    [strange, own] = make_keys(2)
    keeper, tier = opened(store)
    Journal(store, NAMESPACE.id).append(pack_entries(ADDED, [strange], [0], [RECORD], [1 << 53]))
    keeper._next_look = 0.0
    keeper.run_once()
    tier.tick()
    tier.prepare_load([strange])
    tier.complete_load([strange], {strange: Outcome.GONE})
    keeper.outbox.added([own], [0], [RECORD])
    keeper.flush()
    left = Journal(store, NAMESPACE.id).read_all()
    assert left["kind"].tolist() == [ADDED, REMOVED]
    assert not caplog.records


def test_a_clock_that_is_ahead_keeps_no_size_from_being_corrected(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    [key, other] = make_keys(2)
    store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    now_us = int(time.time() * 1e6)
    times = [now_us, now_us + 10**15]
    journal = Journal(store, NAMESPACE.id)
    journal.append(pack_entries(ADDED, [key, other], [0, 0], [RECORD] * 2, times))
    keeper, tier = opened(store)
    journal.append(pack_entries(ADDED, [key], [0], [RECORD // 2], [now_us - 10**8]))
    keeper._next_look = 0.0
    keeper.run_once()
    tier.tick()
    assert keeper.budget.used == RECORD // 2, "heard late, as if it were the latest"
    keeper.refresh()
    tier.tick()
    assert keeper.budget.used == RECORD


@pytest.mark.parametrize(("ahead_s", "stays"), [(1e6, True), (-1e6, True), (0.0, False)])
def test_what_is_too_old_is_so_by_the_clock_of_the_store(
    tmp_path: Path, ahead_s: float, stays: bool
) -> None:
    """One server whose clock is days ahead would delete what all others have just stored."""
    store = FileStore(tmp_path / "store")
    [key] = filled(store, 1)
    if not stays:
        before = time.time() - 7200.0
        os.utime(store.root / block_name(NAMESPACE.id, key), (before, before))
    keeper, _ = opened(store, clock=lambda: time.time() + ahead_s, age_max_s=3600.0)
    keeper.refresh()
    assert blocks_in(store) == stays
    keeper.close()
