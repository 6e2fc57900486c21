"""A chain of memory tiers whose mover does what a test tells it to, when it tells it to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtier.chain.context import ChainContext
from kvtier.chain.ledger import Ledger
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.interfaces.mover import Mover, MoverStats, Transfer, TransferKind, TransferResult
from kvtier.record.record import record_bytes
from kvtier.settings import (
    Admission,
    ByteSize,
    Capacity,
    Duration,
    PrefetchSettings,
    RetainSettings,
    TierSettings,
    WritePolicy,
)
from kvtier.testing.memory import MemoryHandler, MemorySettings, MemorySpec, MemoryStore, MemoryTier
from kvtier.testing.subject import NAMESPACE, fill, make_keys, prove
from kvtier.types import BlockKey, FilePlace, LoadStoreSpec, Outcome, Presence

SLOT = record_bytes(NAMESPACE.payload_bytes)
LOAD_DEADLINE, STORE_DEADLINE, REST = 10.0, 60.0, 30.0


class ScriptedMover(Mover):
    """Moves real bytes between memory tiers, but only when and how the test says."""

    down = lost = False

    def __init__(self, handlers: Sequence[MemoryHandler]) -> None:
        self._handlers = handlers
        self.queue: list[Transfer] = []
        self.cancelled: set[int] = set()
        self.hastened: list[int] = []
        self.accepting = True
        self._results: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> bool:
        assert len(transfer.keys) == len(transfer.source_spec) == len(transfer.target_spec) > 0
        assert not self.down, "somebody has made room in vain"
        if self.accepting:
            self.queue.append(transfer)
        return self.accepting

    def run(self, transfer: Transfer, fails: dict[BlockKey, Outcome] | None = None) -> None:
        """Carry one transfer out; what fails leaves wrong bytes behind."""
        self.queue.remove(transfer)
        outcomes = [self._move(transfer, at, fails or {}) for at in range(len(transfer.keys))]
        moved = outcomes.count(Outcome.OK) * NAMESPACE.payload_bytes
        self._results.append(
            TransferResult(
                id=transfer.id, outcomes=outcomes, bytes_moved=moved, seconds=0.5, busy_seconds=0.25
            )
        )

    def _move(self, transfer: Transfer, at: int, fails: dict[BlockKey, Outcome]) -> Outcome:
        key = transfer.keys[at]
        source, target = self._handlers[transfer.source], self._handlers[transfer.target]
        (from_,) = source.views(transfer.source_spec.select(at, at + 1))
        (into,) = target.views(transfer.target_spec.select(at, at + 1))
        outcome = fails.get(key, Outcome.OK)
        if not outcome.ok:
            into[:] = bytes(len(into))
            return outcome
        into[:] = from_
        assert prove(into, key).ok, "a pinned block was overwritten"
        return Outcome.OK

    def run_all(self, fails: dict[BlockKey, Outcome] | None = None) -> None:
        for transfer in list(self.queue):
            self.run(transfer, fails)

    def fail_all(self, outcome: Outcome) -> None:
        for transfer in list(self.queue):
            self.run(transfer, dict.fromkeys(transfer.keys, outcome))

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, seconds: float) -> bool:
        return bool(self._results)

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled.update(ids)

    def hasten(self, ids: Sequence[int]) -> None:
        self.hastened += ids

    def stats(self) -> MoverStats:
        return MoverStats()

    def close(self) -> None:
        self.accepting = False

    def loads(self) -> list[Transfer]:
        return [transfer for transfer in self.queue if transfer.kind is TransferKind.LOAD]

    def stores(self) -> list[Transfer]:
        return [transfer for transfer in self.queue if transfer.kind is TransferKind.STORE]


class Outliving(MemoryTier):
    """What it holds may have outlived an earlier process, if a test says so."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.outlived: list[BlockKey] = []
        """The hottest first."""
        self.hottest: list[BlockKey] = []
        self.used: Collection[BlockKey] = ()
        """Those that were used again before."""

    @property
    def recovered(self) -> int:
        return len(self.outlived)

    def take_recovered(self, count: int) -> tuple[list[BlockKey], list[int]]:
        told, self.outlived = self.outlived[:count], self.outlived[count:]
        here = [key for key in told if key in self._resident]
        return here, [int(key in self.used) for key in here]

    def forget_recovered(self) -> None:
        self.outlived = []

    def take_hottest(self, count: int) -> list[BlockKey]:
        told, self.hottest = self.hottest[:count], self.hottest[count:]
        return [key for key in told if key in self._resident]

    def forget_hottest(self) -> None:
        self.hottest = []

    def successor(self) -> Outliving:
        """What another process finds after the death of this one."""
        tier = type(self)(MemoryStore(NAMESPACE, self.store.slots * SLOT))
        tier.medium = self.medium
        for key, slot in self._resident.items():
            taken = tier.prepare_store([key])
            assert isinstance(taken.spec, MemorySpec)
            tier.store.record(taken.spec.slots[0])[:] = self.store.record(slot)
            tier.complete_store([key])
        tier.take_events()
        tier.outlived = list(reversed(self._resident))
        tier.hottest = list(tier.outlived)
        return tier


