"""What a chain counts of its loads, and for how long it keeps what nobody has asked for."""

from __future__ import annotations

import pytest

from kvtier.chain import stats
from kvtier.chain.ledger import Move, SettledMove
from kvtier.chain.plan import COMING, JOINING, NOWHERE
from kvtier.chain.stats import ChainCounters, PrefetchStats, Sample, name_links
from kvtier.interfaces.mover import MoverStats, Transfer, TransferKind, TransferResult
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome, SlotSpec

MEDIA = ["cpu", "disk", "bucket"]


def end_a_load(counts: ChainCounters, number: int, source: int) -> None:
    spec = SlotSpec([0])
    transfer = Transfer(
        id=number,
        kind=TransferKind.LOAD,
        source=source,
        target=0,
        keys=make_keys(1),
        source_spec=spec,
        target_spec=spec,
        deadline=1e9,
    )
    result = TransferResult(
        id=number, outcomes=[Outcome.OK], bytes_moved=1, seconds=float(number), busy_seconds=0.0
    )
    counts.ended(SettledMove(Move(transfer), [], {}, {}, []), result)


def test_a_tier_misses_what_it_was_asked_for_and_what_is_on_its_way_is_no_miss() -> None:
    counts = ChainCounters(MEDIA, NAMESPACE)
    counts.looked_up([0, 1, 1, 2, NOWHERE, COMING, JOINING])
    assert counts.misses == [5, 3, 2]


def test_samples_say_where_from_and_only_the_latest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "SAMPLES_KEPT", 3)
    counts = ChainCounters(MEDIA, NAMESPACE)
    for number in range(5):
        end_a_load(counts, number, source=1 + number % 2)
    assert counts.take_samples() == [
        Sample("disk", "cpu", 2.0),
        Sample("bucket", "cpu", 3.0),
        Sample("disk", "cpu", 4.0),
    ]


def test_what_was_told_once_stays_as_it_was_told() -> None:
    counts = ChainCounters(MEDIA, NAMESPACE)
    counts.found(1, make_keys(2))
    counts.failed(1, [Outcome.GONE])
    told = counts.stats([], [], MoverStats(), [], PrefetchStats.of(0), [])
    counts.looked_up([NOWHERE])
    counts.found(1, make_keys(3))
    counts.failed(1, [Outcome.GONE, Outcome.CORRUPT])
    assert (told.hits, told.misses) == ([0, 2, 0], [0, 0, 0])
    assert told.hit_bytes == [0, 2 * NAMESPACE.payload_bytes, 0]
    assert told.failures == [{}, {"gone": 1}, {}]
    assert counts.failures == [{}, {"gone": 2, "corrupt": 1}, {}]


def test_a_second_medium_of_a_kind_has_a_number_but_for_host_memory() -> None:
    assert name_links(["cpu", "disk", "disk", "cpu", "disk"]) == [
        "cpu",
        "disk",
        "disk 2",
        "cpu",
        "disk 3",
    ]
