"""Copies that take long, on their way out of the device and in from a disk, and prompts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any


class Slowed:
    """The part of `Host` that slows them, holds them, and gives them up."""

    _manager: Any
    _core: Any
    _connector_worker: Any

    def __init__(self) -> None:
        self._copied = 0
        self._computing_since = 0.0
        """Since when a prompt is computed that is slowed."""
        self._gather: Any = None
        self._read: Any = None
        self._scatter: Any = None
        self._going_on, self._going_in = threading.Event(), threading.Event()

    def slow_stores(self, pause: float) -> None:
        """Let each block's way out of the device take so long."""
        from kvtier.device.cpu import PageCopier

        if not self._gather:
            self._gather = PageCopier.gather

        def slow(*arguments: Any) -> Any:
            time.sleep(pause)
            checksum = self._gather(*arguments)
            self._copied += 1
            return checksum

        PageCopier.gather = slow  # type: ignore[method-assign]

    def slow_reads(self, pause: float) -> None:
        """Let every read of a disk in this process take so long, from now on."""
        self._before_reads(lambda: time.sleep(pause))

    def slow_prefill(self, pause: float) -> None:
        """Let every step with a part of a prompt take so much longer, as with a larger model."""
        executor = self._core.model_executor
        execute = executor.execute_model

        def later(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            if any(tokens > 1 for tokens in scheduled.num_scheduled_tokens.values()):
                self._computing_since = self._computing_since or time.perf_counter()
                time.sleep(pause)
            return execute(scheduled, *arguments, **named)

        executor.execute_model = later

    def give_up_loads(self, seed: int, chance: float, pause: float) -> None:
        """From now on every read takes up to `pause`, and loads are given up at random."""
        dice, patience = random.Random(seed), self._manager._deadlines
        self._before_reads(lambda: time.sleep(dice.random() * pause))

        def some() -> int | None:
            left = sorted(patience._loads.keys() - patience._given_up)
            if not left or dice.random() >= chance:
                return None
            number: int = dice.choice(left)
            patience._given_up.add(number)
            return number

        self._manager.give_up = some

    def hold_loads(self) -> None:
        """Let no block go into the device, until told to."""
        from kvtier.device.cpu import PageCopier

        scatter = self._scatter = PageCopier.scatter

        def later(*arguments: Any) -> Any:
            self._going_in.wait()
            return scatter(*arguments)

        self._going_in.clear()
        PageCopier.scatter = later  # type: ignore[method-assign]

    def let_loads_go(self) -> None:
        """Let all go in that were held, and wait until they have; the engine hears of it later."""
        from kvtier.device.cpu import PageCopier

        PageCopier.scatter = self._scatter  # type: ignore[method-assign]
        self._going_in.set()
        copies = self._connector_worker.worker
        copies.wait(set(copies._numbers))

    def hold_reads(self) -> None:
        """Let no read of a disk in this process go on, until told to."""
        self._going_on.clear()
        self._before_reads(self._going_on.wait)

    def let_reads_go(self) -> None:
        """Let all go on that were held."""
        self._going_on.set()

    def _before_reads(self, do: Callable[[], object]) -> None:
        from kvtier.system.disk import Disk

        read = self._read = self._read or Disk.readv

        def later(*arguments: Any) -> int:
            do()
            return read(*arguments)

        Disk.readv = later  # type: ignore[method-assign]
