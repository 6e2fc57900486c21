"""Device memory that cuFile has registered, and what reads into it leave."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, keys_of
from support.device.fake_cufile import CompatMode

from kvtier.device import direct
from kvtier.device.direct import DeviceMemory, DirectLoader, DirectRead, KvikioDriver
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.record.record import HEADER_BYTES, Header
from kvtier.types import FilePlace, Outcome


class Cudart:
    """Stands for libcudart's allocator."""

    def __init__(self, result: int = 0) -> None:
        self.freed: list[int] = []
        self._result = result

    def cudaMalloc(self, into: Any, size: Any) -> int:  # noqa: N802
        ctypes.cast(into, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.c_void_p(0x7000)
        assert size.value == 4096
        return self._result

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        self.freed.append(pointer.value)
        return 0


def test_device_memory_lives_as_long_as_somebody_holds_it() -> None:
    cudart = Cudart()
    memory = DeviceMemory(cudart, 4096)
    assert memory.__cuda_array_interface__["data"] == (0x7000, False)
    held = [memory]
    del memory
    assert cudart.freed == []
    held.clear()
    assert cudart.freed == [0x7000]


def test_device_memory_that_is_not_there_is_a_reason() -> None:
    with pytest.raises(RuntimeError, match="cudaMalloc of 4096 bytes: error 2"):
        DeviceMemory(Cudart(result=2), 4096)


class Library:
    """Stands for kvikio and torch at once: notes what is set and registered."""

    def __init__(self) -> None:
        self.set_to: dict[str, Any] = {}
        self.registered: list[int] = []
        self.under_way = 0
        self.memory_free = 1 << 40
        self.cuda = self.buffer = self.defaults = self
        self.uint8 = np.uint8

    def modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("kvikio", "kvikio.buffer", "kvikio.defaults", "torch"):
            module = ModuleType(name)
            module.__getattr__ = self.__getattribute__  # type: ignore[method-assign]
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(direct, "runtime", lambda: Cudart())
        monkeypatch.setattr(direct, "DeviceMemory", lambda cudart, size: np.zeros(size, np.uint8))

    def get(self, name: str) -> CompatMode:
        assert name == "compat_mode"
        return CompatMode.AUTO

    def set(self, values: dict[str, Any]) -> None:
        self.set_to.update(values)

    def device(self, *which: Any) -> Any:
        return contextlib.nullcontext()

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.memory_free, 1 << 40

    def Stream(self, device: Any) -> object:  # noqa: N802
        return object()

    def as_tensor(self, memory: Any, device: Any) -> Any:
        return FakeTensor(memory)

    def empty(self, count: int, dtype: Any, pin_memory: bool) -> Any:
        assert pin_memory
        return FakeTensor(np.zeros(count, dtype))

    def CuFile(self, path: Path, flags: str) -> Any:  # noqa: N802
        return SplitFile(self)

    def memory_register(self, tensor: Any) -> None:
        self.registered.append(tensor.numel())

    def memory_deregister(self, tensor: Any) -> None:
        self.registered.remove(tensor.numel())


class SplitFile:
    """Whose last piece cannot be read. The others are still under way then, and have no end here,
    as with kvikio before 26.10."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def pread(self, buf: Any, size: int, file_offset: int) -> SplitFile:
        self._library.under_way += max(0, -(-size // self._library.set_to["task_size"]) - 1)
        return self

    def done(self) -> bool:
        return True

    def get(self) -> int:
        raise RuntimeError("KvikIO failure: Input/output error")

    def close(self) -> None:
        assert not self._library.under_way, "it is closed while it is read"


class FakeTensor:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, piece: slice) -> FakeTensor:
        return FakeTensor(self._array[piece])

    def numel(self) -> int:
        return len(self._array)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """In the place of the real ones; without kernels, which want a device."""
    library = Library()
    library.modules(monkeypatch)
    monkeypatch.setitem(sys.modules, "kvtier.device.cuda.staging_buffers", None)
    return library


def test_buffers_share_one_registered_piece_of_memory(library: Library) -> None:
    KvikioDriver(0, by_host=True)
    assert library.set_to["compat_mode"] is CompatMode.ON
    driver = KvikioDriver(0)
    stages = driver.stages(3, 4096)
    assert library.registered == [3 * 4096]
    assert [stage.address - stages[0].address for stage in stages] == [0, 4096, 8192]
    assert library.set_to["compat_mode"] is CompatMode.OFF
    assert library.set_to["gds_threshold"] == 0
    driver.release()
    assert library.registered == []


def test_what_a_read_that_failed_wrote_to_is_not_written_to_any_more(
    library: Library, tmp_path: Path
) -> None:
    """The next read's bytes might be overwritten after they have been proved."""
    page = 40 << 20
    layout = DeviceLayout((DeviceTensor(0, 1, page, page),), ((PageRef(0, page),),))
    (key,) = keys_of(1)
    record = memoryview(bytearray(HEADER_BYTES))
    Header(key, NAMESPACE, page).write(record)
    (tmp_path / "slab").write_bytes(record)
    loader = DirectLoader(layout, KvikioDriver(0), NAMESPACE, stages=2)
    read = DirectRead(FilePlace(str(tmp_path / "slab"), 0), key, 0)
    loader.begin(read)
    assert loader.end(read, float("inf")) is Outcome.IO_ERROR
    assert loader.free == 2
    assert library.under_way == 0


def test_buffers_leave_most_of_the_devices_memory_to_the_model(library: Library) -> None:
    library.memory_free = 8 * 3 * 4096
    assert len(KvikioDriver(0).stages(16, 4096)) == 3
    assert library.registered == [3 * 4096]
    library.memory_free -= 8 * 4096 + 1
    with pytest.raises(RuntimeError, match="do not fit"):
        KvikioDriver(0).stages(16, 4096)
