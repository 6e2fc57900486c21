"""Blocks on their way from one place to another: read as anybody may read, stored as tiers store.

Sources are read without being opened, so that a running engine there does not notice. What is
stored goes through a stack of its own: a little host memory, and the one tier that is filled. What
is there already is not stored again, so that whatever was interrupted can simply be run again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import msgspec

from kvtier.cli.blocks import Block, Proof, Prover, blocks_of
from kvtier.cli.console import Progress
from kvtier.cli.holdings import Place, known_namespaces
from kvtier.cli.measure import Size, staging
from kvtier.cli.opening import opened
from kvtier.cli.work import bounded_map
from kvtier.config import StackConfig
from kvtier.core.record import HEADER_BYTES, record_bytes
from kvtier.errors import KVTierError, MediumInUse
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, Presence

_THREADS = 8
_STAGING_BYTES = 48 << 20
_BLOCKS_MIN, _BLOCKS_MAX = 8, 1024
_SETTLE_S = 120.0
_ROOM_S = 10.0
"""How long to wait for room that others have to make."""

Record = tuple[BlockKey, memoryview]


class Copied(msgspec.Struct):
    """What has become of the blocks of one namespace."""

    namespace: str
    asked: int = 0
    already_there: int = 0
    copied: int = 0
    bytes: int = 0
    bad: int = 0
    """Failed their check when they were read."""
    gone: int = 0
    """Were no longer there when they were to be read."""
    not_stored: int = 0
    missing: int = 0
    """Prompts ask for them, and the source does not have them."""

    @property
    def whole(self) -> bool:
        """Whether everything that could be read is where it should be."""
        return not (self.bad or self.not_stored)


class Pace:
    """Keeps a copy below so many bytes a second."""

    def __init__(self, bytes_per_s: int | None, sleep: Callable[[float], None] = time.sleep):
        self._rate = bytes_per_s
        self._sleep = sleep
        self._due = time.monotonic()

    def spend(self, size: int) -> None:
        """Wait until these bytes may be moved."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + size / self._rate
        if self._due > now:
            self._sleep(self._due - now)


def choose(places: Sequence[Place], namespace: str, size_max: int | None) -> list[Block]:
    """The blocks of a namespace, each once, the newest first, until they are so many bytes."""
    newest: dict[BlockKey, Block] = {}
    for place in places:
        for block in blocks_of(place, namespace):
            if not block.quarantined and block.key not in newest:
                newest[block.key] = block
    blocks = sorted(newest.values(), key=lambda block: -block.stored_at)
    if size_max is None:
        return blocks
    chosen = []
    for block in blocks:
        size_max -= block.bytes
        if size_max < 0:
            break
        chosen.append(block)
    return chosen


def read_blocks(
    config: StackConfig, places: Sequence[Place], blocks: Iterable[Block], result: Copied
) -> Iterator[Record]:
    """The proved records of these blocks, in their order."""
    prover = Prover(config, known_namespaces(places))
    try:
        for block, (proof, _, record) in bounded_map(prover.prove, blocks, _THREADS):
            if record is not None:
                yield block.key, record
            elif proof is Proof.GONE:
                result.gone += 1
            else:
                result.bad += 1
    finally:
        prover.close()


class Sink:
    """One tier that is being filled."""

    def __init__(self, stack: Stack, lower: bool, pace: Pace) -> None:
        self._stack = stack
        self._tier = stack.chain.tiers[-1]
        self._lower = lower
        self._pace = pace
        slots = stack.chain.tiers[0].stats().bytes_capacity
        slot = record_bytes(stack.namespace.payload_bytes)
        self.batch = max(1, slots // slot // 4)

    def lacks(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these keys are not there."""
        return [at is Presence.MISS for at in self._tier.lookup(keys)]

    def fill(self, records: Iterable[Record], result: Copied, bar: Progress) -> None:
        """Store all of these."""
        source = iter(records)
        given: list[BlockKey] = []
        under_way: dict[BlockKey, memoryview] = {}
        while batch := dict(islice(source, self.batch)):
            payloads = {
                key: record[HEADER_BYTES:][: self._stack.namespace.payload_of(key)]
                for key, record in batch.items()
            }
            given += payloads
            self._pace.spend(sum(len(payload) for payload in payloads.values()))
            self._stack.store(payloads)
            # While these are written, the next are read; two batches are under way at most.
            self._finish(under_way, bar)
            under_way = payloads
        self._finish(under_way, bar)
        # Only now, because a tier that is too small lets go of what it took first.
        for key, lack in zip(given, self.lacks(given), strict=True):
            result.not_stored += lack
            result.copied += not lack
            result.bytes += 0 if lack else self._stack.namespace.payload_of(key)

    def _finish(self, payloads: dict[BlockKey, memoryview], bar: Progress) -> None:
        """Wait until these have arrived below, and give their room in host memory back."""
        missing = self._wait(list(payloads))
        end = time.monotonic() + _ROOM_S
        while missing and self._lower and time.monotonic() < end:
            # Engines that share the tier hand room over, but not at once.
            time.sleep(_ROOM_S / 50)
            self._tier.refresh()
            self._stack.chain.tiers[0].forget(missing)
            self._stack.store({key: payloads[key] for key in missing})
            missing = self._wait(missing)
        bar.advance(len(payloads), sum(len(payload) for payload in payloads.values()))
        if self._lower:
            self._stack.chain.tiers[0].forget(list(payloads))

    def _wait(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Until nothing is on its way any more; those that have not arrived."""
        end = time.monotonic() + _SETTLE_S
        self._stack.chain.poll()
        while self._lower and self._pending(keys) and time.monotonic() < end:
            self._stack.mover.wait(0.05)
            self._stack.chain.poll()
        return [key for key, lack in zip(keys, self.lacks(keys), strict=True) if lack]

    def _pending(self, keys: list[BlockKey]) -> bool:
        if not self._stack.chain.has_pending_work:
            return False
        return any(at is not Presence.HIT for at in self._tier.lookup(keys))


@contextmanager
def open_sink(
    config: StackConfig, tier: int, namespace: Namespace, rate: int | None
) -> Iterator[Sink]:
    """The tier of a stack that is to be filled, opened."""
    chunk = namespace.payload_bytes
    if tier == 0:
        lone = msgspec.structs.replace(config, tiers=config.tiers[:1])
        engine = config.name
    else:
        blocks = min(_BLOCKS_MAX, max(_BLOCKS_MIN, _STAGING_BYTES // record_bytes(chunk)))
        lone = staging(config, tier, Size(chunk, blocks, 1))
        engine = f"copy-{os.getpid()}"
    with opened(lambda: Stack(lone, namespace, engine=engine)) as stack:
        if tier == 0 and stack.context.engine != config.name:
            raise MediumInUse(
                f"the CPU region of {config.name!r} is in use: stop its engine, or fill a tier "
                "that engines share, like nvme"
            )
        yield Sink(stack, tier > 0, Pace(rate))
        stack.settle(_SETTLE_S)


def describe(places: Sequence[Place], name: str) -> Namespace:
    """A namespace's description; raises KVTierError where it is nowhere to be found."""
    found = known_namespaces(places).get(name)
    if found is None:
        raise KVTierError(
            f"nothing here says what the namespace {name} means: name a tier that has its "
            "namespace.json too, like nvme"
        )
    return found
