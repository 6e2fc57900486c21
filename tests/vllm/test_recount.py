"""Ranks and a scheduler of which steps get lost, on the way there or back."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks.step_replay import Steps
from kvtier.vllm.protocol import Errand, Report
from kvtier.vllm.worker.rank_worker import Ended


class Copies:
    """What a rank copies: begun when told to, ended when the dice say so."""

    def __init__(self) -> None:
        self.under_way: dict[int, int] = {}
        self.ended: list[Ended] = []

    def submit_store(self, job: int, _source: object, target: Any) -> None:
        assert job not in self.under_way
        self.under_way[job] = target.errand.number

    def submit_load(self, job: int, source: Any, target: object) -> None:
        self.submit_store(job, target, source)

    def abandon(self, job: int, errand: Errand) -> None:
        assert job not in self.under_way
        self.ended.append(Ended(job, errand.number, False, Report(ranks=1), 0.0))

    def end(self, job: int) -> None:
        self.ended.append(Ended(job, self.under_way.pop(job), True, Report(ranks=1), 0.0))

    def take_ended(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def end_step(self) -> None: ...

    begin_step = end_step


class Fleet:
    """Ranks, and a scheduler that only counts."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.steps = Steps(ranks=2)
        self.ranks = [_rank(each) for each in range(2)]
        self.jobs = 0
        self.told: Counter[int] = Counter()
        self.reported: Counter[int] = Counter()
        self.received: Counter[str] = Counter()
        self.ahead: list[list[Any]] = []
        self.late: list[Any] = []
        """Outputs of lost steps that vLLM has saved, to be delivered with a later one."""
        self.failing = True

    def step(self, new: int) -> None:
        """One with so many new jobs, which may or may not come to be computed on each rank."""
        metadata = SimpleNamespace(store_jobs={}, load_jobs={}, jobs_to_flush=None)
        for _ in range(new):
            self.jobs += 1
            errand = SimpleNamespace(errand=SimpleNamespace(number=self.jobs))
            kind, name = self.dice.choice(
                [(metadata.store_jobs, "stores"), (metadata.load_jobs, f"request-{self.jobs}")]
            )
            kind[self.jobs] = SimpleNamespace(src_spec=errand, dst_spec=errand, req_id=name)
        self.steps.begin(metadata, None)
        self.ahead.append([self._compute(rank, metadata) for rank in self.ranks])

    def _compute(self, rank: Any, metadata: Any) -> Any:
        if self.fails():
            return None
        given = copy.deepcopy(metadata)
        rank.handle_preemptions(given)
        rank.start_kv_transfers(given)
        for number, job in given.store_jobs.items():
            rank._unsubmitted_store_jobs.append((number, job.src_spec, job.dst_spec))
        for job in list(rank.worker.under_way):
            if self.dice.random() < 0.5:
                rank.worker.end(job)
        _, received = rank.get_finished(set())
        said = rank.build_connector_worker_meta()
        return None if self.fails() else (received, said)

    def fails(self) -> bool:
        return self.failing and self.dice.random() < 0.1

    def hear(self) -> None:
        """The oldest step's output. If a rank has none of it, all are dropped, or saved."""
        outputs = self.ahead.pop(0)
        if None in outputs:
            self.steps.lost()
            for output in itertools.chain(outputs, *self.ahead):
                if output is not None and self.dice.random() < 0.5:
                    self.late.append(output)
            self.ahead.clear()
            if self.dice.random() < 0.5:
                self._take(())
            return
        self.steps.ended()
        self._take(outputs)

    def _take(self, outputs: Iterable[Any]) -> None:
        from kvtier.vllm.hooks.failure_tolerant_worker import hear

        late, self.late = self.late, []
        received, metadata = set(), None
        for here, said in (*late, *outputs):
            received.update(here)  # more than those of which all ranks have said so
            if said is not None:
                metadata = said if metadata is None else metadata.aggregate(said)
        output = SimpleNamespace(kv_connector_worker_meta=metadata, finished_recving=received)
        reports = hear(output, self.steps)
        self.received.update(output.finished_recving)
        self.told.update(getattr(output.kv_connector_worker_meta, "completed_jobs", {}))
        self.reported.update({number: report.ranks for number, report in reports.items()})


def _rank(rank: int) -> Any:
    from kvtier.vllm.hooks.failure_tolerant_worker import FailureTolerantWorker

    rank = FailureTolerantWorker(
        SimpleNamespace(
            replicated_layout=False,
            config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=rank)),
        ),
        None,
        None,
    )
    rank.worker = Copies()
    return rank


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
@pytest.mark.parametrize("seed", range(40))
def test_each_rank_tells_once_of_each_job(seed: int) -> None:
    """However many steps are lost before a rank has them, or before it is heard, and whatever of
    that is delivered late."""
    fleet = Fleet(seed)
    for at in range(200):
        fleet.failing = at < 150
        fleet.step(fleet.dice.randrange(3) if at < 150 else 0)
        while len(fleet.ahead) > fleet.dice.randrange(2):
            fleet.hear()
    while fleet.ahead:
        fleet.hear()
    everything = dict.fromkeys(range(1, fleet.jobs + 1), 2)
    assert fleet.told == fleet.reported == everything
    assert len(fleet.received) > 20
    assert set(fleet.received.values()) == {1}
    assert not any(rank._unheard._said for rank in fleet.ranks)
