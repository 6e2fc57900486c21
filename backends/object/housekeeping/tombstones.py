"""Objects that are being deleted, so that their successors get other names."""

from __future__ import annotations

from collections.abc import KeysView, Sequence

from kvtier.backends.object.object_names import GENERATION_MAX
from kvtier.types import BlockKey

Object = tuple[BlockKey, int]
"""A key and a generation: what a name is made of."""


class Tombstones:
    """Of each key whose objects are being deleted, the latest generation and how many there are.

    A delete may come late, out of order or twice. It never hits another object, because as long as
    one is under way the next object of its key has a generation of its own.
    """

    def __init__(self) -> None:
        self._of: dict[BlockKey, tuple[int, int]] = {}
        self._since: dict[Object, float] = {}

    def begin(self, key: BlockKey, generation: int, now: float) -> Object:
        """This object is to be deleted, from now on (seconds of the epoch)."""
        latest, count = self._of.get(key, (0, 0))
        self._of[key] = (max(latest, generation), count + 1)
        self._since[key, generation] = now
        return key, generation

    def end(self, objects: Sequence[Object]) -> None:
        """These objects are deleted."""
        for one in objects:
            key, _ = one
            self._since.pop(one, None)
            generation, count = self._of[key]
            if count == 1:
                del self._of[key]
            else:
                self._of[key] = (generation, count - 1)

    def covers(self, key: BlockKey, generation: int) -> bool:
        """Whether this object is one that is being deleted, or older than such a one."""
        latest = self._of.get(key)
        return latest is not None and latest[0] >= generation

    def knows(self, key: BlockKey, generation: int, at: float) -> bool:
        """Whether an object that was written at this time is one that is being deleted, and not one
        that somebody else has written under its name since."""
        return at <= self._since.get((key, generation), -1.0)

    def next_generation(self, key: BlockKey) -> int:
        """The generation of the next object of this key."""
        latest = self._of.get(key)
        return 0 if latest is None else (latest[0] + 1) % GENERATION_MAX

    def keys(self) -> KeysView[BlockKey]:
        """As they are at any time: of millions, after a reset, a copy would take long."""
        return self._of.keys()
