"""What is said to CUDA: checked against a runtime that only listens."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.device.cuda import device as cuda
from kvtier.device.cuda import runtime as cuda_runtime
from kvtier.device.cuda.runtime import BatchCopy, few_at_once
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.pinned import PinnedMemory, PinPlan
from kvtier.slab.layout import pieces_of
from kvtier.system.memory import Topology


class Listener:
    """A registrar that refuses a range if told so."""

    def __init__(self, refuse_at: int = -1) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.returned: list[int] = []
        self._refuse_at = refuse_at

    def register(self, address: int, size: int) -> str | None:
        if len(self.ranges) == self._refuse_at:
            return "out of memory"
        self.ranges.append((address, size))
        return None

    def unregister(self, address: int) -> None:
        self.returned.append(address)


def pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory as a region is: it begins with a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def pinned_by(
    registrar: Any, data: memoryview, slot_bytes: int, piece_bytes: int, page_bytes: int = 4096
) -> PinnedMemory:
    """Memory that is pinned in pieces of about so many bytes."""
    first_at = np.frombuffer(data, np.uint8).ctypes.data
    slots = len(data) // slot_bytes
    order = list(pieces_of(slots, slot_bytes, first_at, piece_bytes, page_bytes))
    return PinnedMemory(data, slot_bytes, registrar, PinPlan(order=order), page_bytes=page_bytes)


def pin(memory: PinnedMemory, stopping: threading.Event | None = None) -> bool:
    """As a copier does."""
    stopping = stopping or threading.Event()
    memory.pin_first(stopping)
    return memory.pin_rest(stopping)


def test_a_region_is_pinned_in_pieces_that_end_where_slots_end() -> None:
    memory, registrar = pages(10 * 4096), Listener()
    pinned = pinned_by(registrar, memory.data, 2 * 4096, 5 * 4096)
    base = memory.ctypes.data
    assert pin(pinned)
    assert registrar.ranges == [
        (base, 4 * 4096), (base + 4 * 4096, 4 * 4096), (base + 8 * 4096, 2 * 4096)
    ]  # fmt: skip
    pinned.close()
    pinned.close()
    assert registrar.returned == [base + 8 * 4096, base + 4 * 4096, base]


def test_a_slot_that_is_longer_than_a_piece_is_one() -> None:
    memory, registrar = pages(4 * 4096), Listener()
    assert pin(pinned_by(registrar, memory.data, 2 * 4096, 4096))
    base = memory.ctypes.data
    assert registrar.ranges == [(base, 2 * 4096), (base + 2 * 4096, 2 * 4096)]


def test_pinning_ends_early_if_it_is_to_stop() -> None:
    memory, stopping = pages(10 * 4096), threading.Event()

    class Stopper(Listener):
        def register(self, address: int, size: int) -> str | None:
            if len(self.ranges) == 2:
                stopping.set()
            return super().register(address, size)

    registrar = Stopper()
    pinned = pinned_by(registrar, memory.data, 4096, 4096)
    assert not pin(pinned, stopping)
    assert len(registrar.ranges) == 3
    pinned.close()
    assert sorted(registrar.returned) == [address for address, _ in registrar.ranges]


def test_a_refused_piece_leaves_those_before_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, registrar = pages(10 * 4096), Listener(refuse_at=2)
    pinned = pinned_by(registrar, memory.data, 4096, 4 * 4096)
    assert not pin(pinned)
    assert registrar.returned == [], "copies use them by now"
    assert "8192 of the CPU tier's 40960 bytes stay pageable" in caplog.text
    assert "out of memory" in caplog.text
    pinned.close()
    assert sorted(registrar.returned) == [address for address, _ in registrar.ranges]


class Pages(Listener):
    """Pins the pages that a range lies in, and none twice, as the driver does."""

    def __init__(self, page_bytes: int) -> None:
        super().__init__()
        self._page_bytes = page_bytes
        self.pinned: set[int] = set()

    def register(self, address: int, size: int) -> str | None:
        pages = set(range(address // self._page_bytes, -(-(address + size) // self._page_bytes)))
        if pages & self.pinned:
            return "CUDA error 712"
        self.pinned |= pages
        return super().register(address, size)


@pytest.mark.parametrize(("slot_pages", "pieces"), [(3, 2), (5, 3), (32, 1)])
def test_where_the_system_has_large_pages_none_is_pinned_twice(
    slot_pages: int, pieces: int
) -> None:
    """As on Arm, of 64 KiB: slots are made of smaller ones."""
    page, slot, slots = 1 << 16, slot_pages * 4096, 50
    memory = pages(slots * slot + 2 * page)
    skip = -memory.ctypes.data % page + 3 * 4096
    registrar = Pages(page)
    data = memory.data[skip : skip + slots * slot]
    assert pin(pinned_by(registrar, data, slot, 4 * page, page))
    begins = [address for address, _ in registrar.ranges]
    ends = [address + size for address, size in registrar.ranges]
    base = memory.ctypes.data + skip
    assert (len(begins), begins[0], ends[-1]) == (pieces, base, base + len(data))
    assert begins[1:] == ends[:-1]
    assert all((end - base) % slot == 0 for end in ends)


class Runtime:
    """Stands for libcudart: notes the arguments of each call."""

    def __init__(self, version: int, result: int = 0, driver: int = 13000) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.forgotten = 0
        self.mode = 0
        self._version = version
        self._driver = driver
        self._result = result

    def cudaRuntimeGetVersion(self, into: Any) -> int:  # noqa: N802
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self._version
        return 0

    def cudaDriverGetVersion(self, into: Any) -> int:  # noqa: N802
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self._driver
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.forgotten += 1
        return self._result

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0]
        return 0

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.calls.append(arguments)
        return self._result

    def cudaMemcpyAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.calls.append(arguments)
        return self._result


class Torch:
    """Stands for torch: knows the current stream."""

    class cuda:  # noqa: N801
        class _Stream:
            cuda_stream = 77

        @classmethod
        def current_stream(cls) -> Any:
            return cls._Stream()


def columns(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def copy_with(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> BatchCopy:
    monkeypatch.setattr(cuda_runtime, "runtime", lambda: runtime)
    return cuda_runtime.runtime_copy(Torch)


@pytest.mark.parametrize(("version", "arguments"), [(12080, 9), (12090, 9), (13000, 8)])
def test_the_batched_copy_of_each_runtime(
    monkeypatch: pytest.MonkeyPatch, version: int, arguments: int
) -> None:
    runtime = Runtime(version)
    copy = copy_with(monkeypatch, runtime)
    copy(columns(10, 20), columns(30, 40), columns(5, 6), False)
    (call,) = runtime.calls
    assert len(call) == arguments
    read = [ctypes.cast(each, ctypes.POINTER(ctypes.c_int64))[:2] for each in call[:3]]
    assert read == [[10, 20], [30, 40], [5, 6]]
    assert (call[3].value, call[6].value, call[-1].value) == (2, 1, 77)
    assert ctypes.sizeof(cuda_runtime._Attributes) == 24
    assert call[4]._obj.source_order == 1


def test_quiet_sources_may_be_read_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(13000)
    copy_with(monkeypatch, runtime)(columns(1), columns(2), columns(3), True)
    assert runtime.calls[0][4]._obj.source_order == 3


@pytest.mark.parametrize(("version", "driver"), [(12040, 13000), (12090, 12040)])
def test_an_old_runtime_or_driver_copies_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, version: int, driver: int
) -> None:
    runtime = Runtime(version, driver=driver)
    copy_with(monkeypatch, runtime)(columns(10, 20), columns(30, 40), columns(5, 6), False)
    assert [tuple(each.value for each in call[:3]) for call in runtime.calls] == [
        (10, 30, 5), (20, 40, 6)
    ]  # fmt: skip


@pytest.mark.parametrize("version", [12040, 13000])
def test_an_error_code_is_raised(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    runtime = Runtime(version, result=700)
    copy = copy_with(monkeypatch, runtime)
    with pytest.raises(RuntimeError, match="700"):
        copy(columns(1), columns(2), columns(3), False)
    assert runtime.forgotten == 1, "torch would report it after its next kernel"


class Unable(Runtime):
    """Has the call, and says that it cannot do it."""

    def cudaMemcpyAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.calls.append(arguments)
        return 0


def test_a_batched_copy_that_is_not_supported_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Unable(13000, result=801)
    copy = copy_with(monkeypatch, runtime)
    for _ in range(2):
        copy(columns(10, 20), columns(30, 40), columns(5, 6), False)
    assert [len(call) for call in runtime.calls] == [8, 5, 5, 5, 5]
    assert runtime.forgotten == 1
    assert caplog.text.count("every page costs a call") == 1


def test_many_pieces_take_several_calls() -> None:
    calls: list[tuple[Any, ...]] = []
    sources = np.arange(10_000)
    held = few_at_once(lambda *call: calls.append(call))(sources + 1, sources, sources, True)
    assert held == [None] * 3
    assert max(len(call[2]) for call in calls) <= 4096
    for column, given in enumerate((sources + 1, sources, sources)):
        assert (np.concatenate([call[column] for call in calls]) == given).all()
    assert all(call[3] for call in calls)


class Wrapped:
    """An error as torch wraps it."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_registration_is_for_every_context_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []

    class Cudart:
        @staticmethod
        def cudaHostRegister(*arguments: int) -> Wrapped:  # noqa: N802
            asked.append(arguments)
            return Wrapped(712 if len(asked) > 1 else 0)

    runtime = Runtime(13000)
    monkeypatch.setattr(cuda_runtime, "runtime", lambda: runtime)
    registrar = cuda.CudaRegistrar(Cudart)
    assert registrar.register(4096, 8192) is None
    assert registrar.register(4096, 8192) == "CUDA error 712"
    assert asked[0] == (4096, 8192, 3)
    assert runtime.forgotten == 1


