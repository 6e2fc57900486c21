"""What every mover promises, sentence by sentence: subclass `MoverContract` with a way to open one.

class TestMine(MoverContract): def open_mover(self, tiers, context): ...
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Mover, Transfer, TransferKind, TransferResult
from kvtier.record.record import HEADER_BYTES, Header, record_bytes
from kvtier.settings import ByteSize, Capacity
from kvtier.testing.subject import NAMESPACE, fill, make_keys, prove
from kvtier.types import Outcome
from support.movers.media import (
    Fault,
    FileSettings,
    FileSpec,
    HostSettings,
    HostSpec,
    Medium,
    MediumSettings,
)

HOST, NEAR, FAR = 0, 1, 2
SOON = 120.0
"""Only what hangs takes so long."""
BATCH = 4
QUEUE_BLOCKS = 32
RECORD = record_bytes(NAMESPACE.payload_bytes)


class MoverRig:
    """A mover over three media (host memory, and two that are not), and the test's side of them."""

    def __init__(self, folder: Path) -> None:
        self.media = [
            Medium(folder / f"tier{tier}", RECORD, create=True) for tier in (HOST, NEAR, FAR)
        ]
        size = Capacity(ByteSize(1 << 20))
        paths = [str(medium.path) for medium in self.media]
        self.tiers: list[MediumSettings] = [HostSettings(capacity=size, path=paths[HOST])]
        self.tiers += [
            FileSettings(
                capacity=size,
                path=paths[tier],
                concurrency=2 if tier == NEAR else 1,
                batch_blocks=BATCH,
                queue_blocks=QUEUE_BLOCKS,
            )
            for tier in (NEAR, FAR)
        ]
        self.context = TierContext(NAMESPACE)
        self.mover: Mover
        self._ids = 0

    def close(self) -> None:
        """Let everything go, then end the mover."""
        for medium in self.media:
            medium.release()
        self.mover.close()
        self.close_media()

    def close_media(self) -> None:
        """Close the test's side of the media."""
        for medium in self.media:
            medium.close()

    def fill(self, tier: int, slots: Sequence[int]) -> None:
        """Write the right record of key `slot` into every one of these slots."""
        keys = make_keys(max(slots) + 1)
        for slot in slots:
            fill(self.media[tier].record(slot), keys[slot])

    def transfer(
        self,
        kind: TransferKind,
        source: int,
        target: int,
        slots: Sequence[int],
        seconds: float = SOON,
        *,
        prove: bool = True,
        prefetch: bool = False,
    ) -> Transfer:
        """Key `slot` from slot `slot` to slot `slot`, for each of these."""
        self._ids += 1
        keys = make_keys(max(slots, default=0) + 1)
        specs = [HostSpec, FileSpec, FileSpec]
        return Transfer(
            id=self._ids,
            kind=kind,
            source=source,
            target=target,
            keys=[keys[slot] for slot in slots],
            source_spec=specs[source](list(slots)),
            target_spec=specs[target](list(slots)),
            deadline=time.monotonic() + seconds,
            prove=prove,
            prefetch=prefetch,
        )

    def load(
        self,
        slots: Sequence[int],
        source: int = NEAR,
        seconds: float = SOON,
        *,
        prove: bool = True,
    ) -> int:
        """Submit a load into host memory that must be accepted; its id."""
        return self.submit(
            self.transfer(TransferKind.LOAD, source, HOST, slots, seconds, prove=prove)
        )

    def prefetch(self, slots: Sequence[int], source: int = NEAR) -> int:
        """Submit a load that nobody waits for yet, and that must be accepted; its id."""
        return self.submit(self.transfer(TransferKind.LOAD, source, HOST, slots, prefetch=True))

    def store(
        self,
        slots: Sequence[int],
        target: int = NEAR,
        seconds: float = SOON,
        *,
        prove: bool = False,
    ) -> int:
        """Submit a store from host memory that must be accepted; its id."""
        return self.submit(
            self.transfer(TransferKind.STORE, HOST, target, slots, seconds, prove=prove)
        )

    def relay(self, slots: Sequence[int], seconds: float = SOON) -> int:
        """Submit a store from one medium that is not host memory to another; its id."""
        return self.submit(self.transfer(TransferKind.STORE, NEAR, FAR, slots, seconds))

    def submit(self, transfer: Transfer) -> int:
        """Submit what must be accepted; its id."""
        assert self.mover.submit(transfer)
        return transfer.id

    def results(self, *ids: int) -> list[TransferResult]:
        """The results of these transfers, in this order; no others may come."""
        found: dict[int, TransferResult] = {}
        until = time.monotonic() + SOON
        while len(found) < len(ids):
            assert time.monotonic() < until, f"no result of {set(ids) - set(found)}"
            self.mover.wait(1.0)
            for result in self.mover.poll():
                assert result.id in ids
                assert result.id not in found
                found[result.id] = result
        return [found[each] for each in ids]

    def outcomes(self, transfer: int) -> list[Outcome]:
        """How one transfer ended."""
        return self.results(transfer)[0].outcomes

    def right(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether these slots hold the right records."""
        keys = make_keys(max(slots) + 1)
        return all(prove(self.media[tier].record(slot), keys[slot]).ok for slot in slots)

    def empty(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether nothing was ever written to these slots."""
        return all(bytes(self.media[tier].record(slot)) == bytes(RECORD) for slot in slots)

    def reported(self, slots: Sequence[int]) -> list[Outcome | None]:
        """The outcomes that were reported to host memory of these slots."""
        return [self.media[HOST].reported(slot) for slot in slots]


class MoverContract:
    """Each test states one promise of `kvtier.interfaces.mover.Mover`."""

    @abstractmethod
    def open_mover(self, tiers: Sequence[MediumSettings], context: TierContext) -> Mover:
        """Open the mover under test over media that `support.movers.media` describes."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[MoverRig]:
        rig = MoverRig(tmp_path)
        rig.mover = self.open_mover(rig.tiers, rig.context)
        yield rig
        rig.close()

    # ---- bytes

    def test_a_load_lands_verified_and_is_told_block_by_block(self, rig: MoverRig) -> None:
        slots = list(range(10))
        rig.fill(NEAR, slots)
        (result,) = rig.results(rig.load(slots))
        assert result.outcomes == [Outcome.OK] * 10
        assert rig.right(HOST, slots)
        assert rig.reported([*slots, 10]) == [Outcome.OK] * 10 + [None]
        assert result.bytes_moved == 10 * RECORD
        assert 0 < result.busy_seconds <= result.seconds

    def test_a_store_writes_what_host_memory_holds(self, rig: MoverRig) -> None:
        slots = list(range(3, 12))
        rig.fill(HOST, slots)
        assert rig.outcomes(rig.store(slots)) == [Outcome.OK] * 9
        assert rig.right(NEAR, slots)
        assert rig.reported(slots) == [None] * 9

    def test_blocks_pass_between_media_that_are_not_host_memory(self, rig: MoverRig) -> None:
        slots = list(range(QUEUE_BLOCKS))
        rig.fill(NEAR, slots)
        assert rig.outcomes(rig.relay(slots)) == [Outcome.OK] * len(slots)
        assert rig.right(FAR, slots)

    def test_an_empty_transfer_ends_too(self, rig: MoverRig) -> None:
        assert rig.outcomes(rig.load([])) == []

    # ---- wrong bytes, missing blocks, broken handlers

    def test_a_flipped_bit_is_corrupt_and_hurts_no_other_block(self, rig: MoverRig) -> None:
        slots = list(range(6))
        rig.fill(NEAR, slots)
        rig.media[NEAR].record(2)[HEADER_BYTES + 7] ^= 1
        rig.media[NEAR].record(4)[20] ^= 1
        expected = [Outcome.OK] * 6
        expected[2] = expected[4] = Outcome.CORRUPT
        (result,) = rig.results(rig.load(slots))
        assert result.outcomes == expected
        assert rig.reported(slots) == expected
        assert result.bytes_moved == 4 * RECORD

    def test_the_record_of_another_key_is_corrupt(self, rig: MoverRig) -> None:
        rig.fill(NEAR, [0, 1])
        rig.media[NEAR].record(0)[:] = rig.media[NEAR].record(1)
        assert rig.outcomes(rig.load([0, 1])) == [Outcome.CORRUPT, Outcome.OK]

    def test_where_the_reader_proves_a_load_only_shows_whose_it_is_and_how_long(
        self, rig: MoverRig
    ) -> None:
        rig.fill(NEAR, range(5))
        rig.media[NEAR].record(0)[HEADER_BYTES + 7] ^= 1
        rig.media[NEAR].record(1)[20] ^= 1
        rig.media[NEAR].record(2)[:] = rig.media[NEAR].record(0)
        key, short = make_keys(4)[3], NAMESPACE.payload_bytes // 2
        Header(key, NAMESPACE.digest, short).write(rig.media[NEAR].record(3))
        expected = [Outcome.OK, *[Outcome.CORRUPT] * 3, Outcome.OK]
        assert rig.outcomes(rig.load(range(5), prove=False)) == expected
        assert rig.reported(range(5)) == expected
        assert bytes(rig.media[HOST].record(0)) == bytes(rig.media[NEAR].record(0)), (
            "the bytes as they were read, for their reader to find out"
        )

    def test_what_nobody_has_proved_is_proved_before_it_is_written(self, rig: MoverRig) -> None:
        slots = list(range(5))
        rig.fill(HOST, slots)
        rig.media[HOST].record(1)[HEADER_BYTES] ^= 1
        rig.media[HOST].record(3)[20] ^= 1
        ok, bad = Outcome.OK, Outcome.CORRUPT
        assert rig.outcomes(rig.store(slots, prove=True)) == [ok, bad, ok, bad, ok]
        assert rig.right(NEAR, [0, 2, 4])
        assert rig.empty(NEAR, [1, 3])

    def test_a_corrupt_record_is_not_passed_on(self, rig: MoverRig) -> None:
        slots = list(range(5))
        rig.fill(NEAR, slots)
        rig.media[NEAR].record(1)[HEADER_BYTES] ^= 1
        rig.media[FAR].break_(3, Fault.GONE)
        assert rig.outcomes(rig.relay(slots)) == [
            Outcome.OK,
            Outcome.CORRUPT,
            Outcome.OK,
            Outcome.IO_ERROR,  # not GONE, which would put the blame on the source
            Outcome.OK,
        ]
        assert rig.right(FAR, [0, 2, 4])
        assert rig.empty(FAR, [1, 3])

    def test_what_a_handler_reports_is_passed_on(self, rig: MoverRig) -> None:
        rig.fill(NEAR, [0, 1])
        rig.media[NEAR].break_(0, Fault.GONE)
        assert rig.outcomes(rig.load([0, 1])) == [Outcome.GONE, Outcome.OK]
        assert rig.reported([0, 1]) == [Outcome.GONE, Outcome.OK]

    def test_a_handler_that_raises_fails_its_batch_and_nothing_else(self, rig: MoverRig) -> None:
        slots = list(range(8))
        rig.fill(NEAR, slots)
        for fault in [Fault.RAISE, Fault.PANIC] * 4:  # more often than there are threads
            rig.media[NEAR].break_(0, fault)
            outcomes = rig.outcomes(rig.load(slots))
            assert outcomes[0] is Outcome.IO_ERROR
            assert outcomes[4:] == [Outcome.OK] * 4
            assert rig.reported(slots) == outcomes

    def test_a_handler_that_raises_halfway_fails_a_relay(self, rig: MoverRig) -> None:
        slots = list(range(4))
        rig.fill(NEAR, slots)
        rig.media[FAR].break_(1, Fault.RAISE)
        assert Outcome.IO_ERROR in rig.outcomes(rig.relay(slots))
        assert rig.outcomes(rig.load(slots)) == [Outcome.OK] * 4

    # ---- order and bounds

    def test_loads_go_before_stores(self, rig: MoverRig) -> None:
        far = rig.media[FAR]
        far.hold([0])
        busy = rig.store([0], FAR)
        assert far.next_call() == ("store", [0])
        store, load = rig.store([1], FAR), rig.load([2], FAR)
        rig.results(rig.load([3]))  # submitted last: when it has ended, all are queued
        far.release()
        rig.results(busy, store, load)
        assert [far.next_call() for _ in range(2)] == [("load", [2]), ("store", [1])]

    def test_prefetches_let_loads_go_before_them_and_go_before_stores(self, rig: MoverRig) -> None:
        far = rig.media[FAR]
        far.hold([0])
        busy = rig.store([0], FAR)
        assert far.next_call() == ("store", [0])
        ids = [rig.store([1], FAR), rig.prefetch([2], FAR), rig.load([3], FAR)]
        rig.results(rig.load([4]))  # submitted last: when it has ended, all are queued
        far.release()
        rig.results(busy, *ids)
        calls = [far.next_call() for _ in range(3)]
        assert calls == [("load", [3]), ("load", [2]), ("store", [1])]

    def test_a_prefetch_that_somebody_waits_for_is_a_load(self, rig: MoverRig) -> None:
        far = rig.media[FAR]
        far.hold([0])
        busy = rig.store([0], FAR)
        assert far.next_call() == ("store", [0])
        ids = [rig.prefetch([1], FAR), rig.prefetch([2], FAR), rig.load([3], FAR)]
        rig.mover.hasten([ids[1], 999])
        rig.results(rig.load([4]))
        far.release()
        rig.results(busy, *ids)
        assert [far.next_call()[1] for _ in range(3)] == [[3], [2], [1]]
        assert rig.mover.stats().in_flight_blocks == 0

    def test_prefetches_leave_threads_and_the_queue_to_loads(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(64))
        near = rig.media[NEAR]
        near.hold(range(QUEUE_BLOCKS))
        prefetch = rig.prefetch(range(QUEUE_BLOCKS))
        near.next_call()
        load = rig.load([40])
        assert rig.outcomes(load) == [Outcome.OK], "one of two threads is left to it"
        assert not rig.mover.submit(rig.transfer(TransferKind.LOAD, NEAR, HOST, [0], prefetch=True))
        full = rig.load(range(40, 40 + QUEUE_BLOCKS))
        near.release()
        rig.results(prefetch, full)
        assert rig.mover.stats().in_flight_blocks == 0

    def test_a_handler_is_never_called_more_often_at_once_than_it_wants(
        self, rig: MoverRig
    ) -> None:
        rig.media[NEAR].hold(range(QUEUE_BLOCKS))
        ids = [rig.load([slot]) for slot in range(10)] + [rig.store([slot]) for slot in (11, 12)]
        for _ in range(2):
            rig.media[NEAR].next_call()
        rig.media[NEAR].release()
        rig.results(*ids)
        assert rig.media[NEAR].busiest == 2

    def test_a_batch_is_no_longer_than_the_handler_wants(self, rig: MoverRig) -> None:
        rig.results(rig.load(range(20)))
        called: list[int] = []
        while len(called) < 20:
            _, slots = rig.media[NEAR].next_call()
            assert len(slots) <= BATCH
            assert slots == list(range(slots[0], slots[0] + len(slots)))
            called += slots
        assert sorted(called) == list(range(20))

    def test_a_job_of_few_blocks_uses_all_threads_too(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(2))
        rig.media[NEAR].hold(range(2))
        load = rig.load(range(2))
        begun = [rig.media[NEAR].next_call()[1] for _ in range(2)]
        assert sorted(begun) == [[0], [1]], "each block on a thread of its own, at once"
        rig.media[NEAR].release()
        assert rig.outcomes(load) == [Outcome.OK] * 2

    def test_stores_beyond_the_queue_are_dropped_and_loads_still_taken(self, rig: MoverRig) -> None:
        rig.media[NEAR].hold(range(64))
        ids = [rig.store(range(QUEUE_BLOCKS - 1))]
        store = rig.transfer(TransferKind.STORE, HOST, NEAR, range(2))
        assert not rig.mover.submit(store)
        ids.append(rig.load(range(QUEUE_BLOCKS)))
        assert not rig.mover.submit(rig.transfer(TransferKind.LOAD, NEAR, HOST, [0]))
        ids.append(rig.store([0], FAR))
        assert rig.mover.stats().in_flight_blocks == 2 * QUEUE_BLOCKS
        rig.media[NEAR].release()
        rig.results(*ids)
        assert rig.mover.stats().in_flight_blocks == 0
        rig.outcomes(rig.submit(store))

    def test_a_relay_needs_room_at_both_ends(self, rig: MoverRig) -> None:
        rig.media[FAR].hold(range(64))
        full = rig.store(range(QUEUE_BLOCKS), FAR)
        assert not rig.mover.submit(rig.transfer(TransferKind.STORE, NEAR, FAR, [0]))
        rig.media[FAR].release()
        rig.results(full)

    def test_a_slow_relay_does_not_hold_up_loads(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(64))
        rig.media[FAR].hold(range(64))
        relay = rig.relay(range(QUEUE_BLOCKS))
        rig.media[FAR].next_call()
        assert rig.outcomes(rig.load(range(40, 64))) == [Outcome.OK] * 24
        rig.media[FAR].release()
        assert rig.outcomes(relay) == [Outcome.OK] * QUEUE_BLOCKS

    # ---- deadlines, cancellation, the end

    def test_what_is_late_and_still_queued_ends_while_others_hang(self, rig: MoverRig) -> None:
        rig.media[NEAR].hold([0, 1])
        busy = [rig.load([0]), rig.load([1])]
        for _ in busy:
            rig.media[NEAR].next_call()
        late = rig.load([2, 3], seconds=0.05)
        assert rig.outcomes(late) == [Outcome.TIMEOUT] * 2
        assert rig.reported([2, 3]) == [Outcome.TIMEOUT] * 2
        assert rig.mover.stats().timeouts == 1
        rig.media[NEAR].release()
        rig.results(*busy)
        assert rig.empty(HOST, [2, 3])

    def test_a_transfer_that_is_late_from_the_start_moves_nothing(self, rig: MoverRig) -> None:
        rig.fill(NEAR, [0])
        assert rig.outcomes(rig.load([0], seconds=-1.0)) == [Outcome.TIMEOUT]
        assert rig.empty(HOST, [0])

    def test_cancel_ends_what_has_not_started_and_lets_the_rest_finish(self, rig: MoverRig) -> None:
        slots = list(range(16))
        rig.fill(NEAR, slots)
        rig.media[NEAR].hold(slots)
        first, second = rig.load(slots), rig.load(range(16, 20))
        started = [slot for _ in range(2) for slot in rig.media[NEAR].next_call()[1]]
        rig.mover.cancel([first, second, 999])
        assert rig.outcomes(second) == [Outcome.CANCELLED] * 4
        rig.media[NEAR].release()
        expected = [Outcome.OK if slot in started else Outcome.CANCELLED for slot in slots]
        assert rig.outcomes(first) == expected
        assert rig.reported(slots) == expected

    def test_close_cancels_what_waits_and_refuses_what_comes(self, rig: MoverRig) -> None:
        rig.media[NEAR].hold([0, 1])
        busy = [rig.load([0]), rig.load([1])]
        for _ in busy:
            rig.media[NEAR].next_call()
        waiting = rig.load([2, 3])
        rig.mover.cancel([waiting])
        assert rig.outcomes(waiting) == [Outcome.CANCELLED] * 2
        rig.media[NEAR].release()
        rig.mover.close()
        assert {result.id for result in rig.mover.poll()} == set(busy)
        assert not rig.mover.submit(rig.transfer(TransferKind.LOAD, NEAR, HOST, [0]))
        assert not rig.mover.wait(0.0)
        rig.mover.close()

    def test_close_ends_the_wait_of_whoever_waits(self, rig: MoverRig) -> None:
        waiter = threading.Thread(target=rig.mover.wait, args=(3600.0,))
        waiter.start()
        assert not rig.mover.wait(0.05), "the other one waits by now"
        rig.mover.close()
        waiter.join()

    def test_a_transfer_is_not_taken_twice(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(2))
        rig.media[NEAR].hold([0])
        transfer = rig.transfer(TransferKind.LOAD, NEAR, HOST, [0, 1])
        load = rig.submit(transfer)
        with pytest.raises(ValueError, match="in flight"):
            rig.mover.submit(transfer)
        rig.media[NEAR].release()
        assert rig.outcomes(load) == [Outcome.OK] * 2
        assert rig.mover.stats().in_flight_blocks == 0

    def test_a_transfer_that_makes_no_sense_is_the_callers_mistake(self, rig: MoverRig) -> None:
        transfer = rig.transfer(TransferKind.LOAD, NEAR, HOST, [0, 1])
        transfer.keys = transfer.keys[:1]
        with pytest.raises(ValueError, match="every key"):
            rig.mover.submit(transfer)
        with pytest.raises(ValueError, match="from one tier to another"):
            rig.mover.submit(rig.transfer(TransferKind.LOAD, NEAR, NEAR, [0]))
        assert rig.mover.stats().in_flight_blocks == 0
