"""Dicts of a million objects that do not stop all other threads.

One that grows, or is given up, does so in a single step; and Python's garbage collector, which runs
when there are many new objects of kinds that it must look at, visits everything there is. So a dict
here is in many parts, and its keys are bytes, which are nothing to the collector: nor should the
values be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvtier.backends.object.leaving import Object
from kvtier.types import BlockKey

_V = TypeVar("_V")
_PARTS = 256
_GENERATION_BYTES = 2


def mark(key: BlockKey, generation: int) -> bytes:
    """Key and generation as bytes."""
    return key + generation.to_bytes(_GENERATION_BYTES, "little")


def marked(found: bytes) -> Object:
    """The key and the generation of a mark."""
    generation = int.from_bytes(found[-_GENERATION_BYTES:], "little")
    return BlockKey(found[:-_GENERATION_BYTES]), generation


class Spread(Generic[_V]):
    """Values by mark."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, _V]] = [{} for _ in range(_PARTS)]

    def part(self, found: bytes) -> dict[bytes, _V]:
        """The part in which this mark is, or would be."""
        return self._parts[found[0]]

    def items(self) -> Iterator[tuple[bytes, _V]]:
        for part in self._parts:
            yield from part.items()

    def clear(self, rest: Callable[[], None]) -> None:
        """Give it all up, with a rest after each part."""
        for part in self._parts:
            if part:
                part.clear()
                rest()