class Point:
    """Stands for a stream, and for an event of torch's, which may fail when it is recorded."""

    def __init__(self, recorded: bool = True) -> None:
        self._recorded = recorded
        self.waited = 0

    def record(self, stream: Point) -> None:
        if not self._recorded:
            raise RuntimeError("CUDA error: out of memory")

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("recorded", [True, False])
def test_where_no_event_can_be_had_the_stream_is_waited_for(recorded: bool) -> None:
    """Else a job ended while its copies still write to pages that others are given."""
    event, stream = Point(recorded), Point()
    torch = SimpleNamespace(cuda=SimpleNamespace(Event=lambda blocking: event))
    lane: Any = cuda.CudaStream(torch, stream, lambda *columns: None)
    lane.record().synchronize()
    assert (event.waited, stream.waited) == ((1, 0) if recorded else (0, 1))


def test_a_thread_of_ours_spoils_no_graph_that_is_being_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(13000)
    monkeypatch.setattr(cuda_runtime, "runtime", lambda: runtime)
    cuda_runtime.leave_captures_alone()
    assert runtime.mode == 2


def test_without_triton_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvtier.device.cuda.kernels", raising=False)
    monkeypatch.delitem(sys.modules, "kvtier.device.cuda.staging_buffers", raising=False)
    layout = DeviceLayout((DeviceTensor(0, 1, 512, 512),), ((PageRef(0, 512),),))
    with pytest.raises(RuntimeError, match="no Triton"):
        cuda.staging(Torch, 0, layout, lambda *columns: None)


