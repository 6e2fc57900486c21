"""What a tier has to tell of itself: in order while somebody listens, else as one difference."""

from __future__ import annotations

from collections.abc import Collection

from kvtier.types import BlockKey, EventKind, TierEvent

_KEYS_MAX = 1 << 14
"""So many keys are told of in order; nobody may listen for days, or at all."""


class Events:
    """Not more than what there was when somebody listened last, and what there is now."""

    def __init__(self) -> None:
        self._recent: list[tuple[EventKind, tuple[BlockKey, ...]]] = []
        self._keys = 0
        self._kind_of: dict[BlockKey, EventKind] = {}

    def add(self, kind: EventKind, keys: Collection[BlockKey]) -> None:
        """This has happened to these keys."""
        if keys:
            self._recent.append((kind, tuple(keys)))
            self._keys += len(keys)
            if self._keys > _KEYS_MAX:
                self.fold()

    def fold(self) -> None:
        """Keep of all until now only what it comes to."""
        kind_of = self._kind_of
        for kind, keys in self._recent:
            for key in keys:
                if kind_of.setdefault(key, kind) is not kind:
                    del kind_of[key]  # it is again as it was
        self._recent, self._keys = [], 0

    def take(self, medium: str) -> list[TierEvent]:
        """What to tell now, of this medium."""
        kind_of, recent = self._kind_of, self._recent
        if not kind_of and not recent:
            return []
        self.clear()
        folded = [(kind, tuple(k for k in kind_of if kind_of[k] is kind)) for kind in EventKind]
        return [TierEvent(kind, medium, keys) for kind, keys in folded + recent if keys]

    def clear(self) -> None:
        """Tell nothing of all this."""
        self._kind_of, self._recent, self._keys = {}, [], 0
