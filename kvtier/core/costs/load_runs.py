"""What a request could load, in the words in which its cost is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

DEVICE = "device"
"""The link that every loaded byte crosses: host memory to the engine's own."""
PAGEABLE = "device pageable"
"""The same while host memory is not pinned."""


class Run(NamedTuple):
    """Consecutive blocks of a prefix that would be loaded over one link.

    `link` is the medium of the tier that holds them; blocks that lie in host memory already name
    `DEVICE`, because that is all they have to cross.
    """

    link: str
    blocks: int
    bytes: int


class Offer(NamedTuple):
    """One way to serve a request: load this, one run a link, and compute what is after `stop`."""

    stop: int
    loads: list[Run]


def in_memory(runs: Sequence[Run]) -> tuple[int, int]:
    """How many leading blocks lie in host memory, and their bytes."""
    head = list(takewhile(lambda run: run.link == DEVICE, runs))
    return sum(run.blocks for run in head), sum(run.bytes for run in head)


def kinks(
    own: float, own_block: float, others: float, device: float, device_block: float, blocks: int
) -> list[int]:
    """The block counts beside which another stream becomes the slowest: the run's own (seconds so
    far, and for each block), the other links', or the device's."""
    crossings = []
    if own_block > 0:
        crossings.append((others - own) / own_block)
    if device_block > 0:
        crossings.append((others - device) / device_block)
    if own_block != device_block:
        crossings.append((device - own) / (own_block - device_block))
    beside = [int(at) + side for at in crossings if 0 < at < blocks for side in (0, 1)]
    return [count for count in beside if 0 < count < blocks]
