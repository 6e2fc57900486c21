"""What is to be copied, read as anybody may read: a running engine there does not notice.

To a mover this is one more handler, so that blocks go straight from their medium into the memory
from which they are written, proved on the way, and both sides are always busy.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

from kvtier.cli.copying.selection import Choice
from kvtier.interfaces.handler import Handler
from kvtier.record.record import Buffer, record_bytes
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, SlotSpec


class Numbers(SlotSpec):
    """Blocks by number: rows of a choice, or places in a file."""


class Reader(Handler):
    """A source of blocks by number. What cannot be read is GONE or CORRUPT, nothing else: a copy
    tells troubles of its source from those of its target by that."""

    def __init__(self) -> None:
        self.unread = 0
        """So many of those that are called CORRUPT could not be read at all."""
        self._counting = threading.Lock()

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        assert isinstance(spec, Numbers)
        outcomes = self.read(spec.slots, keys, into)
        unread = [
            index
            for index, outcome in enumerate(outcomes)
            if outcome not in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT)
        ]
        for index in unread:
            outcomes[index] = Outcome.CORRUPT
        with self._counting:
            self.unread += len(unread)
        return outcomes

    @abstractmethod
    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with a record, unproved."""

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        raise TypeError("a source is only read")

    def used_again(self, number: int, key: BlockKey) -> bool:
        """Whether a block that could not be proved has been replaced by another meanwhile."""
        return False


class ChoiceReader(Reader):
    """Reads the rows of a choice from their sources."""

    def __init__(self, choice: Choice, namespace: Namespace) -> None:
        super().__init__()
        self._choice = choice
        record = record_bytes(namespace.payload_bytes)
        for source in choice.sources:
            source.open(namespace)
        self.concurrency = max((each.concurrency for each in choice.sources), default=1)
        batches = [each.batch_blocks(record) for each in choice.sources]
        self.batch_blocks = min(batches, default=1)

    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        origins, places = self._choice.places(numbers)
        outcomes: list[Outcome] = []
        start = 0
        for origin, neighbours in groupby(origins):
            some = slice(start, start + len(list(neighbours)))
            source = self._choice.sources[origin]
            outcomes += source.read(places[some], keys[some], into[some])
            start = some.stop
        return outcomes

    def used_again(self, number: int, key: BlockKey) -> bool:
        (origin,), (at,) = self._choice.places([number])
        return self._choice.sources[origin].used_again(at, key)

    def close(self) -> None:
        for source in self._choice.sources:
            source.close()
