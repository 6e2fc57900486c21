"""On a CUDA device: the same promises that the fake device keeps, and the bytes to prove it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cuda import device as cuda_device
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.cuda.device import Cuda, open_copier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef, cut
from kvtier.device.pinned import PinnedMemory
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import part_sum, pieces_of, sum_of
from kvtier.slab import layout as table
from kvtier.types import BlockKey, Outcome

pytestmark = pytest.mark.gpu
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
BLOCKS = 64


class Stage:
    """Two groups over four tensors: padded pages, one tensor shared, three blocks a chunk."""

    def __init__(self, torch: Any, page: int, *, wait: bool = True) -> None:
        self.torch = torch
        self.pools = [
            torch.randint(0, 255, (BLOCKS, page + pad), dtype=torch.uint8, device="cuda")
            for pad in (0, 0, 64, 0)
        ]
        tensors = tuple(
            DeviceTensor(pool.data_ptr(), BLOCKS, pool.stride(0), pool.shape[1])
            for pool in self.pools
        )
        groups = (
            tuple(PageRef(index, page) for index in (0, 1, 2)),
            (PageRef(2, page - 8), PageRef(3, page)),
        )
        self.page = page
        self.layout = DeviceLayout(tensors, groups, 3)
        self.host = MemoryHost(self.layout, BLOCKS)
        self.copier: CudaCopier = open_copier(
            self.layout, self.host, NAMESPACE, index=torch.cuda.current_device()
        )
        assert not wait or self.copier.prepared.wait(180)
        self.keys: list[BlockKey] = []

    def run(self, kind: TransferKind, blocks: DeviceBlocks, first: int = 0) -> CopyResult:
        groups = cut(self.layout, blocks).groups
        keys = keys_of(len(groups), groups=groups)
        state = table.RESERVED if kind is STORE else table.VALID
        slots = list(range(first, first + len(keys)))
        for slot, key in zip(slots, keys, strict=True):
            self.host.put(slot, key, state)
        self.copier.jobs.submit(
            CopyJob(id=1, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf"))
        )
        while not (results := self.copier.jobs.poll()):
            time.sleep(0.0005)
        return results[0]


def no_stages(*arguments: object, **options: object) -> list[Any]:
    raise RuntimeError("a test wants none")


@pytest.fixture(
    params=[(page, staged) for page in (1024, 16384, 262144, 1 << 20) for staged in (True, False)],
    ids=lambda param: f"{param[0]} bytes, {'staged' if param[1] else 'page by page'}",
)
def stage(
    torch: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """Pages of several sizes, by way of buffers on the device and without."""
    page, staged = request.param
    if not staged:
        monkeypatch.setattr(Cuda, "stages", no_stages)
    stage = Stage(torch, page)
    assert stage.copier.staged == staged
    yield stage
    stage.copier.close()


def test_pages_out_and_back_to_other_blocks(stage: Stage) -> None:
    ids = np.random.default_rng(0).permutation(BLOCKS)
    away = DeviceBlocks(ids[:24], [12, 12], [0, 3])
    back = DeviceBlocks(ids[24:48], [12, 12], [0, 3])
    before = [pool.clone() for pool in stage.pools]
    assert stage.run(STORE, away).ok
    assert stage.run(LOAD, back).ok
    for group, refs in enumerate(stage.layout.groups):
        part = slice(group * 12, group * 12 + 12)
        for ref in refs:
            wanted = before[ref.tensor][ids[:24][part], : ref.page_bytes]
            found = stage.pools[ref.tensor][ids[24:48][part], : ref.page_bytes]
            assert (wanted == found).all()
    untouched = ids[48:]
    for pool, old in zip(stage.pools, before, strict=True):
        assert (pool[untouched] == old[untouched]).all()


def test_a_partial_first_chunk(stage: Stage) -> None:
    before = stage.pools[0].clone()
    assert stage.run(STORE, DeviceBlocks(np.arange(6), [6, 0], [0, 0])).ok
    assert stage.run(LOAD, DeviceBlocks(np.arange(32, 36), [4, 0], [2, 0])).ok
    assert (stage.pools[0][32:36, : stage.page] == before[2:6, : stage.page]).all()


def test_a_store_sees_what_the_model_wrote_before_and_nothing_later(stage: Stage) -> None:
    torch = stage.torch
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 64
    stage.pools[0][:3].fill_(42)
    assert stage.run(STORE, DeviceBlocks(np.arange(3), [3, 0], [0, 0])).ok
    stage.pools[0][:3].fill_(43)
    assert stage.run(LOAD, DeviceBlocks(np.arange(40, 43), [3, 0], [0, 0])).ok
    assert (stage.pools[0][40:43, : stage.page] == 42).all()


def test_a_flipped_bit_does_not_reach_the_device(stage: Stage) -> None:
    assert stage.run(STORE, DeviceBlocks(np.arange(3), [3, 0], [0, 0])).ok
    stage.host.record(0)[5000] ^= 1
    before = stage.pools[0].clone()
    result = stage.run(LOAD, DeviceBlocks(np.arange(32, 35), [3, 0], [0, 0]))
    assert result.outcomes == [Outcome.CORRUPT]
    assert (stage.pools[0] == before).all()


def test_memory_that_is_not_pinned_yet(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("pin_first", "pin_rest"):
        monkeypatch.setattr(PinnedMemory, step, lambda self, stopping: False)
    stage = Stage(torch, 16384)
    before = stage.pools[0].clone()
    assert stage.run(STORE, DeviceBlocks(np.arange(6), [6, 0], [0, 0])).ok
    assert stage.run(LOAD, DeviceBlocks(np.arange(32, 38), [6, 0], [0, 0])).ok
    assert (stage.pools[0][32:38, : stage.page] == before[:6, : stage.page]).all()
    stage.copier.close()


def test_an_engine_captures_graphs_while_the_copier_gets_ready(torch: Any) -> None:
    """vLLM does, just after it has handed over its tensors."""
    numbers = torch.zeros(1024, device="cuda")
    numbers.add_(0)
    stage = Stage(torch, 16384, wait=False)
    before = stage.pools[0].clone()
    graphs = 0
    while graphs < 3 or not stage.copier.prepared.is_set():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numbers.add_(1)
        graph.replay()
        graphs += 1
    assert (numbers == graphs).all()
    assert stage.copier.staged
    assert stage.run(STORE, DeviceBlocks(np.arange(6), [6, 0], [0, 0])).ok
    assert stage.run(LOAD, DeviceBlocks(np.arange(32, 38), [6, 0], [0, 0])).ok
    assert (stage.pools[0][32:38, : stage.page] == before[:6, : stage.page]).all()
    stage.copier.close()


def test_kernels_that_were_built_at_the_start_are_not_built_again(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM can forbid to build any while it serves (--jit-monitor-mode=error)."""
    knobs = pytest.importorskip("triton").knobs
    index = torch.cuda.current_device()
    cuda_device.build_kernels(index)

    def forbid(**_: object) -> None:
        raise RuntimeError("a kernel is built while the engine serves")

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", forbid)
    stage = Stage(torch, 16384)
    assert stage.copier.staged
    stage.copier.close()


