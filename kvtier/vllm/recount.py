"""What workers said in steps whose outputs never came, and were told in steps that never began.

An engine that tolerates faults drops all steps that are under way when one of them fails: what had
been copied by then would be awaited for ever, and hold its slots and vLLM's blocks. So steps have
numbers, workers keep what they say until the scheduler has heard it, and say it again when it asks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from kvtier.vllm.protocol import Errand

_AHEAD_MAX = 64
"""More steps are never under way; if it looks so, some have ended without a word."""


@dataclass
class Orders:
    """What workers are told with a step, beside vLLM's jobs."""

    step: int
    heard: int
    """The last step of which the scheduler has heard what workers said."""
    given_up: int | None = None
    """The errand of a load to wait for no longer."""
    again: dict[int, Job] | None = None
    """If what they have said since is lost: the jobs that they were given since, by number."""


@dataclass
class Job:
    """One of vLLM's jobs, as far as an end of it can be told: a store, or a request's load."""

    errand: Errand
    request: str | None = None


class Steps:
    """The steps under way, as the scheduler knows them."""

    def __init__(self) -> None:
        self._begun = self._heard = 0
        self._ahead: deque[tuple[int, dict[int, Job]]] = deque()
        self._lost: dict[int, Job] | None = None

    def begin(self, metadata: Any, given_up: int | None) -> None:
        """A step with these of vLLM's jobs begins; its workers get their orders with them."""
        self._begun += 1
        metadata.orders = Orders(self._begun, self._heard, given_up, self._lost)
        # Copies, because a worker in this process takes jobs out of vLLM's.
        jobs = {
            **(self._lost or {}),
            **{number: Job(job.dst_spec.errand) for number, job in metadata.store_jobs.items()},
            **{
                number: Job(job.src_spec.errand, job.req_id)
                for number, job in metadata.load_jobs.items()
            },
        }
        self._ahead.append((self._begun, jobs))
        self._lost = None
        if len(self._ahead) > _AHEAD_MAX:
            self._ahead.popleft()

    def ended(self) -> None:
        """The oldest one's output has come."""
        if self._ahead:
            self._heard, _ = self._ahead.popleft()

    def lost(self) -> None:
        """No output of those under way comes any more."""
        lost: dict[int, Job] = {}
        for _, jobs in self._ahead:
            lost.update(jobs)
        self._ahead.clear()
        self._lost = {**(self._lost or {}), **lost}


@dataclass
class Said:
    """What a worker has said in a step."""

    metadata: Any
    received: set[str]
    failed: set[str]


class Unheard:
    """What a worker has said, until the scheduler has heard it."""

    def __init__(self) -> None:
        self._step = 0
        self._said: deque[tuple[int, Said]] = deque()

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        self._step = orders.step
        while self._said and self._said[0][0] <= orders.heard:
            self._said.popleft()

    def keep(self, said: Said) -> None:
        """This is said in the step."""
        self._said.append((self._step, said))

    def take(self) -> list[Said]:
        """All of it, to be said again."""
        again = [said for _, said in self._said]
        self._said.clear()
        return again
