"""A device with streams whose work is done late, in any order that its events allow."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvtier.device.plan import Copies


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

    def after(self, event: FakeEvent) -> None:
        self._device.add(self, event)

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

    def to_device(self, copies: Copies) -> object:
        return self._copy(copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist())

    def within(self, copies: Copies) -> object:
        return self.to_device(copies)

    def to_host(self, copies: Copies) -> object:
        return self._copy(copies.host.tolist(), copies.device.tolist(), copies.sizes.tolist())

    def _copy(self, targets: list[int], sources: list[int], sizes: list[int]) -> object:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.do(partial(_move, target, source, size))
            if self.refuses:
                raise RuntimeError("an illegal address was encountered")
        return object()


class FakeDevice:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._streams: list[FakeStream] = []
        self.waiters: set[int] = set()
        self.broken = False
        self.engine = self.stream()
        self.lanes: dict[bool, FakeStream] = {}

    def stream(self) -> FakeStream:
        stream = FakeStream(self)
        self._streams.append(stream)
        return stream

    def attach(self) -> None:
        pass

    def mark(self) -> FakeEvent:
        return self.engine.record()

    def lane(self, *, urgent: bool) -> FakeStream:
        stream = self.stream()
        self.lanes.setdefault(urgent, stream)
        return stream

    def add(self, stream: FakeStream, operation: Callable[[], None] | FakeEvent) -> None:
        with self._changed:
            stream.operations.append(operation)
            self._changed.notify_all()

    def freeze(self, stream: FakeStream, frozen: bool) -> None:
        with self._changed:
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
