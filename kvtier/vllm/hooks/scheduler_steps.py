"""What vLLM's side of the connector is told of a step, and how its manager is entered: corrected
where it would misread it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)

from kvtier.vllm.hooks.versions import numbers_of

_IS_0_33 = numbers_of(vllm.__version__) >= (0, 33)


def read_as_0_33(connector: Any, scheduled: Any) -> Any:
    """A step's output without what 0.31 and 0.32 get wrong: of a request that begins anew (a
    session that goes on, or a load of another connector's) they take all blocks for more of them,
    and a load right after a reset's preemption ends the engine."""
    if _IS_0_33:
        return scheduled
    scheduler = connector.connector_scheduler
    for new in scheduled.scheduled_new_reqs:
        for group in scheduler._req_status[new.req_id].group_states:
            group.block_ids.clear()
    loads = {job.req_id for job in scheduler._current_batch_load_jobs.values()}
    preempted = scheduled.preempted_req_ids or set()
    if loads.isdisjoint(preempted):
        return scheduled
    return dataclasses.replace(scheduled, preempted_req_ids=preempted - loads)


def nothing_to_transfer() -> Any:
    """What vLLM's side answers to a step in which nothing is stored or loaded."""
    return OffloadingConnectorMetadata({}, {}, set())


@contextlib.contextmanager
def resettable(connector: Any) -> Iterator[None]:
    """Allow for a reset right after another, before the workers were told what to finish."""
    scheduler = connector.connector_scheduler
    before, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
    try:
        yield
    finally:
        scheduler._current_batch_jobs_to_flush |= before


@contextlib.contextmanager
def manager_locked(connector: Any) -> Iterator[None]:
    """0.33 guards the manager with a lock; earlier ones call it from one thread only."""
    locked = getattr(connector.connector_scheduler, "_manager_locked", None)
    with locked() if locked is not None else contextlib.nullcontext():
        yield
