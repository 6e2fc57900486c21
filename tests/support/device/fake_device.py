"""A device with streams whose work is done late, in any order that its events allow."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from kvtier.device.layout import DeviceLayout, Ints, PageCopies
from kvtier.record.record import part_sum


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False

    def synchronize(self) -> None:
        self._device.run_until(self)


class FakeStream:
    """Operations in order; a frozen stream is a device that is busy with something long."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.operations: deque[Callable[[], None] | FakeEvent] = deque()
        self.frozen = False
        self.refuses = False
        self.lost = False

    def do(self, operation: Callable[[], None]) -> None:
        self._device.add(self, operation)

    def record(self) -> FakeEvent:
        if self.lost:
            raise RuntimeError("the device was lost")
        event = FakeEvent(self._device)

        def fire() -> None:
            event.done = True

        self._device.add(self, fire)
        return event

    def to_device(self, copies: PageCopies) -> object:
        return self._copy(copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist())

    def to_host(self, copies: PageCopies) -> object:
        return self._copy(copies.host.tolist(), copies.device.tolist(), copies.sizes.tolist())

    def _copy(self, targets: list[int], sources: list[int], sizes: list[int]) -> object:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.do(partial(_move, target, source, size))
            if self.refuses:
                raise RuntimeError("an illegal address was encountered")
        return object()


class FakeStage(FakeStream):
    """A buffer whose stream is its own; what is asked of it happens when the stream gets there."""

    def __init__(self, device: FakeDevice, layout: DeviceLayout, size: int) -> None:
        super().__init__(device)
        self._layout = layout
        self._buffer = np.zeros(size, np.uint8)  # takes memory only where it is used
        self.rows = [size // part for part in layout.part_bytes]
        self._sums: list[int] = []
        self._ids = np.zeros(size // min(layout.part_bytes) * layout.blocks_per_chunk, np.int64)

    def gather(self, group: int, ids: Ints) -> None:
        self._pages(group, ids, out=True)

    def scatter(self, group: int, ids: Ints) -> None:
        self._pages(group, ids, out=False)

    def _pages(self, group: int, ids: Ints, *, out: bool) -> None:
        blocks = ids[ids >= 0]
        if len(np.unique(blocks)) < len(blocks):
            raise ValueError("a block is named twice, and kernels go through them in any order")
        self._ids[: ids.size] = ids.ravel()
        for row in range(len(ids)):
            self.do(partial(self._row, group, row, out))
            if self.refuses:
                raise RuntimeError("an illegal address was encountered")

    def _row(self, group: int, row: int, out: bool) -> None:
        """Reads block numbers late, as kernels do, which have no copy of their own."""
        per_chunk = self._layout.blocks_per_chunk
        at = int(self._buffer.ctypes.data) + row * self._layout.part_bytes[group]
        for ref in self._layout.groups[group]:
            tensor = self._layout.tensors[ref.tensor]
            for block in self._ids[row * per_chunk : (row + 1) * per_chunk].tolist():
                if block >= 0:
                    page = tensor.base + block * tensor.stride
                    _move(*((at, page) if out else (page, at)), ref.page_bytes)
                at += ref.page_bytes

    def fetch(self, group: int, addresses: Ints) -> object:
        return self._copy(self._parts(group, len(addresses)), *self._sized(group, addresses))

    def send(self, group: int, addresses: Ints) -> object:
        targets, sizes = self._sized(group, addresses)
        return self._copy(targets, self._parts(group, len(addresses)), sizes)

    def _parts(self, group: int, count: int) -> list[int]:
        size, first = self._layout.part_bytes[group], int(self._buffer.ctypes.data)
        assert count * size <= len(self._buffer)
        return [first + index * size for index in range(count)]

    def _sized(self, group: int, addresses: Ints) -> tuple[list[int], list[int]]:
        return addresses.tolist(), [self._layout.part_bytes[group]] * len(addresses)

    def digest(self, group: int, rows: int) -> None:
        size = self._layout.part_bytes[group]
        self._sums = []

        def add_up() -> None:
            parts = self._buffer[: rows * size].reshape(rows, size)
            self._sums = [part_sum(part.data) for part in parts]

        self.do(add_up)

    def sums(self, group: int, rows: int) -> list[int]:
        assert len(self._sums) == rows, "asked for before they were there"
        return self._sums


class FakeMemory:
    """Host memory that is pinned as a test says."""

    def __init__(
        self,
        first: Callable[[threading.Event], object] = lambda stopping: None,
        rest: Callable[[threading.Event], object] = lambda stopping: None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.pin_first, self.pin_rest, self.close = first, rest, close


class FakeDevice:
    """`staging` is how many buffers it has for each direction, of `room` bytes at most."""

    def __init__(self, seed: int = 0, staging: int = 0, room: int = 1 << 30) -> None:
        self._staging = staging
        self._room = room
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._streams: list[FakeStream] = []
        self.waiters: set[int] = set()
        self.broken = False
        self.engine = self.new_stream()
        self.lanes: dict[bool, list[FakeStream]] = {True: [], False: []}

    def new_stream(self) -> FakeStream:
        stream = FakeStream(self)
        self._streams.append(stream)
        return stream

    def attach(self) -> None:
        pass

    def mark(self) -> FakeEvent:
        return self.engine.record()

    def stream(self, *, urgent: bool) -> FakeStream:
        stream = self.new_stream()
        self.lanes[urgent].append(stream)
        return stream

    def stages(self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool) -> list[FakeStage]:
        if not self._staging:
            raise RuntimeError("a device without memory to spare")
        size = max(min(batch_bytes, self._room), *layout.part_bytes)
        stages = [FakeStage(self, layout, size) for _ in range(self._staging)]
        self._streams += stages
        self.lanes[urgent] += stages
        return stages

    def add(self, stream: FakeStream, operation: Callable[[], None] | FakeEvent) -> None:
        with self._changed:
            stream.operations.append(operation)
            self._changed.notify_all()

    def freeze(self, *streams: FakeStream) -> None:
        self._freeze(streams, True)

    def thaw(self, *streams: FakeStream) -> None:
        self._freeze(streams, False)

    def _freeze(self, streams: Iterable[FakeStream], frozen: bool) -> None:
        with self._changed:
            for stream in streams:
                stream.frozen = frozen
            self._changed.notify_all()

    def run_until(self, event: FakeEvent) -> None:
        """Do one possible operation after the other, chosen at random, until the event."""
        self.waiters.add(threading.get_ident())
        with self._changed:
            while not event.done:
                if self.broken:
                    raise RuntimeError("the device was lost")
                if not self._step():
                    self._changed.wait()

    def drain(self) -> None:
        """Do everything that can be done."""
        with self._changed:
            while self._step():
                pass

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if self._ready(stream)]
        if not ready:
            return False
        operation = self._random.choice(ready).operations.popleft()
        if not isinstance(operation, FakeEvent):
            operation()
        self._changed.notify_all()
        return True

    def _ready(self, stream: FakeStream) -> bool:
        if stream.frozen or not stream.operations:
            return False
        first = stream.operations[0]
        return first.done if isinstance(first, FakeEvent) else True
