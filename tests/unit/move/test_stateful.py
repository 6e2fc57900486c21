"""Whatever is submitted, cancelled, late or broken, in whatever order: the contract holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.move.threads import ThreadMover
from kvtier.record.record import HEADER_BYTES, Buffer, record_bytes
from kvtier.testing.subject import fill, make_keys, prove
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, SlotSpec

NAMESPACE = Namespace(facts={"model": "stateful"}, group_bytes=(64,))
RECORD = record_bytes(64)
HOST, NEAR, FAR = 0, 1, 2
QUEUE_BLOCKS = 12
ROUTES = st.sampled_from([(NEAR, HOST), (FAR, HOST), (HOST, NEAR), (HOST, FAR), (NEAR, FAR)])
FAULTS = st.sampled_from(["", "", "", "gone", "corrupt", "raise"])


class World:
    """All slots of all media. Every transfer has slots of its own, so that a write to one whose
    transfer has ended is seen."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], Buffer] = {}
        self.faults: dict[int, str] = {}
        self.told: dict[int, Outcome] = {}
        self.ended: set[int] = set()
        self.violations: list[str] = []
        self.permits = threading.Semaphore(0)

    def record(self, tier: int, slot: int) -> Buffer:
        return self.slots.setdefault((tier, slot), memoryview(bytearray(RECORD)))

    def enter(self, slots: Sequence[int]) -> None:
        """A handler's call: it waits for a permit and may be broken."""
        self.permits.acquire()
        if any(self.faults[slot] == "raise" for slot in slots):
            raise RuntimeError("a broken handler")

    def write(self, slot: int, into: Buffer, data: Buffer) -> None:
        if slot in self.ended:
            self.violations.append(f"slot {slot} was written to after its transfer had ended")
        into[:] = data


class Medium(Handler):
    concurrency = 2
    batch_blocks = 3

    def __init__(self, world: World, tier: int) -> None:
        self.world = world
        self.tier = tier
        self.active = 0

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        slots = self._slots(spec)
        self.world.enter(slots)
        outcomes = []
        for slot, buffer in zip(slots, into, strict=True):
            gone = self.world.faults[slot] == "gone"
            if not gone:
                self.world.write(slot, buffer, self.world.record(self.tier, slot))
            outcomes.append(Outcome.GONE if gone else Outcome.OK)
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        slots = self._slots(spec)
        self.world.enter(slots)
        for slot, record in zip(slots, records, strict=True):
            self.world.write(slot, self.world.record(self.tier, slot), record)
        return [Outcome.OK] * len(slots)

    def _slots(self, spec: LoadStoreSpec) -> list[int]:
        assert isinstance(spec, SlotSpec)
        return spec.slots


class Memory(Medium, HostHandler):
    concurrency = 1

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        return [self.world.record(self.tier, slot) for slot in self._slots(spec)]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        slot = self._slots(spec)[index]
        if slot in self.world.ended or slot in self.world.told:
            self.world.violations.append(f"slot {slot} was told twice, or too late")
        self.world.told[slot] = outcome


class MoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        handlers = [Memory(self.world, HOST), Medium(self.world, NEAR), Medium(self.world, FAR)]
        self.mover = ThreadMover(
            handlers,
            NAMESPACE,
            queue_blocks=[0, QUEUE_BLOCKS, QUEUE_BLOCKS],
            staging_bytes=4 * RECORD,
        )
        self.flying: dict[int, Transfer] = {}
        self.late: set[int] = set()
        self.cancelled: set[int] = set()
        self.next_id = 0
        self.next_slot = 0

    @rule(route=ROUTES, faults=st.lists(FAULTS, max_size=7), late=st.sampled_from([0, 0, 0, 1]))
    def submit(self, route: tuple[int, int], faults: list[str], late: int) -> None:
        source, target = route
        slots = list(range(self.next_slot, self.next_slot + len(faults)))
        self.next_slot += len(faults)
        keys = make_keys(len(slots), start=slots[0] if slots else 0)
        for slot, key, fault in zip(slots, keys, faults, strict=True):
            self.world.faults[slot] = fault
            record = self.world.record(source, slot)
            fill(record, key, NAMESPACE)
            if fault == "corrupt" and source != HOST:
                record[HEADER_BYTES] ^= 1
        self.next_id += 1
        transfer = Transfer(
            id=self.next_id,
            kind=TransferKind.LOAD if target == HOST else TransferKind.STORE,
            source=source,
            target=target,
            keys=keys,
            source_spec=SlotSpec(slots),
            target_spec=SlotSpec(slots),
            deadline=time.monotonic() + (-1 if late else 600),
        )
        # Whether there is room is the mover's to say, but with nothing in flight there is.
        accepted = self.mover.submit(transfer)
        assert accepted or self.flying
        if accepted:
            self.flying[transfer.id] = transfer
            self.late |= {transfer.id} if late else set()

    @rule(count=st.integers(1, 6))
    def let_handlers_go_on(self, count: int) -> None:
        self.world.permits.release(count)

    @rule(age=st.integers(0, 8))
    def cancel(self, age: int) -> None:
        """One of the last transfers; what has ended by now is up to the threads, so it is not
        asked here: the same draws must lead to the same rules."""
        chosen = self.next_id - age
        self.mover.cancel([chosen])
        self.cancelled.add(chosen)

    @rule()
    def poll(self) -> None:
        for result in self.mover.poll():
            self.check(result)

    @invariant()
    def bounded(self) -> None:
        waiting = sum(len(transfer.keys) for transfer in self.flying.values())
        assert self.mover.stats().in_flight_blocks <= min(waiting, 4 * QUEUE_BLOCKS)

    @invariant()
    def nothing_touches_what_has_ended(self) -> None:
        assert self.world.violations == []

    def check(self, result: TransferResult) -> None:
        transfer = self.flying.pop(result.id)  # exactly one result each
        slots = transfer.source_spec.slots  # type: ignore[attr-defined]
        self.world.ended.update(slots)
        assert len(result.outcomes) == len(slots)
        broken = any(self.world.faults[slot] == "raise" for slot in slots)
        for slot, key, outcome in zip(slots, transfer.keys, result.outcomes, strict=True):
            allowed = self.allowed(transfer, slot)
            if broken:
                allowed.add(Outcome.IO_ERROR)
            assert outcome in allowed
            if outcome.ok and self.world.faults[slot] != "corrupt":
                assert prove(self.world.record(transfer.target, slot), key, NAMESPACE).ok
            if transfer.target == HOST:
                assert self.world.told[slot] is outcome
        assert result.bytes_moved == result.outcomes.count(Outcome.OK) * RECORD

    def allowed(self, transfer: Transfer, slot: int) -> set[Outcome]:
        fault = self.world.faults[slot]
        if transfer.id in self.late:
            return {Outcome.TIMEOUT, Outcome.CANCELLED}
        allowed = {Outcome.OK}
        if transfer.source != HOST:
            allowed = {"gone": {Outcome.GONE}, "corrupt": {Outcome.CORRUPT}}.get(fault, allowed)
        if transfer.id in self.cancelled:
            allowed = allowed | {Outcome.CANCELLED}
        return set(allowed)

    def teardown(self) -> None:
        self.world.permits.release(10_000)
        while self.flying:
            assert self.mover.wait(30)
            self.poll()
        assert self.mover.stats().in_flight_blocks == 0
        self.nothing_touches_what_has_ended()
        self.mover.close()
        assert self.mover.poll() == []


MoverMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMoverKeepsItsContract = MoverMachine.TestCase
