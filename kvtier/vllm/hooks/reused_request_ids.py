"""Requests with the name of one that has ended, of which vLLM's side may not be done yet.

It knows requests by their names, and keeps what it knows of one until the step after its end, and
until its stores have ended. One that comes by then takes its place, and is taken for it: both ends
end the engine. (vLLM makes names unique, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, or
they are given to the engine's core directly.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvtier.vllm.hooks import compat


def make_room(connector: Any, name: str) -> None:
    """Be done with whoever has ended and had this name, but for what is copied out of its blocks;
    what it has computed last, and a step would store now, is not kept."""
    scheduler = connector.connector_scheduler
    before = scheduler._req_status.get(name)
    if before is None or not before.req.is_finished():
        return
    if not before.finished_signaled:
        before.finished_signaled = True
        with compat.manager_locked(connector):
            scheduler.manager.on_request_finished(before.req_context)
    del scheduler._req_status[name]
    if before.transfer_jobs:
        other = f"{name} of job {min(before.transfer_jobs)}"
        scheduler._req_status[other] = before
        for job in before.transfer_jobs:
            scheduler._jobs[job].req_id = other


def without_namesakes(connector: Any, scheduled: Any) -> Any:
    """A step's output, in which none has ended that has only just come."""
    statuses = connector.connector_scheduler._req_status
    came = {
        name
        for name in scheduled.finished_req_ids
        if name in statuses and not statuses[name].req.is_finished()
    }
    if not came:
        return scheduled
    return dataclasses.replace(scheduled, finished_req_ids=scheduled.finished_req_ids - came)
