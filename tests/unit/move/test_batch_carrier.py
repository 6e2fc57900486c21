"""How one batch is carried: what its handlers say is what becomes of its blocks, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.move.queues import TransferBatch, TransferJob
from kvtier.move.threads import BatchCarrier
from kvtier.record.record import Buffer
from kvtier.testing.subject import NAMESPACE, blank, make_keys, sealed
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, SlotSpec

HOST, NEAR, FAR = 0, 1, 2
BLOCKS, BATCH = 6, 4
KEYS = make_keys(BLOCKS)


class Scripted(Handler):
    """Says what the test wants it to say, and moves nothing."""

    def __init__(self, says: list[Outcome]) -> None:
        self.says = says

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        return list(self.says)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        return list(self.says)


class Host(Scripted, HostHandler):
    """Memory in which the right records stand already, and what it was told of its slots."""

    def __init__(self) -> None:
        super().__init__([])
        self.records = [sealed(key) for key in KEYS]
        self.told: dict[int, Outcome] = {}

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        assert isinstance(spec, SlotSpec)
        return [self.records[slot] for slot in spec.slots]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        self.told[index] = outcome


def batch_from(source: int, target: int) -> TransferBatch:
    """The first blocks of a longer transfer."""
    spec = SlotSpec(list(range(BLOCKS)))
    kind = TransferKind.LOAD if target == HOST else TransferKind.STORE
    transfer = Transfer(
        id=1,
        kind=kind,
        source=source,
        target=target,
        keys=KEYS,
        source_spec=spec,
        target_spec=spec,
        deadline=float("inf"),
    )
    lanes = tuple(tier for tier in (source, target) if tier != HOST)
    batch = TransferJob(transfer, lanes, BATCH, 0.0).cut(BATCH, 0.0)
    if len(lanes) == 2:
        batch.buffers = [sealed(key) for key in KEYS[:BATCH]]
    return batch


FAILURES = [Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.GONE]


def test_a_failed_read_has_failed_whatever_stands_in_the_buffer() -> None:
    """What stands there may be the block of some time before."""
    host, batch = Host(), batch_from(NEAR, HOST)
    said = [Outcome.OK, *FAILURES]
    BatchCarrier([host, Scripted(said)], NAMESPACE).carry(batch)
    assert batch.job.outcomes[:BATCH] == said
    assert host.told == dict(enumerate(said))


def test_a_read_into_staging_has_failed_whatever_stands_in_the_buffer() -> None:
    batch = batch_from(NEAR, FAR)
    batch.buffers[0] = blank()
    BatchCarrier([Host(), Scripted([Outcome.OK, *FAILURES]), Scripted([])], NAMESPACE).carry(batch)
    assert not any(outcome.ok for outcome in batch.job.outcomes[:BATCH])
    assert batch.moved() == []


def test_a_source_that_cannot_be_read_says_nothing_about_the_target() -> None:
    """A dead disk must not cut off the bucket below, which is well."""
    batch = batch_from(NEAR, FAR)
    said = [Outcome.GONE, Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.NO_SPACE]
    BatchCarrier([Host(), Scripted(said), Scripted([])], NAMESPACE).carry(batch)
    assert batch.job.outcomes[:BATCH] == [Outcome.GONE, *[Outcome.DROPPED] * 3]


def test_a_target_that_lost_its_slot_says_nothing_about_the_source() -> None:
    batch = batch_from(HOST, NEAR)
    said = [Outcome.GONE, Outcome.CORRUPT, Outcome.NO_SPACE, Outcome.OK]
    BatchCarrier([Host(), Scripted(said)], NAMESPACE).carry(batch)
    assert batch.job.outcomes[:BATCH] == [Outcome.IO_ERROR, Outcome.IO_ERROR, *said[2:]]


every_way = pytest.mark.parametrize(
    ("source", "target", "halfway"),
    [(NEAR, HOST, False), (HOST, NEAR, False), (NEAR, FAR, False), (NEAR, FAR, True)],
)


def all_but(stranger: Any) -> list[Any]:
    """One of them such as what a handler looks up for an error that it does not know."""
    return [Outcome.OK, stranger, *[Outcome.OK] * (BATCH - 2)]


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ([Outcome.OK] * (BATCH - 1), f"{BATCH - 1} outcomes for {BATCH} blocks"),
        ([Outcome.OK] * (BATCH + 1), f"{BATCH + 1} outcomes for {BATCH} blocks"),
        *[(all_but(each), f"said {each!r} of a block") for each in (None, True, "ok")],
    ],
)
@every_way
def test_a_handler_that_answers_nonsense_fails_its_batch_and_no_other_block(
    source: int, target: int, halfway: bool, says: list[Any], problem: str
) -> None:
    batch = batch_from(source, target)
    if halfway:
        batch.arrived = True
        batch.job.outcomes[:BATCH] = [Outcome.OK] * BATCH
    odd = Scripted(says)
    with pytest.raises(ValueError, match=problem):
        BatchCarrier([Host(), odd, odd], NAMESPACE).carry(batch)
    assert batch.job.outcomes == [Outcome.IO_ERROR] * BLOCKS
