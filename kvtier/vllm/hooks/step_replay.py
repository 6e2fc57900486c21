"""What workers said in steps whose outputs never came, and were told in steps that never began.

An engine that tolerates faults drops all steps that are under way when one of them fails: what had
been copied by then would be awaited for ever, and hold its slots and vLLM's blocks. So steps have
numbers, workers keep what they say until the scheduler has heard it, and say it again when it asks.
vLLM 0.33 delivers late what it can save of such steps: so all that is said has a number, too, and
is heard once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.vllm.protocol import Errand, Report

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
    """If steps were lost: the jobs that began with them, by number. Workers are to say of each how
    it ended, though they may have said so before."""


@dataclass
class Job:
    """One of vLLM's jobs, as far as an end of it can be told: a store, or a request's load."""

    errand: Errand
    request: str | None = None


@dataclass
class Said:
    """What a worker has said at once."""

    jobs: Any
    """In vLLM's words: which have ended, and how long they took."""
    reports: dict[int, Report]
    """What became of errands, by number."""
    received: set[str]
    failed: set[str]
    """The requests whose loads have ended, and those of them whose loads have failed."""


Place = tuple[int, int]
"""Who has said something, by rank, and the how-manieth thing it is."""


class Steps:
    """The steps under way, as the scheduler knows them, and what so many ranks say in them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._begun = self._heard = 0
        self._ahead: deque[tuple[int, dict[int, Job]]] = deque()
        self._lost: dict[int, Job] | None = None
        self._known: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_AHEAD_MAX))
        """What was heard last of each rank."""
        self._arrived: Counter[str] = Counter()
        """On how many ranks the loads of these requests have ended."""

    def begin(self, metadata: Any, given_up: int | None) -> None:
        """A step with these of vLLM's jobs begins; its workers get their orders with them."""
        self._begun += 1
        metadata.orders = Orders(self._begun, self._heard, given_up, self._lost)
        # Copies, because a worker in this process takes jobs out of vLLM's.
        jobs = dict(self._lost or ())
        for number, job in metadata.store_jobs.items():
            jobs[number] = Job(job.dst_spec.errand)
        for number, job in metadata.load_jobs.items():
            jobs[number] = Job(job.src_spec.errand, job.req_id)
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

    def hear(self, said: Mapping[Place, Said]) -> list[Said]:
        """What of this was not heard before."""
        new = []
        for (rank, number), each in said.items():
            if number not in self._known[rank]:
                self._known[rank].append(number)
                new.append(each)
        return new

    def received(self, new: Iterable[Said]) -> set[str]:
        """The requests whose loads have ended, with this, on all ranks."""
        done = set()
        for request in (request for each in new for request in each.received):
            self._arrived[request] += 1
            if self._arrived[request] == self._ranks:
                del self._arrived[request]
                done.add(request)
        return done


class StepReplay:
    """What a worker has said, until the scheduler has heard it."""

    def __init__(self) -> None:
        self._step = self._numbered = 0
        self._said: deque[tuple[int, int, Said]] = deque()
        self._now: dict[int, Said] = {}

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        self._step = orders.step
        while self._said and self._said[0][0] <= orders.heard:
            self._said.popleft()

    def keep(self, said: Said) -> None:
        """This is said in the step."""
        self._numbered += 1
        self._said.append((self._step, self._numbered, said))
        self._now[self._numbered] = said

    def again(self) -> list[Said]:
        """Say all of it in this step once more; what that is."""
        self._now.update((number, said) for _, number, said in self._said)
        self._said = deque((self._step, number, said) for _, number, said in self._said)
        return list(self._now.values())

    @property
    def now(self) -> Collection[Said]:
        """What is said in this step."""
        return self._now.values()

    def take(self) -> dict[int, Said]:
        """The same, by number, to be sent: it is not said again unasked."""
        now, self._now = self._now, {}
        return now
