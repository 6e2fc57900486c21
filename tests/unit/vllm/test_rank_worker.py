"""The workers' side: ranks that hold the same, and ranks that hold a part each."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device.direct_engine import Tensor
from support.scheduler.asking import AddingManager

from kvtier import Stack
from kvtier.backends.cpu import Region
from kvtier.device.cpu import CpuCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.interfaces.handler import HostRegion
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import record_bytes
from kvtier.testing.subject import make_keys
from kvtier.types import Namespace, Outcome
from kvtier.vllm.protocol import NO_SLOT, RecordGeometry, WorkerJob
from kvtier.vllm.worker import EndedJob, RankShare, RankWorker

RANKS, LAYERS, PAGE, BLOCKS, CHUNKS = 2, 3, 2048, 16, 4
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Rank:
    """One rank's pages, and its worker."""

    def __init__(
        self,
        rank: int,
        *,
        ranks: int = RANKS,
        copies: int = 1,
        layers: int = LAYERS,
        pipelined: bool = False,
        per_chunk: int = 1,
        groups: int = 1,
    ) -> None:
        self.pages = np.zeros((layers, BLOCKS, PAGE), np.uint8)
        tensors = [
            SimpleNamespace(tensor=Tensor(each), page_size_bytes=PAGE) for each in self.pages
        ]
        refs = [SimpleNamespace(tensor_idx=at, page_size_bytes=PAGE) for at in range(layers)]
        self.worker = RankWorker(
            SimpleNamespace(tensors=tensors, group_data_refs=[refs] * groups),
            RankShare(rank, ranks, per_chunk, tuple(range(groups)), copies, pipelined),
            attach=Region.attach,
            open_copier=self._open,
        )

    def _open(self, layout: DeviceLayout, region: HostRegion, namespace: bytes) -> DeviceCopier:
        return CpuCopier(RankRecords(layout, region, namespace), list(self.pages))

    def ended(self, job: int) -> EndedJob:
        self.worker.wait([job])
        end = time.monotonic() + 60
        while not (found := self.worker.poll()):
            assert time.monotonic() < end
        (one,) = found
        return one


def stack_in(folder: Path, namespace: Namespace) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    size = (2 * CHUNKS) * (record_bytes(namespace.payload_bytes) + 4096)
    cpu = {"kind": "cpu", "path": str(folder), "capacity": size}
    return {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu]}


@pytest.mark.parametrize(
    ("copies", "layers"),
    [(1, (LAYERS, LAYERS)), (2, (LAYERS, LAYERS)), (2, (LAYERS,) * 4), (1, (1, LAYERS))],
)
def test_what_ranks_store_they_load(tmp_path: Path, copies: int, layers: tuple[int, ...]) -> None:
    """Each its part, or one of those that hold the same; in a pipeline as many layers as it has."""
    count = len(layers)
    parts = count // copies
    namespace = Namespace(
        facts={"model": "none"}, group_bytes=(parts * LAYERS * PAGE,), parts=parts
    )
    keys: list[bytes] = list(make_keys(CHUNKS))
    with Stack.open(stack_in(tmp_path, namespace), namespace) as stack:
        region = str(stack.host.region.path)  # type: ignore[attr-defined]
        manager = AddingManager(stack, region=region, ranks=count)
        pipelined = min(layers) < LAYERS
        ranks = [
            Rank(rank, ranks=count, copies=copies, layers=layers[rank], pipelined=pipelined)
            for rank in range(count)
        ]
        written = []
        for rank in ranks:
            random = np.random.default_rng(rank.worker._share.part)
            rank.pages[:, :CHUNKS] = random.integers(
                0, 256, (layers[rank.worker._share.part], CHUNKS, PAGE), np.uint8
            )
            written.append(rank.pages[:, :CHUNKS].copy())

        taken, worker_job = manager.prepare_store(keys, "a")
        assert taken == keys
        for rank in ranks:
            rank.worker.begin(STORE, 1, worker_job, DeviceBlocks(np.arange(CHUNKS), [CHUNKS], [0]))
        for rank in ranks:
            ended = rank.ended(1)
            assert ended.report.ranks == 1, "the last one only tells that all have written"
            manager.report(worker_job.number, ended.report)
        assert not manager.has_pending_work

        worker_job = manager.prepare_load(keys, "b")
        for rank in ranks:
            rank.worker.begin(
                LOAD, 2, worker_job, DeviceBlocks(np.arange(CHUNKS) + CHUNKS, [CHUNKS], [0])
            )
        for rank, expected in zip(ranks, written, strict=True):
            ended = rank.ended(2)
            assert ended.ok
            manager.report(worker_job.number, ended.report)
            assert (rank.pages[:, CHUNKS : 2 * CHUNKS] == expected).all()
        assert not manager.has_pending_work
        for rank in ranks:
            rank.worker.close()


