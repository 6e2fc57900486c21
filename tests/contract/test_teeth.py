"""The suites find what they are there to find: tiers that break one promise each."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, settings
from support.tiers.subjects import MemorySubject

from campaign.crash import Broken, Ledger, MediumState
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import HEADER_BYTES, Buffer
from kvtier.settings import TierSettings
from kvtier.system.disk import Disk
from kvtier.testing import contract_medium as moves
from kvtier.testing.contract import CatalogueContract, TierContract
from kvtier.testing.memory import MemoryHandler, MemoryStore, MemoryTier
from kvtier.testing.stateful import SETTINGS, tier_machine
from kvtier.testing.subject import NAMESPACE, Rig, blank, make_keys, prove, sealed
from kvtier.types import (
    BlockKey,
    LoadStoreSpec,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)


class ShowsTooEarly(MemoryTier):
    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        found = super().lookup(keys)
        return [Presence.HIT if now is Presence.PENDING else now for now in found]


class CommitsWhatFailed(MemoryTier):
    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        super().complete_store(keys)


class ForgetsToUnpin(MemoryTier):
    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        super().complete_load(keys[1:], failed)


class PinsNothing(MemoryTier):
    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        spec = super().prepare_load(keys)
        super().complete_load(keys)
        return spec


class OffersWhatFailed(MemoryTier):
    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        super().complete_load(keys)


class TurnsTheOrder(MemoryTier):
    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        return super().prepare_store(keys[::-1], evict=evict)


class EvictsUnasked(MemoryTier):
    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        return super().prepare_store(keys)


class SaysNothingOfEvictions(MemoryTier):
    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        reservation = super().prepare_store(keys, evict=evict)
        return Reservation(reservation.keys, reservation.spec, [])


class LosesEvents(MemoryTier):
    def take_events(self) -> list[TierEvent]:
        return super().take_events()[1:]


class ForgetsToForget(MemoryTier):
    def forget(self, keys: Sequence[BlockKey]) -> None:
        super().forget(keys[1:])


class ClearsLate(MemoryTier):
    def clear(self) -> None:
        self.forget(list(self._resident))


class TakesTouchForStore(MemoryTier):
    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        new = self.prepare_store(keys, evict=False).keys
        self.complete_store(new)


BROKEN = [
    ShowsTooEarly,
    CommitsWhatFailed,
    ForgetsToUnpin,
    PinsNothing,
    OffersWhatFailed,
    TurnsTheOrder,
    EvictsUnasked,
    SaysNothingOfEvictions,
    LosesEvents,
    ForgetsToForget,
    ClearsLate,
    TakesTouchForStore,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_machine_finds_it(broken: type[MemoryTier]) -> None:
    class BrokenSubject(MemorySubject):
        def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> MemoryTier:
            return broken(self.backend.open_tier(settings, context).store)

    machine = tier_machine(BrokenSubject())
    machine.TestCase.settings = settings(
        SETTINGS, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        machine.TestCase().runTest()


class WritesLater(MemoryHandler):
    """Keeps what it is given until somebody asks for it."""

    kept: tuple[LoadStoreSpec, Sequence[BlockKey], Sequence[Buffer]] | None = None

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        self.kept = spec, keys, records
        return [Outcome.OK] * len(keys)

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        if self.kept:
            super().store(*self.kept)
        return super().load(spec, keys, into)


class ChangesWhatItStores(MemoryHandler):
    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = super().store(spec, keys, records)
        records[0][HEADER_BYTES] ^= 1
        return outcomes


class SharesABuffer(MemoryHandler):
    """Stores by way of one buffer, with another call in between."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.buffer = blank()
        self.pair = threading.Barrier(2)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        self.buffer[:] = records[0]
        self.pair.wait()
        return super().store(spec, keys, [self.buffer])


class CountsNoEvictions(MemoryTier):
    def stats(self) -> TierStats:
        found = super().stats()
        found.evicted = 0
        return found


class CountsHalf(MemoryTier):
    def stats(self) -> TierStats:
        found = super().stats()
        found.bytes_used //= 2
        return found


class CountsOn(MemoryTier):
    def stats(self) -> TierStats:
        super().stats()
        return self._stats


class ClearsForNow(MemoryTier):
    """What it has cleared comes back when it is opened again."""

    cleared: list[BlockKey] = []

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.complete_store(self.prepare_store(self.cleared).keys)

    def clear(self) -> None:
        self.cleared.extend(self._resident)
        super().clear()