def test_kernels_are_launched_by_the_driver_alone(torch: Any) -> None:
    """By Triton, a link would be kept waiting for the host."""
    launch = pytest.importorskip("kvtier.device.cuda.runtime")
    stage = Stage(torch, 16384)
    assert stage.run(STORE, DeviceBlocks(np.arange(6), [6, 0], [0, 0])).ok
    interpreted = pytest.importorskip("triton").knobs.runtime.interpret
    assert launch._builds
    assert all((build is None) == interpreted for build in launch._builds.values())
    stage.copier.close()


def test_few_streams_are_taken_that_the_engine_might_share(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has 32 of each kind."""
    taken, make = [], torch.cuda.Stream

    def count(*arguments: Any, **options: Any) -> Any:
        if "stream_id" not in options:  # else torch asks for one that is there
            taken.append(options.get("priority", 0))
        return make(*arguments, **options)

    monkeypatch.setattr(torch.cuda, "Stream", count)
    cuda_device.build_kernels(torch.cuda.current_device())
    stage = Stage(torch, 16384)
    assert stage.copier.staged
    stage.copier.close()
    assert 0 < taken.count(0) <= 8


@pytest.mark.parametrize(
    "size", [256, 1024, 1088, 40_000, 2 << 20, (2 << 20) + 1024, (4 << 20) + 1016, 7_654_320]
)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_device_takes_the_checksums_that_the_host_takes(
    torch: Any, size: int, parts: int
) -> None:
    kernels = pytest.importorskip("kvtier.device.cuda.kernels")
    staging = pytest.importorskip("kvtier.device.cuda.staging_buffers")
    words = torch.int64
    data = torch.randint(0, 255, (parts * size,), dtype=torch.uint8, device="cuda")
    numbers = torch.from_numpy(kernels.constants()).to("cuda:0")
    totals = torch.empty(kernels.totals_of(parts, size), dtype=words, device="cuda")
    pieces = pieces_of(size)
    sums = torch.zeros(parts * pieces, dtype=words, device="cuda")
    programs = staging.programs_on(torch, torch.device("cuda", 0))
    kernels.digest(data.view(words), numbers, totals, sums.data_ptr(), parts, size, programs)
    torch.cuda.synchronize()
    found = sums.cpu().numpy().view(np.uint64).reshape(parts, pieces).tolist()
    host = data.cpu().numpy().reshape(parts, size)
    assert [sum_of(row) for row in found] == [part_sum(part.data) for part in host]
