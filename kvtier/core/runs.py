"""What a request could load, in the words in which its cost is told."""

from __future__ import annotations

from typing import NamedTuple

DEVICE = "device"
"""The link that every loaded byte crosses: host memory to the engine's own."""


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