class Bus(Runtime):
    """Knows where its device is."""

    def cudaDeviceGetPCIBusId(self, into: Any, size: Any, index: Any) -> int:  # noqa: N802
        into.value = b"0000:9C:00.0"
        assert (size.value, index.value) == (32, 2)
        return self._result


@pytest.mark.parametrize(("result", "cores"), [(0, {4, 5}), (101, set())])
def test_the_cores_beside_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: int, cores: set[int]
) -> None:
    for path, text in {
        "devices/system/node/online": "0-1",
        "devices/system/node/node1/cpulist": "4-5",
        "bus/pci/devices/0000:9c:00.0/numa_node": "1",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    runtime = Bus(13000, result)
    monkeypatch.setattr(cuda_runtime, "runtime", lambda: runtime)
    assert cuda_runtime.cores_near(2, Topology(tmp_path)) == cores
    assert runtime.forgotten == bool(result), "torch would report it after the engine's next kernel"


def test_a_cuda_runtime_is_found_beside_what_stands_for_one(tmp_path: Path) -> None:
    """In a process of its own: what is loaded stays loaded."""
    library, other = tmp_path / "my folder" / "libcudart.so.13", tmp_path / "libcudart_stub.so"
    library.parent.mkdir()
    found = ctypes.util.find_library("z") or ctypes.util.find_library("m")
    program = (
        "import ctypes, pathlib, shutil, sys; "
        "from kvtier.device.cuda import runtime as cuda_runtime; "
        "loaded = ctypes.CDLL(sys.argv[1]); "
        "maps = pathlib.Path('/proc/self/maps').read_text().splitlines(); "
        "path = next(line.split(maxsplit=5)[5] for line in maps if sys.argv[1] in line); "
        "copies = [shutil.copy(path, name) for name in sys.argv[2:]]; "
        "loaded = [ctypes.CDLL(name) for name in copies]; print(cuda_runtime.runtime()._name)"
    )
    command = [sys.executable, "-c", program, str(found), str(library), str(other)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == str(library)


def test_without_a_cuda_runtime_there_is_a_reason() -> None:
    with pytest.raises(RuntimeError, match="without CUDA"):
        cuda_runtime.runtime()