class HalvesSubject(MemorySubject):
    """The memory backend with a half of its own."""

    persistent = True

    def __init__(self, half: type[MemoryTier | MemoryHandler]) -> None:
        self.half = half

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> MemoryTier:
        tier = self.backend.open_tier(settings, context)
        return self.half(tier.store) if issubclass(self.half, MemoryTier) else tier

    def open_handler(
        self, settings: TierSettings, context: TierContext, disk: Disk
    ) -> MemoryHandler:
        handler = self.backend.open_handler(settings, context)
        return self.half(handler._store) if issubclass(self.half, MemoryHandler) else handler


@pytest.mark.parametrize(
    ("half", "test"),
    [
        (WritesLater, "test_a_store_has_ended_when_it_says_so"),
        (ChangesWhatItStores, "test_a_store_has_ended_when_it_says_so"),
        (SharesABuffer, "test_transfers_run_in_many_threads"),
        (CountsNoEvictions, "test_eviction_makes_room_and_says_what_it_took"),
        (CountsHalf, "test_stats_count"),
        (CountsOn, "test_stats_count"),
        (ClearsForNow, "test_what_was_cleared_stays_away"),
    ],
)
def test_the_contract_finds_it(
    tmp_path: Path, half: type[MemoryTier | MemoryHandler], test: str
) -> None:
    contract = TierContract()
    contract.subject = HalvesSubject(half)
    rig = Rig(contract.subject, tmp_path)
    with pytest.raises(AssertionError):
        getattr(contract, test)(rig)
    rig.close()


def test_a_handler_that_needs_its_tier_beside_it_is_found(tmp_path: Path) -> None:
    """An engine's is in another process, where it would find nothing, ever."""
    contract = TierContract()
    contract.subject = HalvesSubject(MemoryHandler)
    rig = Rig(contract.subject, tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        contract.test_another_process_finds_the_medium(rig)
    rig.close()


class ReadsOnce(MemoryHandler):
    """Takes what a socket gives at first for all."""

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        for record, buffer in zip(self.views(spec), into, strict=True):
            server, client = socket.socketpair()
            with server, client:
                server.setblocking(False)
                server.send(record)
                client.recv_into(buffer)
        return [Outcome.OK] * len(keys)


def test_a_handler_that_moves_only_small_records_is_found(tmp_path: Path) -> None:
    contract = TierContract()
    contract.subject = HalvesSubject(ReadsOnce)
    rig = Rig(contract.subject, tmp_path)
    assert rig.get(rig.put(make_keys(4))) == make_keys(4)
    rig.close()
    with pytest.raises(AssertionError):
        contract.test_a_large_record_comes_back_whole(tmp_path)


def test_what_a_closed_tier_leaves_behind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "CLOSED_S", 0.1)
    files: list[int] = []
    done = threading.Event()

    class KeepsAFile(MemoryTier):
        def __init__(self, store: MemoryStore) -> None:
            super().__init__(store)
            files.append(os.open(os.devnull, os.O_RDONLY))

    class KeepsAThread(MemoryHandler):
        def __init__(self, store: MemoryStore) -> None:
            super().__init__(store)
            threading.Thread(target=done.wait).start()

    for half, left in (KeepsAFile, "files stay open"), (KeepsAThread, "threads stay alive"):
        contract = TierContract()
        contract.subject = HalvesSubject(half)
        rig = Rig(contract.subject, tmp_path)
        with pytest.raises(AssertionError, match=left):
            contract.test_what_is_closed_holds_nothing(rig)
        rig.close()
    done.set()
    for file in files:
        os.close(file)


def test_the_contract_opens_no_two_handlers_at_once(tmp_path: Path) -> None:
    """The medium of one may be a file that it locks."""

    class Alone(MemoryHandler):
        def __init__(self, store: MemoryStore) -> None:
            super().__init__(store)
            self.lock = tmp_path / "lock"
            self.lock.touch(exist_ok=False)

        def close(self) -> None:
            self.lock.unlink()

    def elsewhere(*question: object) -> list[Outcome]:
        Alone(MemoryStore(NAMESPACE, 1 << 20)).close()
        return [Outcome.OK]

    contract = TierContract()
    contract.subject = HalvesSubject(Alone)
    rig = Rig(contract.subject, tmp_path)
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(moves, "load_elsewhere", elsewhere)
        contract.test_another_process_finds_the_medium(rig)
    rig.close()


class ForOneThread(MemoryHandler):
    concurrency = 1

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.callers: set[int] = set()

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        self.callers.add(threading.get_ident())
        return super().load(spec, keys, into)


def test_the_contract_asks_for_no_more_threads_than_the_mover_has(tmp_path: Path) -> None:
    contract = TierContract()
    contract.subject = HalvesSubject(ForOneThread)
    rig = Rig(contract.subject, tmp_path)
    contract.test_transfers_run_in_many_threads(rig)
    assert isinstance(rig.handler, ForOneThread)
    assert len(rig.handler.callers) == 1
    rig.close()