class InFiles(Outliving):
    """Whose records readers fetch themselves: each lies in the file of its slot."""

    in_files = True

    def files(self, spec: LoadStoreSpec) -> list[FilePlace]:
        assert isinstance(spec, MemorySpec)
        return [FilePlace("slots", slot) for slot in spec.slots]


def rule(
    write: WritePolicy = WritePolicy.THROUGH,
    admission: Admission = Admission.ALWAYS,
    queue_blocks: int = 64,
) -> TierSettings:
    return MemorySettings(
        capacity=Capacity(size=ByteSize(SLOT)),
        write=write,
        admission=admission,
        queue_blocks=queue_blocks,
        load_deadline=Duration(LOAD_DEADLINE),
        store_deadline=Duration(STORE_DEADLINE),
    )


def is_quiet(ledger: Ledger) -> bool:
    """Whether nothing at all is in flight."""
    return not (ledger._moves or ledger._tickets or ledger._stores or ledger._held._readers)


class ChainRig:
    """A chain over memory tiers, its scripted mover, and a clock that stands still."""

    def __init__(
        self,
        slots: Sequence[int],
        rules: Sequence[TierSettings] | None = None,
        *,
        costs: CostModel | None = None,
        clock: Callable[[], float] | None = None,
        in_files: Collection[int] = (),
        prefetch: PrefetchSettings | None = None,
        retain: RetainSettings | None = None,
    ) -> None:
        self.now = 1000.0
        self.tiers = [
            (InFiles if at in in_files else Outliving)(MemoryStore(NAMESPACE, count * SLOT))
            for at, count in enumerate(slots)
        ]
        self._rules = rules or [rule() for _ in slots]
        self._costs = costs
        self._prefetch = prefetch
        self._retain = retain
        self._clock = clock or (lambda: self.now)
        self._begin()

    def _begin(self) -> None:
        self.handlers = [MemoryHandler(tier.store) for tier in self.tiers]
        self.mover = ScriptedMover(self.handlers)
        self.context = ChainContext(
            self.tiers, self._rules, self.mover, NAMESPACE, self._costs, REST, self._clock
        )
        self.chain = TierChain(self.context, prefetch=self._prefetch, retain=self._retain)
        self.chain.retention._clock = self._clock
        for tier in self.tiers:
            tier.retained._clock = self._clock

    def restart(self, rules: Sequence[TierSettings] | None = None) -> None:
        """The process dies, with all that is under way; another finds what was committed."""
        self._rules = rules or self._rules
        self.tiers = [tier.successor() for tier in self.tiers]
        self._begin()

    def write(self, tier: int, keys: Sequence[BlockKey], spec: LoadStoreSpec) -> None:
        """Put right bytes where a reservation says."""
        for key, record in zip(keys, self.handlers[tier].views(spec), strict=True):
            fill(record, key)

    def put(self, tier: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Store straight into one tier, behind the chain's back."""
        taken = self.tiers[tier].prepare_store(keys)
        self.write(tier, taken.keys, taken.spec)
        self.tiers[tier].complete_store(taken.keys)
        return taken.keys

    def store(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Store as an engine does."""
        taken = self.chain.prepare_store(keys)
        self.write(0, taken.keys, taken.spec)
        self.chain.complete_store(taken.keys)
        return taken.keys

    def check(self, keys: Sequence[BlockKey], spec: LoadStoreSpec) -> None:
        """The right bytes of each key stand where a spec says."""
        for key, record in zip(keys, self.handlers[0].views(spec), strict=True):
            assert prove(record, key) is Outcome.OK

    def load_once(self, keys: Sequence[BlockKey]) -> None:
        """As a request does that has all the time it takes."""
        ticket = self.chain.begin_load(keys, "reader", float("inf"))
        self.settle()
        self.chain.end_load(ticket)
        self.chain.poll()

    def settle(self, rounds: int = 10) -> None:
        """Let everything under way come to an end."""
        for _ in range(rounds):
            self.mover.run_all()
            self.chain.poll()

    def resident(self, tier: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        answers = self.tiers[tier].lookup(keys)
        return [key for key, now in zip(keys, answers, strict=True) if now is Presence.HIT]

    def assert_quiet(self) -> None:
        """Nothing is held in any tier."""
        assert [t.stats().pinned for t in self.tiers] == [0] * len(self.tiers)
        assert [t.stats().in_flight for t in self.tiers] == [0] * len(self.tiers)


KEYS = make_keys(64)