@pytest.mark.parametrize(("layers", "pipelined"), [(0, True), (LAYERS - 1, False), (4, True)])
def test_a_rank_that_does_not_fit_keeps_nothing(
    layers: int, pipelined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on: each store fails, and is told."""
    rank = Rank(0, layers=layers, pipelined=pipelined)
    geometry = RecordGeometry(b"", (RANKS * LAYERS * PAGE,), RANKS)
    worker_job = WorkerJob(1, "/nowhere", geometry, list(make_keys(2)), [0, 1], 0.0)
    rank.worker.begin(STORE, 1, worker_job, DeviceBlocks(np.arange(2), [2], [0]))
    (ended,) = rank.worker.poll()
    assert not ended.ok
    assert set(ended.report.failures.values()) == {Outcome.IO_ERROR}
    assert "this layout is not supported, and nothing is kept" in caplog.text


def test_a_device_that_cannot_be_used_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of ROCm calls itself CUDA, too, and has nothing of its runtime."""
    namespace = Namespace(facts={"model": "none"}, group_bytes=(LAYERS * PAGE,))

    def refused(*_: object) -> DeviceCopier:
        raise RuntimeError("torch has loaded no CUDA runtime: this is a build without CUDA")

    with Stack.open(stack_in(tmp_path, namespace), namespace) as stack:
        manager = AddingManager(stack, region=str(stack.host.region.path), ranks=1)  # type: ignore[attr-defined]
        _, worker_job = manager.prepare_store(list(make_keys(2)), "a")
        rank = Rank(0, copies=RANKS)
        rank.worker._open_copier = refused
        for job in range(2):
            rank.worker.begin(STORE, job, worker_job, DeviceBlocks(np.arange(2), [2], [0]))
        for ended in rank.worker.poll():
            assert set(ended.report.failures.values()) == {Outcome.IO_ERROR}
        manager.report(worker_job.number, ended.report)
        rank.worker.close()
    assert caplog.text.count("a store of 2 blocks failed: torch has loaded no CUDA runtime") == 1


@pytest.mark.parametrize(
    ("sizes", "starts", "group", "stored"),
    [
        ([4, 0], [2, 1], 0, True),
        ([3, 0], [0, 0], 0, False),
        ([2, 0], [0, 0], 0, False),
        ([4, 0], [1, 0], 0, False),
        ([2, 2], [0, 0], 0, False),
        ([4, 0], [0, 0], 7, False),
    ],
    ids=[
        *("whole", "a block short", "a chunk short"),
        *("within a chunk", "of another group", "of no group"),
    ],
)
def test_chunks_with_holes_are_not_stored(
    tmp_path: Path, sizes: list[int], starts: list[int], group: int, stored: bool
) -> None:
    namespace = Namespace(facts={"model": "none"}, group_bytes=(2 * LAYERS * PAGE,) * 2)
    rank = Rank(0, copies=RANKS, per_chunk=2, groups=2)
    keys = [*make_keys(1), *make_keys(1, start=1, group=group)]
    with Stack.open(stack_in(tmp_path, namespace), namespace) as stack:
        manager = AddingManager(stack, region=str(stack.host.region.path), ranks=1)  # type: ignore[attr-defined]
        taken, worker_job = manager.prepare_store(keys, "a")
        assert len(taken) == 2
        rank.worker.begin(STORE, 1, worker_job, DeviceBlocks(np.arange(sum(sizes)), sizes, starts))
        ended = rank.ended(1)
        assert (ended.number, ended.ok, ended.report.ranks) == (worker_job.number, stored, 1)
        assert set(ended.report.failures) == (set() if stored else {0, 1})
        manager.report(worker_job.number, ended.report)
        assert not manager.has_pending_work
        rank.worker.close()


def test_a_load_of_which_a_block_was_not_taken_in_fails() -> None:
    rank = Rank(0)
    geometry = RecordGeometry(b"", (RANKS * LAYERS * PAGE,), RANKS)
    worker_job = WorkerJob(5, "/nowhere", geometry, list(make_keys(2)), [0, NO_SLOT], 0.0)
    rank.worker.begin(LOAD, 1, worker_job, DeviceBlocks(np.arange(2), [2], [0]))
    (ended,) = rank.worker.poll()
    assert not ended.ok
    assert ended.report.failures == dict.fromkeys(range(2), Outcome.DROPPED)
    assert not ended.report.reads_files, "nobody knows yet"


def test_each_worker_job_goes_to_the_region_that_it_names(tmp_path: Path) -> None:
    """And what was still to be told of the last one is told."""
    namespace = Namespace(facts={"model": "none"}, group_bytes=(LAYERS * PAGE,))
    rank, keys, copiers = Rank(0, copies=RANKS), list(make_keys(CHUNKS)), []
    with (
        Stack.open(stack_in(tmp_path / "a", namespace), namespace) as one,
        Stack.open(stack_in(tmp_path / "b", namespace), namespace) as other,
    ):
        managers = [
            AddingManager(stack, region=str(stack.host.region.path), ranks=1)  # type: ignore[attr-defined]
            for stack in (one, other)
        ]
        worker_jobs = []
        for job, manager in enumerate([*managers, managers[1]]):
            rank.pages[:, :CHUNKS] = job + 1
            wanted = keys[:2] if job < 2 else keys[2:]
            _, worker_job = manager.prepare_store(wanted, "a")
            rank.worker.begin(STORE, job, worker_job, DeviceBlocks(np.arange(2), [2], [0]))
            rank.worker.wait([job])
            worker_jobs.append(worker_job.number)
            copiers.append(rank.worker._copier)
        ended = {each.job_id: each for each in rank.worker.poll()}
        assert [ended[job].number for job in range(3)] == worker_jobs
        for job, manager in enumerate([*managers, managers[1]]):
            assert ended[job].ok
            manager.report(worker_jobs[job], ended[job].report)
        assert copiers[0] is not copiers[1] is copiers[2]
        for job, manager in enumerate(managers):
            worker_job = manager.prepare_load(keys[:2], "b")
            rank.worker.begin(LOAD, 9, worker_job, DeviceBlocks(np.arange(2) + 4, [2], [0]))
            assert rank.ended(9).ok
            assert (rank.pages[:, 4:6] == job + 1).all()
        rank.worker.close()


def test_one_load_of_several_is_given_up() -> None:
    given_up: list[int] = []
    rank = Rank(0, copies=RANKS)
    copier = SimpleNamespace(jobs=SimpleNamespace(give_up=given_up.append))
    rank.worker.give_up(5)
    rank.worker._numbers.update({1: (5, 4), 2: (6, 4), 3: (7, 4)})
    rank.worker.give_up(6)
    assert given_up == [], "nothing has been opened"
    rank.worker._copier = copier  # type: ignore[assignment]
    rank.worker.give_up(6)
    rank.worker.give_up(8)
    assert given_up == [2]


class Counted:
    """A rank whose copiers are counted, and how often they were asked to be ready."""

    def __init__(self, region: Path | None, group_bytes: int) -> None:
        self.rank, self.opened, self.ready = Rank(0), 0, 0
        self._open, worker = self.rank.worker._open_copier, self.rank.worker
        worker._open_copier = self.open
        worker._find_region = lambda: region
        worker.make_ready((group_bytes,), RANKS, 3)

    def open(self, layout: DeviceLayout, region: Region, namespace: bytes) -> DeviceCopier:
        self.opened += 1
        copier = self._open(layout, region, namespace)
        copier.make_ready = self.asked  # type: ignore[method-assign]
        return copier

    def asked(self, seconds: float) -> bool:
        self.ready += 1
        return False


def test_a_region_is_opened_before_the_engine_serves_and_not_anew_by_the_first_worker_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = RANKS * LAYERS * PAGE
    namespace = Namespace(facts={"model": "none"}, group_bytes=(size,), parts=RANKS)
    with Stack.open(stack_in(tmp_path, namespace), namespace) as stack:
        path = stack.host.region.path  # type: ignore[attr-defined]
        manager = AddingManager(stack, region=str(path), ranks=1)
        counted = Counted(path, size)
        assert (counted.opened, counted.ready) == (1, 1)
        assert "before its copies are as fast" in caplog.text
        assert counted.rank.worker._least_slots == 3
        _, worker_job = manager.prepare_store(list(make_keys(1)), "a")
        counted.rank.worker.begin(STORE, 1, worker_job, DeviceBlocks(np.arange(1), [1], [0]))
        assert counted.rank.ended(1).ok
        assert counted.opened == 1
        counted.rank.worker.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_region_that_cannot_be_opened_beforehand_is_left_to_the_first_worker_job(
    tmp_path: Path, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts; as behind another connector that vLLM asks first."""
    caplog.set_level("INFO", "kvtier")
    counted = Counted(tmp_path / "gone" if there else None, RANKS * LAYERS * PAGE)
    assert counted.opened == 0
    said = "cannot be opened before there are requests" if there else "with the first request"
    assert said in caplog.text
    counted.rank.worker.close()
