"""The mover on threads keeps the contract of every mover, and some promises of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from support.movers.contract import SOON, MoverContract, MoverRig
from support.movers.media import FILE, HOST, Fault, FileSettings, MediumSettings, Panic

from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Mover, TransferKind
from kvtier.move import threads as batch_carrier
from kvtier.move.queues import TransferJob
from kvtier.move.threads import ThreadMover
from kvtier.types import Outcome


def open_threads(tiers: Sequence[MediumSettings], context: TierContext) -> ThreadMover:
    handlers = [
        (FILE if isinstance(tier, FileSettings) else HOST).open_handler(tier, context)
        for tier in tiers
    ]
    return ThreadMover(
        handlers,
        context.namespace,
        queue_blocks=[tier.queue_blocks for tier in tiers],
        staging_bytes=1 << 16,
    )


def closed_handlers(rig: MoverRig) -> list[bool]:
    return [each._medium._calls < 0 for each in rig.mover._handlers]  # type: ignore[attr-defined]


class TestThreadMover(MoverContract):
    def open_mover(self, tiers: Sequence[MediumSettings], context: TierContext) -> Mover:
        return open_threads(tiers, context)

    def test_close_leaves_no_thread(self, rig: MoverRig) -> None:
        threads = rig.mover._threads  # type: ignore[attr-defined]
        assert [thread.is_alive() for thread in threads] == [True] * (1 + 2 + 1)
        rig.results(rig.load(range(4)))
        rig.mover.close()
        assert not any(thread.is_alive() for thread in threads)
        assert closed_handlers(rig) == [True] * 3

    def test_what_waits_halfway_when_it_is_closed_has_not_arrived(self, rig: MoverRig) -> None:
        rig.fill(1, range(8))
        rig.media[2].hold(range(8))
        relay = rig.relay(range(8))
        started = rig.media[2].next_call()[1]
        halfway = rig.mover._lanes[2]._arrived  # type: ignore[attr-defined]
        while not halfway:
            pass
        closing = threading.Thread(target=rig.mover.close)
        closing.start()
        while halfway:
            pass
        rig.media[2].release()
        closing.join()
        (result,) = rig.mover.poll()
        assert result.id == relay
        arrived = [slot for slot, outcome in enumerate(result.outcomes) if outcome.ok]
        assert arrived == started
        assert rig.right(2, started)

    def test_what_has_a_verdict_is_not_moved(self, rig: MoverRig) -> None:
        rig.fill(1, range(2))
        transfer = rig.transfer(TransferKind.LOAD, 1, 0, range(2))
        late = TransferJob(transfer, (1,), 4, 0.0).cut(2, 0.0, Outcome.TIMEOUT)
        rig.mover._run(late)  # type: ignore[attr-defined]
        assert late.job.outcomes == [Outcome.TIMEOUT] * 2
        assert rig.reported(range(2)) == [Outcome.TIMEOUT] * 2
        assert rig.empty(0, range(2))

    def test_a_host_medium_that_panics_when_it_is_told_of_a_failure_ends_no_thread(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def panic(_batch: object) -> None:
            raise Panic("the host medium's own mistake")

        monkeypatch.setattr(rig.mover._carrier, "announce", panic)  # type: ignore[attr-defined]
        rig.fill(1, range(4))
        rig.media[1].break_(0, Fault.RAISE)
        for _ in range(4):  # more often than there are threads
            assert rig.outcomes(rig.load([0])) == [Outcome.IO_ERROR]

    def test_close_cancels_the_second_half_of_a_relay(self, rig: MoverRig) -> None:
        rig.fill(1, range(16))
        rig.media[2].hold(range(64))
        relay = rig.relay(range(16))
        started = rig.media[2].next_call()[1]
        closing = threading.Thread(target=rig.mover.close)
        closing.start()
        while not rig.mover._closed:  # type: ignore[attr-defined]
            pass
        rig.media[2].release()
        closing.join()
        (result,) = rig.mover.poll()
        assert result.id == relay
        assert [result.outcomes[slot] for slot in started] == [Outcome.OK] * len(started)
        assert set(result.outcomes) == {Outcome.OK, Outcome.CANCELLED}

    def test_a_relay_that_is_late_halfway_goes_no_further(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig.fill(1, range(4))
        rig.media[2].hold([9])
        busy = rig.store([9], 2)
        rig.media[2].next_call()
        relay = rig.relay(range(4))
        rig.media[1].next_call()
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * SOON)
        monkeypatch.setattr(batch_carrier, "time", later)
        rig.media[2].release()
        assert rig.results(busy, relay)[1].outcomes == [Outcome.TIMEOUT] * 4
        assert rig.empty(2, range(4))

    def test_a_relay_that_is_late_halfway_ends_while_its_target_is_busy(
        self, rig: MoverRig
    ) -> None:
        """A bucket that loads keep busy takes no store in: it would have no result for ever, and
        its process be killed, with all the loads that it has."""
        rig.fill(1, range(4))
        rig.media[2].hold([9])
        busy = rig.store([9], 2)
        rig.media[2].next_call()
        assert rig.outcomes(rig.relay(range(4), seconds=0.2)) == [Outcome.TIMEOUT] * 4
        staging = rig.mover._staging  # type: ignore[attr-defined]
        assert staging.free == staging.count
        rig.media[2].release()
        rig.results(busy)
        assert rig.empty(2, range(4))

    def test_a_relay_that_is_read_too_late_does_not_wait_for_its_target(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig.fill(1, range(4))
        for tier, slots in ((1, range(4)), (2, [9])):
            rig.media[tier].hold(slots)
        busy = rig.store([9], 2)
        rig.media[2].next_call()
        relay = rig.relay(range(4))
        for _ in range(2):
            rig.media[1].next_call()
        assert rig.outcomes(rig.load([5], seconds=0.2)) == [Outcome.TIMEOUT]
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * SOON)
        monkeypatch.setattr(batch_carrier, "time", later)
        rig.media[1].release()
        assert rig.outcomes(relay) == [Outcome.TIMEOUT] * 4
        rig.media[2].release()
        rig.results(busy)

    def test_close_does_not_wait_for_ever(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtier.move.threads.CLOSE_SECONDS", 0.05)
        rig.media[1].hold([0])
        load = rig.load([0])
        rig.media[1].next_call()
        rig.mover.close()
        assert closed_handlers(rig) == [False] * 3, "it is in one of them still"
        assert rig.mover.poll() == []  # no promise while the handler may still write
        rig.media[1].release()
        assert rig.outcomes(load) == [Outcome.CORRUPT]
