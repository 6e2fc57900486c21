"""How one batch moves: straight into host memory, straight out of it, or through staging.

Each byte is proved once on its way to whoever uses it (docs/how_it_works/proofs.md): here only if
the transfer says that nobody else does it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvtier.core.interfaces.handler import Handler, HostHandler
from kvtier.core.records.record import Buffer, verify, verify_header
from kvtier.move.queues import Batch
from kvtier.slab.layout import runs
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome

_OF_SOURCES = (Outcome.GONE, Outcome.CORRUPT)
_OUTCOMES = frozenset(Outcome)


class Carrier:
    """Moves batches with the stack's handlers and writes the outcome of every block."""

    def __init__(self, handlers: Sequence[Handler], namespace: Namespace) -> None:
        self._handlers = handlers
        self._namespace = namespace
        self._digest = namespace.digest

    def carry(self, batch: Batch) -> None:
        """Move a batch, or the half of a staged one that is due."""
        transfer = batch.job.transfer
        target = self._handlers[transfer.target]
        source = self._handlers[transfer.source]
        if isinstance(target, HostHandler):
            self._load(batch, source, target)
        elif isinstance(source, HostHandler):
            spec = transfer.source_spec.select(batch.start, batch.stop)
            self._store_from_host(batch, target, source.views(spec))
        elif not batch.arrived:
            self._fetch(batch, source)
        else:
            self._deliver(batch, target)

    def announce(self, batch: Batch) -> None:
        """Tell a host target about blocks that will never land."""
        transfer = batch.job.transfer
        target = self._handlers[transfer.target]
        if not isinstance(target, HostHandler):
            return
        for index in range(batch.start, batch.stop):
            outcome = batch.job.outcomes[index]
            if not outcome.ok:
                target.landed(transfer.target_spec, index, outcome)

    def _load(self, batch: Batch, source: Handler, target: HostHandler) -> None:
        spec = batch.job.transfer.target_spec
        records = target.views(spec.select(batch.start, batch.stop))
        for index, outcome in self._read(batch, source, records):
            batch.job.outcomes[index] = outcome
            target.landed(spec, index, outcome)

    def _fetch(self, batch: Batch, source: Handler) -> None:
        for index, outcome in self._read(batch, source, batch.buffers):
            # Others would blame the target, which has not been asked yet.
            told = outcome.ok or outcome in _OF_SOURCES
            batch.job.outcomes[index] = outcome if told else Outcome.DROPPED

    def _deliver(self, batch: Batch, target: Handler) -> None:
        if batch.job.transfer.deadline <= time.monotonic():
            batch.spoil(Outcome.TIMEOUT)
            return
        arrived = batch.moved()
        batch.spoil(Outcome.IO_ERROR)  # until the target says otherwise, should it raise
        for start, stop in arrived:
            self._store(batch, start, stop, target, batch.buffers[start:stop])

    def _read(
        self, batch: Batch, source: Handler, into: Sequence[Buffer]
    ) -> Iterator[tuple[int, Outcome]]:
        """Read a batch's records; each is proved when it is asked for."""
        transfer = batch.job.transfer
        spec = transfer.source_spec.select(batch.start, batch.stop)
        keys = transfer.keys[batch.start : batch.stop]
        outcomes = _checked(source.load(spec, keys, into), spec)
        read = zip(outcomes, into, keys, strict=True)
        for index, (outcome, record, key) in enumerate(read, batch.start):
            yield index, self._proved(batch, record, key) if outcome.ok else outcome

    def _proved(self, batch: Batch, record: Buffer, key: BlockKey) -> Outcome:
        if batch.job.transfer.prove:
            return verify(record, key, self._digest)
        size, parts = self._namespace.payload_of(key), self._namespace.parts
        return verify_header(record, key, self._digest, size, parts)

    def _store_from_host(self, batch: Batch, target: Handler, records: Sequence[Buffer]) -> None:
        """Write records of host memory, but none that has to be proved first, and is bad."""
        transfer, outcomes = batch.job.transfer, batch.job.outcomes
        good = list(range(len(records)))
        if transfer.prove:
            keys = transfer.keys[batch.start : batch.stop]
            for index, (record, key) in enumerate(zip(records, keys, strict=True)):
                if not (outcome := verify(record, key, self._digest)).ok:
                    outcomes[batch.start + index] = outcome
                    good.remove(index)
        for first, end in runs(good):
            start, stop = good[first], good[end - 1] + 1
            self._store(batch, start, stop, target, records[start:stop])

    def _store(
        self, batch: Batch, start: int, stop: int, target: Handler, records: Sequence[Buffer]
    ) -> None:
        job = batch.job
        first, end = batch.start + start, batch.start + stop
        spec = job.transfer.target_spec.select(first, end)
        keys = job.transfer.keys[first:end]
        outcomes = _checked(target.store(spec, keys, records), spec)
        # GONE and CORRUPT are words about a source, for which it may have to answer: a target
        # that lost its slot has merely failed.
        job.outcomes[first:end] = [
            Outcome.IO_ERROR if outcome in _OF_SOURCES else outcome for outcome in outcomes
        ]


def _checked(outcomes: list[Outcome], spec: LoadStoreSpec) -> list[Outcome]:
    """What a handler has answered, which is somebody else's code, perhaps."""
    if len(outcomes) != len(spec):
        raise ValueError(f"a handler gave {len(outcomes)} outcomes for {len(spec)} blocks")
    for outcome in outcomes:
        if outcome not in _OUTCOMES:  # it would raise where the results are read
            raise ValueError(f"a handler said {outcome!r} of a block, which is no outcome")
    return outcomes
