"""A day's second run: an engine that knows its speeds from before, and prompts of all sorts.

Its disk has between a fifth and ten times the speed of computing; a part of what is asked is in CPU
memory, a part on the disk, a part nowhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import mean

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, LoadRun, Rates

CHUNK, CHUNK_BYTES = 256, 32 << 20
TOKENS_A_SECOND = 40_000.0
CONTEXT_SHARE = 4e-6
"""By how much a token before makes one more expensive."""
STEP_SECONDS = 0.004
DEVICE_SECONDS, DEVICE_BANDWIDTH = 0.0005, 50e9
DISK_SECONDS = 0.0003


def computing(start: int, stop: int) -> float:
    tokens = stop - start
    return STEP_SECONDS + tokens / TOKENS_A_SECOND * (1 + CONTEXT_SHARE * (start + tokens / 2))


@dataclass
class Engine:
    """One request after the other, each some seconds after the last."""

    disk: float
    """Bytes a second."""
    rates: Rates | None = None
    clock: Clock = field(default_factory=Clock)
    dice: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.model = CostModel(clock=self.clock)
        if self.rates is not None:
            self.model.recall(self.rates)

    def shaken(self, seconds: float) -> float:
        """As the model is told: clocks and neighbours disturb what it sees."""
        return seconds * self.dice.lognormvariate(0.0, 0.1)

    def serve(self, count: int) -> list[tuple[float, float]]:
        """The seconds to each first token, and those without kvtier."""
        return [self.request() for _ in range(count)]

    def request(self) -> tuple[float, float]:
        chunks = self.dice.choice((4, 8, 16, 32, 64, 128))
        near = self.dice.choice((0, 0, chunks // 4, chunks))
        far = self.dice.choice((0, chunks - near))
        hit = [LoadRun(DEVICE, near, near * CHUNK_BYTES), LoadRun("nvme", far, far * CHUNK_BYTES)]
        taken = self.model.admit([run for run in hit if run.blocks], CHUNK)
        seconds = self.load(taken, max(0, taken - near)) if taken else 0.0
        for start, stop in steps(taken * CHUNK, chunks * CHUNK + 200):
            seconds += computing(start, stop)
            self.model.observe_prefill(stop - start, self.shaken(computing(start, stop)), start)
        self.clock.now += seconds + self.dice.expovariate(1.0)
        self.model.collected()
        return seconds, sum(computing(*step) for step in steps(0, chunks * CHUNK + 200))

    def load(self, blocks: int, far: int) -> float:
        device = DEVICE_SECONDS + blocks * CHUNK_BYTES / DEVICE_BANDWIDTH
        disk = DISK_SECONDS + far * CHUNK_BYTES / self.disk if far else 0.0
        if far:
            self.model.observe_load("nvme", far * CHUNK_BYTES, self.shaken(disk))
        self.model.observe_load(DEVICE, blocks * CHUNK_BYTES, self.shaken(device))
        return max(device, disk)


def steps(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + 8192, stop)) for at in range(start, stop, 8192)]


COMPUTED = CHUNK_BYTES / CHUNK * TOKENS_A_SECOND
"""As many bytes a second are computed."""


@pytest.mark.parametrize("share", [0.2, 0.27, 0.5, 0.9, 1.2, 2.0, 10.0])
def test_200_requests_after_a_restart_are_never_slower_than_computing(share: float) -> None:
    """0.27 is a disk of 1.4 GB/s where computing is almost four times as fast."""
    first = Engine(share * COMPUTED)
    first.serve(200)
    first.model.publish()
    again = Engine(share * COMPUTED, first.model.latest, dice=random.Random(11))
    served = again.serve(200)
    assert mean(each for each, _ in served) < mean(without for _, without in served)
    assert max(each / without for each, without in served) < 1.1
