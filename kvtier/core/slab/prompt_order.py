"""Which block comes before which in the prompts of past requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from kvtier.eviction import UNKNOWN
from kvtier.types import BlockKey

_EXPECTED_MAX = 1 << 16
"""How many missing blocks of past requests are remembered, with the block before each."""


class PromptOrder:
    """Remembers blocks that requests looked for in vain, each with the block before it."""

    def __init__(self) -> None:
        self.before: OrderedDict[BlockKey, BlockKey] = OrderedDict()

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Remember which block comes before each of these: they may be stored soon."""
        before = self.before
        before.update(zip(keys[1:], keys, strict=False))
        while len(before) > _EXPECTED_MAX:
            before.popitem(last=False)

    def runs(
        self, keys: Sequence[BlockKey], slot_of: Callable[[BlockKey | None], int]
    ) -> Iterator[tuple[int, int, int]]:
        """Stored blocks by prompt: start and stop of each run among `keys`, and the slot of the
        block before it, UNKNOWN if there is none. A block that follows another one than its
        neighbour in `keys`, which has a slot, begins the run of another prompt."""
        before = [self.before.pop(key, None) for key in keys]
        begins, after = [0], [slot_of(before[0])]
        for at in range(1, len(keys)):
            if before[at] not in (None, keys[at - 1]):
                slot = slot_of(before[at])
                if slot != UNKNOWN:
                    begins.append(at)
                    after.append(slot)
        return zip(begins, [*begins[1:], len(keys)], after, strict=True)
