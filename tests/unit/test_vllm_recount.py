"""Steps that were lost, as the scheduler knows them (tests/vllm/test_recount.py has ranks, too)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.vllm.recount import Orders, Said, Steps

NOTHING: Any = None


def begin(steps: Steps, *jobs: int) -> Orders:
    """A step with these loads; what its workers are told beside them."""
    loads = {
        number: SimpleNamespace(src_spec=SimpleNamespace(errand=NOTHING), req_id=f"of {number}")
        for number in jobs
    }
    metadata = SimpleNamespace(store_jobs={}, load_jobs=loads)
    steps.begin(metadata, None)
    orders: Orders = metadata.orders
    return orders


def asked_again(orders: Orders) -> list[int] | None:
    return None if orders.again is None else sorted(orders.again)


def test_steps_that_are_lost_one_after_another_are_all_asked_about() -> None:
    steps = Steps(ranks=1)
    begin(steps, 1)
    begin(steps, 2)
    steps.lost()
    steps.lost()
    assert asked_again(begin(steps, 3)) == [1, 2], "though none has begun in between"
    steps.lost()
    assert asked_again(begin(steps)) == [1, 2, 3], "the one that asked was lost, too"
    steps.ended()
    assert asked_again(begin(steps)) is None


def test_steps_that_end_without_a_word_are_not_remembered_for_ever() -> None:
    steps = Steps(ranks=1)
    for number in range(100):
        begin(steps, number)
    steps.lost()
    assert asked_again(begin(steps)) == list(range(36, 100))


def test_a_request_may_load_more_than_once() -> None:
    steps = Steps(ranks=2)
    said = Said(NOTHING, {}, {"a"}, set())
    for number in (1, 2):
        assert steps.received(steps.hear({(0, number): said})) == set()
        assert steps.received(steps.hear({(0, number): said})) == set(), "it was heard"
        assert steps.received(steps.hear({(1, number): said})) == {"a"}
