"""Objects that are being deleted. Their successors get other names."""

from __future__ import annotations

from collections.abc import KeysView, Sequence

from kvtier.backends.object.object_names import GENERATION_MAX, ObjectKey
from kvtier.types import BlockKey


class Tombstones:
    """For each key whose objects are being deleted: the latest generation, and how many there are.

    A delete may be late, out of order or repeated. It never hits another object, because while one
    is under way the next object of its key gets a new generation.
    """

    def __init__(self) -> None:
        self._of: dict[BlockKey, tuple[int, int]] = {}
        self._since: dict[ObjectKey, float] = {}

    def begin(self, key: BlockKey, generation: int, now: float) -> ObjectKey:
        """This object is to be deleted, from now on (seconds of the epoch)."""
        latest, count = self._of.get(key, (0, 0))
        self._of[key] = (max(latest, generation), count + 1)
        self._since[key, generation] = now
        return key, generation

    def end(self, objects: Sequence[ObjectKey]) -> None:
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
        """Whether this object is being deleted, or is older than one that is."""
        latest = self._of.get(key)
        return latest is not None and latest[0] >= generation

    def knows(self, key: BlockKey, generation: int, at: float) -> bool:
        """Whether the object that was written at this time is being deleted. False for a younger
        one that another writer has written under the same name."""
        return at <= self._since.get((key, generation), -1.0)

    def next_generation(self, key: BlockKey) -> int:
        """The generation of the next object of this key."""
        latest = self._of.get(key)
        return 0 if latest is None else (latest[0] + 1) % GENERATION_MAX

    def keys(self) -> KeysView[BlockKey]:
        """A live view: a copy of millions of keys, after a reset, would take long."""
        return self._of.keys()
