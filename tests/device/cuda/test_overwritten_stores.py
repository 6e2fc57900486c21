"""Stores out of blocks that the engine has written to before they were copied out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.device.direct_engine import Tensor
from support.scheduler.asking import AddingManager

from kvtier import Stack
from kvtier.backends.cpu import Region
from kvtier.device.cpu import CpuCopier, PageCopier
from kvtier.device.layout import DeviceBlocks
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import Buffer, record_bytes
from kvtier.testing.subject import make_keys
from kvtier.types import Namespace
from kvtier.vllm import worker as rank_worker
from kvtier.vllm.worker import EndedJob, RankShare, RankWorker

PAGE, CHUNKS = 2048, 4
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Setting:
    """A rank with pages of its own, and the scheduler's side of its engine."""

    def __init__(self, folder: Path) -> None:
        self.pages = np.zeros((2 * CHUNKS, PAGE), np.uint8)
        caches = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=Tensor(self.pages), page_size_bytes=PAGE)],
            group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
        )
        namespace = Namespace(facts={"model": "none"}, group_bytes=(PAGE,))
        size = 2 * CHUNKS * (record_bytes(PAGE) + 4096)
        cpu = {"kind": "cpu", "path": str(folder), "capacity": size}
        config = {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu]}
        self.stack = Stack.open(config, namespace)
        region = str(self.stack.host.region.path)  # type: ignore[attr-defined]
        self.manager = AddingManager(self.stack, region=region, ranks=1)
        self.keys: list[bytes] = list(make_keys(CHUNKS))
        self.worker = RankWorker(
            caches,
            RankShare(rank=0, ranks=1, blocks_per_chunk=1, group_ids=(0,)),
            attach=Region.attach,
            open_copier=lambda layout, region, namespace: CpuCopier(
                RankRecords(layout, region, namespace), [self.pages]
            ),
        )

    def store(self) -> int:
        taken, worker_job = self.manager.prepare_store(self.keys, "a")
        assert taken == self.keys
        self.worker.begin(STORE, 1, worker_job, DeviceBlocks(np.arange(CHUNKS), [CHUNKS], [0]))
        return worker_job.number

    def load(self) -> int:
        worker_job = self.manager.prepare_load(self.keys, "b")
        self.worker.begin(
            LOAD, 2, worker_job, DeviceBlocks(np.arange(CHUNKS) + CHUNKS, [CHUNKS], [0])
        )
        return worker_job.number

    def end(self, number: int) -> EndedJob:
        while not (found := self.worker.poll()):
            pass
        (ended,) = found
        self.manager.report(number, ended.report)
        return ended


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(rank_worker, "writes_first", lambda: True)
    setting = Setting(tmp_path)
    yield setting
    setting.worker.close()
    setting.stack.close()


def test_what_had_not_left_by_the_last_step_is_not_kept(setting: Setting) -> None:
    number = setting.store()
    setting.worker.release_blocks({1})  # its blocks have other owners now, and are zero perhaps
    ended = setting.end(number)
    assert not ended.ok
    assert setting.manager.failed_stores == CHUNKS
    assert setting.store(), "the next to compute it stores it"
    assert not setting.worker._overtaken


def test_nobody_waits_for_what_is_lost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record is being copied out, the others wait for their turn: the engine goes on."""
    monkeypatch.setattr(CpuCopier, "_BATCH_BYTES", 1)
    begun, end, copied = threading.Event(), threading.Event(), list[int]()
    gather = PageCopier.gather

    def held(pages: PageCopier, group: int, ids: Sequence[int], part: Buffer) -> int:
        copied.extend(ids)
        begun.set()
        end.wait()
        return gather(pages, group, ids, part)

    monkeypatch.setattr(PageCopier, "gather", held)
    number = setting.store()
    begun.wait()
    setting.worker.release_blocks({1})
    assert not setting.worker.poll(), "its slots are not free yet"
    end.set()
    assert not setting.end(number).ok
    assert copied == [0]
    assert setting.manager.failed_stores == CHUNKS


def test_loads_need_not_wait_for_what_comes_after_all_writing(setting: Setting) -> None:
    """The engine has written to their blocks before it calls; what it computes then has others."""
    assert setting.worker.mark() is None, "no copier is open"
    setting.end(setting.store())
    copier = setting.worker._copier
    assert copier is not None
    with (
        mock.patch.object(copier.jobs, "mark", return_value="before"),
        mock.patch.object(copier.jobs, "submit") as submit,
    ):
        worker_job = setting.manager.prepare_load(setting.keys, "b")
        setting.worker.begin(
            LOAD, 2, worker_job, DeviceBlocks(np.arange(CHUNKS), [CHUNKS], [0]), "before"
        )
        assert setting.worker.mark() == "before"
        setting.worker._writes_first = False
        assert setting.worker.mark() is None, "it may yet write there"
    assert submit.call_args.args[1] == "before"
    del setting.worker._numbers[2]


def test_what_had_left_is_kept(setting: Setting) -> None:
    ended = setting.end(setting.store())
    setting.worker.release_blocks({1})
    assert ended.ok
    assert setting.manager.failed_stores == 0


def test_loads_are_not_spoilt_by_that(setting: Setting) -> None:
    setting.end(setting.store())
    number = setting.load()
    setting.worker.release_blocks({2})
    assert setting.end(number).ok


def test_an_engine_that_asks_first_loses_nothing(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    number = setting.store()
    setting.worker.release_blocks({1})
    assert setting.end(number).ok
    setting.worker.close()
    setting.stack.close()
