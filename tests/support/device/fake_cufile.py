"""A driver of direct reads that really reads files, into memory that stands for a device's, and
fails in every way a real one can."""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.record.record import part_sum


class CompatMode(enum.IntEnum):
    """As kvikio's."""

    OFF = 0
    ON = 1
    AUTO = 2


class FakeStage:
    def __init__(self, size: int) -> None:
        self.buffer = np.zeros(size, np.uint8)
        self.address = int(self.buffer.ctypes.data)

    def checksum(self, skip: int, size: int) -> int:
        return part_sum(self.buffer[skip : skip + size].data)


class FakeFuture:
    def __init__(self, driver: FakeCufile, read: Callable[[], int]) -> None:
        self._driver = driver
        self._read = read

    def done(self) -> bool:
        return not self._driver.hangs

    def get(self) -> int:
        assert self.done(), "nobody may wait for a read that hangs"
        if self._driver.fails:
            raise self._driver.fails
        return self._read() - self._driver.short


class FakeFile:
    def __init__(self, driver: FakeCufile, path: Path) -> None:
        self._driver = driver
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        driver.open_files += 1

    def pread(self, buf: Any, size: int, file_offset: int) -> FakeFuture:
        if self._driver.refuses:
            raise RuntimeError("cuFileRead: invalid")
        assert file_offset % 4096 == 0
        assert size % 4096 == 0
        self._driver.reads += 1

        def read() -> int:
            self._driver.before_read()
            count = os.preadv(self._fd, [buf[:size].data], file_offset)
            self._driver.after_read()
            return count

        return FakeFuture(self._driver, read)

    def close(self) -> None:
        os.close(self._fd)
        self._driver.open_files -= 1


class FakeCufile:
    hangs = refuses = False
    fails: Exception | None = None
    no_file: Exception | None = None
    short = 0
    open_files = 0
    released = False
    reads = 0

    def __init__(self) -> None:
        self.made: list[weakref.ref[FakeStage]] = []
        self.before_read: Callable[[], None] = lambda: None
        self.after_read: Callable[[], None] = lambda: None

    def open(self, path: Path) -> FakeFile:
        if self.no_file:
            raise self.no_file
        return FakeFile(self, path)

    def stages(self, count: int, size: int) -> list[FakeStage]:
        stages = [FakeStage(size) for _ in range(count)]
        self.made += [weakref.ref(stage) for stage in stages]
        return stages

    def release(self) -> None:
        assert not self.open_files
        self.released = True
