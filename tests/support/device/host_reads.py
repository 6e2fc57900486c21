"""Direct reads that go through the host after all: buffers on a GPU, filled by ordinary reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvtier.device.cuda import runtime as cuda_runtime
from kvtier.device.direct import DeviceMemory, KvikioStage, device_sums


class HostFuture:
    def __init__(self, count: int) -> None:
        self._count = count

    def done(self) -> bool:
        return True

    def get(self) -> int:
        return self._count


class HostFile:
    def __init__(self, torch: Any, path: Path) -> None:
        self._torch = torch
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread(self, buf: Any, size: int, file_offset: int) -> HostFuture:
        found = bytearray(os.pread(self._fd, size, file_offset))
        buf[: len(found)].copy_(self._torch.frombuffer(found, dtype=self._torch.uint8))
        self._torch.cuda.synchronize()
        return HostFuture(len(found))

    def close(self) -> None:
        os.close(self._fd)


class HostDriver:
    """Makes its buffers as the real driver does; what is read is proved by the device, or not."""

    def __init__(self, torch: Any, *, proves: bool = True) -> None:
        self._torch = torch
        self._proves = proves
        self._stream = torch.cuda.Stream()

    def open(self, path: Path) -> HostFile:
        return HostFile(self._torch, path)

    def stages(self, count: int, size: int) -> list[KvikioStage]:
        memory = DeviceMemory(cuda_runtime.runtime(), count * size)
        whole = self._torch.as_tensor(memory, device="cuda")
        assert whole.data_ptr() == memory.__cuda_array_interface__["data"][0]
        pieces = [whole[at : at + size] for at in range(0, count * size, size)]
        sums = device_sums(self._torch, "cuda:0", self._stream, size) if self._proves else None
        return [KvikioStage(self._torch, self._stream, piece, sums) for piece in pieces]

    def release(self) -> None:
        pass
