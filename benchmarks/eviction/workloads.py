"""Workloads made up to try eviction where the real trace does not go. Deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

from kvtier.cli.trace_simulation import Request

CAPACITIES = (2_000, 6_000, 20_000)
_REQUESTS = 10_000
_RATE = 4.0

Timed = tuple[float, list[int]]


class _Maker:
    """Hands out block numbers and dice."""

    def __init__(self, workload: int, seed: int) -> None:
        self.dice = random.Random(workload + 100 * seed)
        self._numbers = count()

    def blocks(self, length: int) -> list[int]:
        return [next(self._numbers) for _ in range(length)]

    def arrivals(self, requests: int, start: float = 0.0) -> Iterator[float]:
        now = start
        for _ in range(requests):
            now += self.dice.expovariate(_RATE)
            yield now


def _in_order(timed: list[Timed]) -> list[Request]:
    timed.sort(key=lambda item: item[0])
    return [Request(time, tuple(blocks)) for time, blocks in timed[:_REQUESTS]]


def _zipf(maker: _Maker, items: int, requests: int, start: float) -> list[Timed]:
    """Questions about documents that many share, some of them much more often than others."""
    documents = [maker.blocks(maker.dice.randint(8, 60)) for _ in range(items)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(items)]
    chosen = maker.dice.choices(documents, weights, k=requests)
    return [
        (time, document + maker.blocks(maker.dice.randint(1, 3)))
        for time, document in zip(maker.arrivals(requests, start), chosen, strict=True)
    ]


def _talks(
    maker: _Maker,
    talks: int,
    start: float,
    span: float,
    pause: Callable[[], float],
    stay: float,
    system: list[int],
) -> list[Timed]:
    """Conversations that go on with chance `stay` after each turn, after a pause."""
    timed: list[Timed] = []
    for _ in range(talks):
        now = start + maker.dice.uniform(0, span)
        blocks = system + maker.blocks(maker.dice.randint(1, 24))
        timed.append((now, blocks))
        while maker.dice.random() < stay:
            now += pause()
            blocks = blocks + maker.blocks(maker.dice.randint(1, 4))
            timed.append((now, blocks))
    return timed


def documents(seed: int = 0) -> list[Request]:
    """Questions about 2,000 shared documents, by Zipf's law."""
    return _in_order(_zipf(_Maker(1, seed), 2_000, _REQUESTS, 0.0))


def scan(seed: int = 0) -> list[Request]:
    """Chats, and between them as many blocks again that are never used a second time."""
    maker = _Maker(2, seed)
    span = _REQUESTS / _RATE
    timed = _talks(
        maker, 3_500, 0.0, span, lambda: maker.dice.lognormvariate(4.2, 0.7), 0.5, maker.blocks(2)
    )
    timed += [(time, maker.blocks(40)) for time in maker.arrivals(_REQUESTS // 3)]
    return _in_order(timed)


def loop(seed: int = 0) -> list[Request]:
    """The same 400 documents of 20 blocks again and again: 8,000 blocks in a ring."""
    maker = _Maker(3, seed)
    ring = [maker.blocks(20) for _ in range(400)]
    return _in_order(
        [(time, ring[i % len(ring)]) for i, time in enumerate(maker.arrivals(_REQUESTS))]
    )


def paces(seed: int = 0) -> list[Request]:
    """Chats of two paces: half answer within half a minute, half after a quarter of an hour."""
    maker = _Maker(4, seed)
    span, system = _REQUESTS / _RATE, maker.blocks(3)
    fast = _talks(maker, 2_000, 0.0, span, lambda: maker.dice.lognormvariate(3.0, 0.4), 0.7, system)
    slow = _talks(maker, 2_000, 0.0, span, lambda: maker.dice.lognormvariate(6.5, 0.5), 0.5, system)
    return _in_order(fast + slow)


def agents(seed: int = 0) -> list[Request]:
    """Agents that come back every few seconds, twenty times, under three system prompts."""
    maker = _Maker(5, seed)
    prompts = [maker.blocks(12) for _ in range(3)]
    timed: list[Timed] = []
    for prompt in prompts:
        timed += _talks(
            maker, 180, 0.0, _REQUESTS / _RATE, lambda: maker.dice.uniform(2, 30), 0.95, prompt
        )
    return _in_order(timed)


def change(seed: int = 0) -> list[Request]:
    """Chats, then shared documents, then a ring, then other chats, a quarter each."""
    maker = _Maker(6, seed)
    quarter = _REQUESTS // 4
    span = quarter / _RATE
    ring = [maker.blocks(20) for _ in range(350)]
    slowly = _talks(
        maker, 1_250, 0.0, span, lambda: maker.dice.lognormvariate(4.6, 0.8), 0.5, maker.blocks(1)
    )
    quickly = _talks(
        maker, 900, 3 * span, span, lambda: maker.dice.lognormvariate(2.5, 0.5), 0.7, []
    )
    timed = slowly + _zipf(maker, 1_000, quarter, span) + quickly
    timed += [(t, ring[i % 350]) for i, t in enumerate(maker.arrivals(quarter, 2 * span))]
    return _in_order(timed)


def lengths(seed: int = 0) -> list[Request]:
    """2,000 documents of 1 to 200 blocks, each asked for at random times of its own: the arrivals
    at each are a Poisson process, and few have most of them, short ones as often as long ones."""
    maker = _Maker(7, seed)
    dice = maker.dice
    documents = [maker.blocks(round(200 ** dice.random())) for _ in range(2_000)]
    rates = [dice.paretovariate(0.9) for _ in documents]
    timed: list[Timed] = []
    for document, rate in zip(documents, rates, strict=True):
        arrivals = _RATE * rate / sum(rates)
        now = dice.expovariate(arrivals)
        while now < _REQUESTS / _RATE * 1.1:
            timed.append((now, document + maker.blocks(dice.randint(0, 2))))
            now += dice.expovariate(arrivals)
    return _in_order(timed)


def tool_calls(seed: int = 0) -> list[Request]:
    """Agents that pause for tools: log-normal pauses of 2 to 120 s, sessions side by side, and
    four system prompts with their tools. The user of a session may come back for more."""
    maker = _Maker(8, seed)
    dice = maker.dice
    prompts = [maker.blocks(dice.randint(8, 32)) for _ in range(4)]
    timed: list[Timed] = []
    for _ in range(1_000):
        now = dice.uniform(0, 0.4 * _REQUESTS / _RATE)
        blocks = list(dice.choice(prompts))
        pace = dice.lognormvariate(2.4, 0.7)  # of the tools that this session calls
        while True:
            blocks = blocks + maker.blocks(dice.randint(1, 8))
            timed.append((now, blocks))
            while dice.random() < 0.85:
                now += min(max(pace * dice.lognormvariate(0, 0.7), 2.0), 120.0)
                blocks = blocks + maker.blocks(dice.randint(1, 6))
                timed.append((now, blocks))
            if dice.random() < 0.6:
                break
            now += dice.lognormvariate(5.3, 1.0)
    return _in_order(timed)


WORKLOADS: dict[str, Callable[[int], list[Request]]] = {
    made.__name__: made
    for made in (agents, change, documents, lengths, loop, paces, scan, tool_calls)
}
