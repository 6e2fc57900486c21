"""CUDA as far as the GPU tests and the GPU benchmark ask for it, played by the CPU.

For a rehearsal: every line of theirs runs on a machine without a GPU, so that the first one with a
GPU does not find a misspelt name. Nothing here is late or out of order, as a real device is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from kvtier.device.cuda import kernels, staging_buffers
from kvtier.device.cuda import runtime as cuda_runtime
from kvtier.record.record import PIECE_BYTES, part_sum, pieces_of

MULTIPROCESSORS = 32

_memory: list[Any] = []


class Stream:
    """Everything has been done when a call returns."""

    cuda_stream = 1
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        assert priority in (0, -1)

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return max(1e-6, (end._at - self._at) * 1000)


class Graph:
    """What it captures has been done then, too."""

    def replay(self) -> None:
        pass


class Profile:
    """What torch's profiler records of a device: two copies."""

    def __init__(self, activities: list[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        assert path.endswith(".json.gz")
        with open(path, "wb") as file:
            file.write(b"traced")

    def events(self) -> list[Any]:
        ways = ("HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)")
        time = SimpleNamespace(start=1.0, end=2.0)
        return [SimpleNamespace(name=f"Memcpy {way}", time_range=time) for way in ways]


class Cudart:
    """The runtime that kvtier calls by itself (ctypes), and the part that torch offers."""

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def cudaRuntimeGetVersion(self, into: Any) -> int:  # noqa: N802
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = 13000
        return 0

    def cudaDriverGetVersion(self, into: Any) -> int:  # noqa: N802
        return self.cudaRuntimeGetVersion(into)

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        assert ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0] == 2
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0

    def cudaMemcpyBatchAsync(  # noqa: N802
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: Any,
        attributes: Any,
        first: Any,
        attribute_count: Any,
        stream: Any,
    ) -> int:
        assert (attribute_count.value, first[0], stream.value) == (1, 0, 1)
        columns = [
            ctypes.cast(each, ctypes.POINTER(ctypes.c_int64))[: count.value]
            for each in (targets, sources, sizes)
        ]
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)
        return 0

    def cudaDeviceGetPCIBusId(self, into: Any, size: Any, index: Any) -> int:  # noqa: N802
        into.value = b"0000:00:00.0"
        return 0

    def cudaMalloc(self, into: Any, size: Any) -> int:  # noqa: N802
        _memory.append(torch.zeros(size.value, dtype=torch.uint8))
        ctypes.cast(into, ctypes.POINTER(ctypes.c_void_p))[0] = _memory[-1].data_ptr()
        return 0

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        return 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if address in self._registered:
            return 712
        self._registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._registered.remove(address)
        return 0


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that takes a device, told to use the CPU."""

    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        if "device" in options:
            assert str(options["device"]).startswith("cuda")
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def _as_tensor(source: Any, device: object = None) -> Any:
    interface = source.__cuda_array_interface__
    (size,), (address, _) = interface["shape"], interface["data"]
    assert interface["typestr"] == "|u1"
    piece = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(piece, dtype=torch.uint8)


def _to(tensor: Any, target: object, *, non_blocking: bool = False) -> Any:
    assert str(target).startswith("cuda")
    return tensor.clone()


@contextlib.contextmanager
def _anywhere(*_: object) -> Iterator[None]:
    yield


def _digest(
    buffer: Any, numbers: Any, totals: Any, sums: int, parts: int, part_bytes: int, programs: int,
    launch: object = None,
) -> None:  # fmt: skip
    """What the kernels do, which Triton's interpreter takes seconds for."""
    assert programs == kernels.programs_of(MULTIPROCESSORS)
    assert len(totals) >= kernels.totals_of(parts, part_bytes)
    data = buffer.numpy().view(np.uint8)[: parts * part_bytes].reshape(parts, part_bytes)
    pieces = pieces_of(part_bytes)
    for row, part in enumerate(data):
        starts = [PIECE_BYTES * index for index in range(pieces)]
        ends = [*starts[1:], part_bytes]
        found = [part_sum(part[start:end].data) for start, end in zip(starts, ends, strict=True)]
        place = (ctypes.c_uint64 * pieces).from_address(sums + 8 * pieces * row)
        place[:] = found


def install() -> None:
    """Until the end of this process, torch has a CUDA device."""
    cudart = Cudart()
    pretended: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_name": lambda index=0: "a pretended GPU",
        "get_device_properties": lambda device: SimpleNamespace(
            multi_processor_count=MULTIPROCESSORS
        ),
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "current_stream": lambda device=None: Stream(),
        "cudart": lambda: cudart,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _anywhere,
        "stream": _anywhere,
        "device": _anywhere,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)
    torch.profiler.profile = Profile
    for name in ("empty", "zeros", "randint"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    randn = _on_cpu(torch.randn)
    # Matrices are there to keep a device busy, which the CPU is anyway.
    torch.randn = lambda *sides, **options: randn(*(min(side, 64) for side in sides), **options)
    torch.as_tensor = _as_tensor
    torch.Tensor.to = _to
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda tensor: tensor
    cuda_runtime.runtime = lambda: cudart
    interpreted, one_at_a_time = kernels.move, threading.Lock()

    def move(*arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # Triton's interpreter is for one thread
            interpreted(*arguments, **options)

    kernels.move, kernels.digest = move, _digest
    staging_buffers.try_out = _once(staging_buffers.try_out)


def _once(try_out: Callable[..., None]) -> Callable[..., None]:
    """It is the same each time with the same kernels, and takes their interpreter eight seconds."""
    tried: set[Any] = set()

    def once(torch: Any, index: int, batch_copy: Any) -> None:
        what = (index, kernels.move, kernels.digest)  # a test may replace these
        if what not in tried:
            try_out(torch, index, batch_copy)
            tried.add(what)

    return once


install()
