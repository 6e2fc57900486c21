"""One byte flipped anywhere below a reader: it is never served, whoever has to find it, and what
gave it is asked for it no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device.fake_device import FakeDevice

from kvtier import Stack
from kvtier.backends.cpu import CpuHandler
from kvtier.device.copier import CopyJob
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Outcome, Presence, SlotSpec

CPU, NVME, OBJECT = 0, 1, 2
NAMES = ["host", "nvme", "bucket"]
SLOT, PAGE = record_bytes(NAMESPACE.payload_bytes), 4096
KEYS = make_keys(4)
BAD = KEYS[1]
HEADER_AT, SUM_AT, PAYLOAD_AT = 60, 128, HEADER_BYTES + 5000

Reader = Callable[[Stack, list[BlockKey]], dict[BlockKey, bytes]]


def embedded(stack: Stack, keys: list[BlockKey]) -> dict[BlockKey, bytes]:
    """As a caller of the Python API."""
    return stack.load(keys)


class Worker:
    """As an engine's worker: a record is two pages of one tensor."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._pages = np.zeros((2 * len(KEYS), PAGE), np.uint8)

    def _open(self, stack: Stack) -> DeviceCopier:
        assert isinstance(stack.host, CpuHandler)
        region, digest = stack.host.region, NAMESPACE.digest
        tensor = DeviceTensor(int(self._pages.ctypes.data), len(self._pages), PAGE, PAGE)
        layout = DeviceLayout((tensor,), ((PageRef(0, PAGE),),), 2)
        if self._kind == "cpu":
            return CpuCopier(RankRecords(layout, region, digest), [self._pages])
        device = FakeDevice(staging=0 if self._kind == "streams" else 3, room=1 << 30)
        copier = CudaCopier(RankRecords(layout, region, digest), device)
        assert copier.prepared.wait(60)
        return copier

    def __call__(self, stack: Stack, keys: list[BlockKey]) -> dict[BlockKey, bytes]:
        found = stack.chain.lookup(keys)
        keys = [key for key, at in zip(keys, found, strict=True) if at is Presence.HIT]
        ticket = stack.chain.begin_load(keys, "worker", time.monotonic() + 60, proves=True)
        copier = self._open(stack)
        assert isinstance(ticket.spec, SlotSpec)
        self._pages[:] = 0
        blocks = DeviceBlocks(np.arange(2 * len(keys)), [2 * len(keys)], [0])
        copier.jobs.submit(
            CopyJob(
                id=1,
                kind=TransferKind.LOAD,
                keys=ticket.keys,
                slots=ticket.spec.slots,
                blocks=blocks,
                deadline=time.monotonic() + 60,
            )
        )
        copier.jobs.wait([1])
        results = copier.jobs.poll()
        while not results:
            results = copier.jobs.poll()
        copier.close()
        outcomes = dict(zip(ticket.keys, results[0].outcomes, strict=True))
        failed = {key: outcome for key, outcome in outcomes.items() if not outcome.ok}
        blamed = {key: why for key, why in failed.items() if why is not Outcome.CANCELLED}
        stack.chain.end_load(ticket, blamed, proved=outcomes.keys() - failed.keys())
        got = self._pages.reshape(len(KEYS), 2 * PAGE)
        return {key: got[at].tobytes() for at, key in enumerate(ticket.keys) if outcomes[key].ok}


READERS: dict[str, Reader] = {
    "embedded": embedded,
    "cpu": Worker("cpu"),
    "streams": Worker("streams"),
    "staged": Worker("staged"),
}


def a_stack(folder: Path, mode: str) -> Stack:
    for name in NAMES:
        (folder / name).mkdir()
    tiers: list[dict[str, Any]] = [
        {"kind": "cpu", "path": str(folder / "host"), "capacity": 16 * (SLOT + 64) + 12288},
        {"kind": "nvme", "path": str(folder / "nvme"), "capacity": "4MiB", "free_floor": 0},
        {"kind": "object", "url": f"file://{folder / 'bucket'}", "capacity": "64MiB"},
    ]
    source = {"version": 1, "name": "flips", "mover": {"mode": mode}, "tiers": tiers}
    return Stack.open(source, NAMESPACE)


def flip(folder: Path, at: int) -> int:
    """Flip a byte of the bad key's record in every file below; how many records there were."""
    found = 0
    for path in list(folder.rglob("*")):
        if path.suffix == ".making" or not path.is_file():  # a slab that the keeper will rename
            continue
        data, start = path.read_bytes(), -1
        while (start := data.find(payload(BAD), start + 1)) >= 0:
            place = start - HEADER_BYTES + at
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([data[place] ^ 0x10]))
            found += 1
    return found


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    stack = a_stack(tmp_path, request.param)
    assert stack.store({key: payload(key) for key in KEYS}) == KEYS
    assert stack.settle()
    yield stack
    stack.close()


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(HEADER_AT, marks=pytest.mark.slow, id="header"),
        pytest.param(SUM_AT, marks=pytest.mark.slow, id="sum"),
        pytest.param(PAYLOAD_AT, id="payload"),
    ],
)
@pytest.mark.parametrize("tier", [CPU, NVME, OBJECT], ids=NAMES)
@pytest.mark.parametrize(
    ("opened", "reader"),
    [*[("threads", each) for each in READERS], ("process", "embedded"), ("process", "cpu")],
    indirect=["opened"],
)
def test_a_flipped_byte_is_not_served(
    opened: Stack, tmp_path: Path, tier: int, at: int, reader: str
) -> None:
    read = READERS[reader]
    for above in opened.chain.tiers[:tier]:
        above.forget(KEYS)
        above.flush()
        above.refresh()
    assert flip(tmp_path / NAMES[tier], at) == 1
    right = {key: payload(key) for key in KEYS}
    first = read(opened, KEYS)
    assert BAD not in first
    assert first.items() <= right.items()
    assert opened.settle()
    assert [each.stats().corrupt for each in opened.chain.tiers] == [
        int(each == tier) for each in range(3)
    ]
    again = read(opened, KEYS)
    assert again.items() <= right.items()
    assert (BAD in again) is (tier != OBJECT), "the tier below has a good one, if there is one"
    assert again.keys() | {BAD} == set(KEYS)