class FreesBehind(MemoryTier):
    """What is dropped takes its room until it was waited for, as where files are removed behind."""

    taken = 0

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        before = super().stats().bytes_used
        super().complete_store(keys, failed)
        self.taken += before - super().stats().bytes_used

    def stats(self) -> TierStats:
        found = super().stats()
        found.bytes_used += self.taken
        return found

    def flush(self) -> None:
        self.taken = 0


class FreesBehindSubject(MemorySubject):
    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> MemoryTier:
        return FreesBehind(self.backend.open_tier(settings, context).store)


class TestRoomThatComesBehind(CatalogueContract):
    subject = FreesBehindSubject()


def test_a_budget_that_files_exceed_is_told_with_the_overhead(tmp_path: Path) -> None:
    rig = Rig(MemorySubject(), tmp_path)
    tmp_path.joinpath("log").write_bytes(bytes(rig.capacity + 1))
    with pytest.raises(AssertionError, match="overhead_bytes"):
        rig.check_room()
    rig.close()


def test_wrong_bytes_that_verify_raise() -> None:
    key, other = make_keys(2)
    record = sealed(key)
    assert prove(record, key) is Outcome.OK
    assert prove(record, other) is Outcome.CORRUPT
    record[5000] ^= 1
    assert prove(record, key) is Outcome.CORRUPT


class TestLedger:
    """What a crash campaign holds against a medium."""

    KEYS = make_keys(4)

    def found(self, *keys: BlockKey, **different: int) -> MediumState:
        facts = {
            "served": len(keys),
            "bytes_used": 0,
            "bytes_capacity": 10,
            "occupied_bytes": 10,
            "in_flight": 0,
            "room": 16 - len(keys),
            "blocks": 16,
            "capacity": 10,
        }
        return MediumState(resident=[bytes(key) for key in keys], **(facts | different))

    def ledger(self, *lines: str) -> Ledger:
        ledger = Ledger()
        names = {f"k{number}": key.hex() for number, key in enumerate(self.KEYS)}
        ledger.read([[" ".join(names.get(word, word) for word in line.split()) for line in lines]])
        return ledger

    def test_all_is_well(self) -> None:
        ledger = self.ledger("T k0 k1 k2", "E", "C k0 k1", "F k0", "G k0", "T k3")
        ledger.check(self.found(self.KEYS[1]), MemorySubject())
        ledger.check(self.found(self.KEYS[1], self.KEYS[3]), MemorySubject())

    @pytest.mark.parametrize(
        ("lines", "found", "facts", "problem"),
        [
            (["T k0", "E", "C k0"], [], {}, "1 committed blocks are lost"),
            (["T k0", "E", "C k0", "T k1 k2", "E"], [], {}, "1 committed blocks are lost"),
            (["T k0", "E", "C k0", "F k0", "G k0"], [0], {}, "1 dropped blocks came back"),
            ([], [0], {}, "1 blocks were never committed"),
            (["T k0", "E", "C k0"], [0], {"served": 0}, "1 offers are not right"),
            ([], [], {"occupied_bytes": 11}, "the files take 11 bytes"),
            ([], [], {"in_flight": 1}, "1 reservations outlived their owner"),
            ([], [], {"room": 15}, "only 15 blocks have room"),
        ],
    )
    def test_a_broken_promise_is_named(
        self, lines: list[str], found: list[int], facts: dict[str, int], problem: str
    ) -> None:
        keys = [self.KEYS[index] for index in found]
        with pytest.raises(Broken, match=problem):
            self.ledger(*lines).check(self.found(*keys, **facts), MemorySubject())

    def test_an_unfinished_reservation_may_have_evicted(self) -> None:
        ledger = self.ledger("T k0", "E", "C k0", "T k1")
        ledger.check(self.found(), MemorySubject())

    def test_what_the_medium_has_recorded_as_given_up_is_not_lost(self) -> None:
        ledger = self.ledger("T k0 k1", "E", "C k0 k1")
        state = msgspec.structs.replace(self.found(), given_up=[bytes(self.KEYS[0])])
        with pytest.raises(Broken, match="1 committed blocks are lost"):
            ledger.check(state, MemorySubject())

    def test_who_sheds_may_have_died_before_it_said_so(self) -> None:
        told = ("T k0", "E", "C k0", "U", "R")
        self.ledger(*told).check(self.found(), MemorySubject())
        with pytest.raises(Broken, match="2 committed blocks are lost"):
            self.ledger(*told, "T k1", "E", "C k1", "R").check(self.found(), MemorySubject())
