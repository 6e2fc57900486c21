"""Direct loads on a CUDA device: all of the way but the driver that needs special hardware.

The file is read through the host here; the buffers, the copies from them to the pages, the order
of streams and the proofs are those of real direct reads.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.host_reads import HostDriver

from kvtier.device.copier import CopyJob
from kvtier.device.cuda import device as cuda_device
from kvtier.device.direct import DirectDriver, DirectLoader, KvikioDriver, probe
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, Header, record_bytes, seal_part
from kvtier.slab import layout as table
from kvtier.types import FilePlace, Outcome

pytestmark = pytest.mark.gpu
PAGE, LAYERS, BLOCKS, RECORDS = 16 << 10, 4, 64, 12


def drivers() -> list[str]:
    """kvikio, too, where it can be loaded: through the host, which needs no special hardware."""
    try:
        importlib.import_module("kvikio")
    except (ImportError, OSError, RuntimeError):  # the last without libcufile.so
        return ["host", "host proves"]
    return ["host", "host proves", "kvikio"]


class Stage:
    """Records of two blocks each, in a file and in slots."""

    def __init__(self, torch: Any, folder: Path, driver: DirectDriver) -> None:
        shape = (LAYERS, BLOCKS, PAGE)
        self.pool = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        tensors = tuple(
            DeviceTensor(self.pool[layer].data_ptr(), BLOCKS, PAGE, PAGE) for layer in range(LAYERS)
        )
        refs = tuple(PageRef(layer, PAGE) for layer in range(LAYERS))
        self.layout = DeviceLayout(tensors, (refs,), 2)
        self.host = MemoryHost(self.layout, RECORDS)
        self.keys = keys_of(RECORDS)
        size, payload = record_bytes(self.layout.part_bytes[0]), self.layout.part_bytes[0]
        for slot, key in enumerate(self.keys):
            record = self.host.record(slot)
            Header(key, NAMESPACE, payload).write(record)
            part = record[HEADER_BYTES : HEADER_BYTES + payload]
            part[:] = np.random.default_rng(slot).bytes(payload)
            seal_part(record, 0, part)
            self.host.put(slot, key, table.VALID)
        self.path = folder / "slab"
        self.path.write_bytes(b"".join(bytes(self.host.record(slot)) for slot in range(RECORDS)))
        self._size = size
        self.copier = cuda_device.open_copier(
            self.layout,
            self.host,
            NAMESPACE,
            index=torch.cuda.current_device(),
            open_direct=lambda: DirectLoader(self.layout, driver, NAMESPACE, stages=3),
        )

    def load(self, direct: range, slots: range) -> list[Outcome]:
        rows = [*direct, *slots]
        job = CopyJob(
            id=1,
            kind=TransferKind.LOAD,
            keys=[self.keys[row] for row in rows],
            slots=[-1] * len(direct) + list(slots),
            blocks=DeviceBlocks(np.arange(2 * len(rows)), [2 * len(rows)], [0]),
            deadline=float("inf"),
            files={
                at: FilePlace(str(self.path), row * self._size) for at, row in enumerate(direct)
            },
        )
        self.copier.jobs.submit(job)
        while not (results := self.copier.jobs.poll()):
            time.sleep(0.0005)
        return results[0].outcomes

    def record(self, position: int) -> bytes:
        """What lies on the device where a job's record went."""
        pages = self.pool[:, 2 * position : 2 * position + 2].cpu().numpy()
        return bytes(pages.tobytes())


@pytest.fixture(params=drivers())
def stage(torch: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    index = torch.cuda.current_device()
    kvikio = request.param == "kvikio"
    proves = request.param != "host proves"
    driver = KvikioDriver(index, by_host=True) if kvikio else HostDriver(torch, proves=proves)
    stage = Stage(torch, tmp_path, driver)
    yield stage
    stage.copier.close()


def test_both_ways_bring_the_right_bytes(stage: Stage) -> None:
    assert stage.load(range(8), range(8, 12)) == [Outcome.OK] * 12
    for slot in range(RECORDS):
        payload = stage.host.record(slot)[HEADER_BYTES : HEADER_BYTES + len(stage.record(slot))]
        assert stage.record(slot) == bytes(payload)
    assert stage.copier.reads_files


def test_a_flipped_bit_in_the_file_does_not_reach_the_device(stage: Stage) -> None:
    with stage.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 99)
        file.write(b"\xff\x00")
    assert stage.load(range(1), range(0)) == [Outcome.CORRUPT]
    assert not stage.pool.any()


def test_memory_that_is_pinned_already_is_refused_with_a_reason(torch: Any) -> None:
    memory = np.zeros(3 * 4096, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % 4096
    registrar = cuda_device.CudaRegistrar(torch.cuda.cudart())
    assert registrar.register(address, 4096) is None
    assert registrar.register(address, 4096)
    registrar.unregister(address)
    assert registrar.register(address, 4096) is None
    registrar.unregister(address)


def test_the_attempt_at_direct_reads_has_an_answer(torch: Any, tmp_path: Path) -> None:
    reason = probe(tmp_path, device=torch.cuda.current_device())
    assert reason is None or reason
    print(f"GPUDirect Storage: {reason or 'works here'}")
