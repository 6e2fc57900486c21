"""Blocks that have come up from a lower tier, or are coming, and that nobody has proved yet.

The mover looks at their headers alone if whoever reads them proves them: a byte is proved once. If
that reader finds one bad, the tier that it came from gave it bad, and has to answer for it. What is
written down before a reader has spoken is proved by the mover, so that it does not spread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvtier.core.chain.in_flight import Move, pin_what_is_there
from kvtier.core.chain.plan import HOST
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey, Outcome

BLAMES_SOURCE = (Outcome.GONE, Outcome.CORRUPT)
"""Only these say that the source does not hold what it offered."""


class Unproved:
    """The tier that each of these came from. What host memory holds bounds how many there are."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._origin: dict[BlockKey, int] = {}
        self._blamed: list[tuple[int, int]] = []

    def came(self, keys: Iterable[BlockKey], origin: int) -> None:
        """These are on their way from there, and only their reader proves them."""
        self._origin.update(dict.fromkeys(keys, origin))

    def ended(self, keys: Iterable[BlockKey]) -> None:
        """These have been proved, or are in host memory no more."""
        if self._origin:
            for key in keys:
                self._origin.pop(key, None)

    def clear(self) -> None:
        """Host memory holds nothing any more."""
        self._origin.clear()

    def any_of(self, keys: Collection[BlockKey]) -> bool:
        """Whether one of these has still to be proved."""
        return bool(self._origin) and any(key in self._origin for key in keys)

    def blame(self, failed: Mapping[BlockKey, Outcome]) -> dict[BlockKey, Outcome]:
        """Blocks of host memory have failed, and this is what it is to be told of them. What is bad
        though nobody had proved it yet is quarantined where it came from."""
        told = dict(failed)
        bad: dict[int, list[BlockKey]] = {}
        for key, outcome in failed.items():
            if outcome is Outcome.CORRUPT and key in self._origin:
                bad.setdefault(self._origin.pop(key), []).append(key)
                told[key] = Outcome.GONE  # it holds what it was given
        for origin, keys in bad.items():
            pinned, _ = pin_what_is_there(self._tiers[origin], keys)
            self._tiers[origin].complete_load(pinned, dict.fromkeys(pinned, Outcome.CORRUPT))
            self._blamed.append((origin, len(keys)))
        return told

    def settled(self, move: Move, failed: Mapping[BlockKey, Outcome]) -> dict[BlockKey, Outcome]:
        """A move has ended, and these of its blocks have failed: what its source is told."""
        transfer = move.transfer
        told = {key: why for key, why in failed.items() if why in BLAMES_SOURCE}
        if transfer.target == HOST:
            found = {k: why for k, why in move.spoiled.items() if why is Outcome.CORRUPT}
            told = {**found, **told}  # by a reader, before all of it had landed
            self.ended([*failed, *move.spoiled])
        elif transfer.source == HOST:
            told = self.blame(told)
            if transfer.prove:
                self.ended(key for key in transfer.keys if key not in failed)
        return told

    def tell_blamed(self, failed: Callable[[int, Sequence[Outcome]], None]) -> None:
        """Tell of the blocks that were found bad after they had landed, tier by tier, once."""
        blamed, self._blamed = self._blamed, []
        for tier, count in blamed:
            failed(tier, [Outcome.CORRUPT] * count)
