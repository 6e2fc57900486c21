"""Steps that were lost, as the scheduler knows them (tests/vllm/test_recount.py has ranks, too)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.vllm.hooks.step_replay import Orders, Said, Steps

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


def test_workers_are_told_what_was_heard_and_what_to_wait_for_no_longer() -> None:
    steps = Steps(ranks=1)
    metadata = SimpleNamespace(store_jobs={}, load_jobs={})
    told = []
    for given_up in (None, 7, None):
        steps.begin(metadata, given_up)
        told.append((metadata.orders.step, metadata.orders.heard, metadata.orders.given_up))
    steps.ended()
    steps.begin(metadata, None)
    assert told == [(1, 0, None), (2, 0, 7), (3, 0, None)]
    assert (metadata.orders.step, metadata.orders.heard) == (4, 1)
    for _ in range(4):
        steps.ended()
    steps.begin(metadata, None)
    assert (metadata.orders.step, metadata.orders.heard) == (5, 4), "one more has ended than began"
    steps.lost()
    steps.begin(metadata, None)
    steps.ended()
    steps.begin(metadata, None)
    assert (metadata.orders.step, metadata.orders.heard) == (7, 6), "not the one that was lost"


def test_jobs_that_are_asked_about_are_known_for_what_they_are() -> None:
    steps = Steps(ranks=1)
    store, load = (SimpleNamespace(errand=errand) for errand in ("stored", "loaded"))
    metadata = SimpleNamespace(
        store_jobs={1: SimpleNamespace(dst_spec=store)},
        load_jobs={2: SimpleNamespace(src_spec=load, req_id="a")},
    )
    steps.begin(metadata, None)
    steps.lost()
    again = begin(steps).again
    jobs: Any = {number: (job.errand, job.request) for number, job in (again or {}).items()}
    assert jobs == {1: ("stored", None), 2: ("loaded", "a")}


def test_a_request_may_load_more_than_once() -> None:
    steps = Steps(ranks=2)
    said = Said(NOTHING, {}, {"a"}, set())
    for number in (1, 2):
        assert steps.received(steps.hear({(0, number): said})) == set()
        assert steps.received(steps.hear({(0, number): said})) == set(), "it was heard"
        assert steps.received(steps.hear({(1, number): said})) == {"a"}
