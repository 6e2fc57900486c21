"""Any tier, step by step beside the memory tier: whatever one says, the other must say too.

    TestMine = tier_machine(MySubject()).TestCase

What a tier evicts is its own affair: the model is told to forget the same blocks, provided that
they could be evicted at all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import NotResident
from kvtier.record.record import record_bytes
from kvtier.testing.contract_medium import follow
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.subject import NAMESPACE, Rig, Subject, failures
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Presence, Reservation, block_key

BLOCKS = 5
UNIVERSE = [block_key(b"%02d" % number) for number in range(12)]  # short, to be read in a failure
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

some_keys = st.lists(st.sampled_from(UNIVERSE), max_size=8)
held = st.sampled_from([1, 2, 0])  # how many stay in flight
bad_places = st.sets(st.integers(0, BLOCKS - 1), max_size=2)
load_failures = st.sampled_from([None, Outcome.CORRUPT, Outcome.GONE, Outcome.IO_ERROR])


class TierMachine(RuleBasedStateMachine):
    """Store, load, drop and restart in every order; derive with a `subject`."""

    subject: Subject

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-machine-")
        self.rig = Rig(self.subject, Path(self.folder.name), blocks=BLOCKS)
        self.tier = self.rig.tier
        slot = record_bytes(NAMESPACE.payload_bytes)
        self.model = MemoryTier(MemoryStore(NAMESPACE, BLOCKS * slot))
        self.visible: set[BlockKey] = set()
        self.dropped: set[BlockKey] = set()
        self.storing: list[Reservation] = []
        self.loading: list[tuple[list[BlockKey], LoadStoreSpec]] = []
        self.reserve(UNIVERSE[: BLOCKS - 1], evict=False, held=0, bad=set())

    # Steps are spent where blocks are in flight. But in media that others share time has a say in
    # what goes first, and which steps there are must not depend on that: there some do nothing.

    # in

    @rule(keys=some_keys, evict=st.booleans(), held=held, bad=bad_places)
    def reserve(self, keys: list[BlockKey], evict: bool, held: int, bad: set[int]) -> None:
        self.rig.settle()
        evictable = set(self.model.victims(BLOCKS))
        reservation = self.rig.reserve(keys, evict=evict)
        assert set(reservation.evicted) <= evictable
        self.model.forget(reservation.evicted)
        assert reservation.keys == self.model.prepare_store(keys, evict=False).keys
        self.storing.append(reservation)
        while len(self.storing) > held:
            self.commit(0, bad)

    @precondition(lambda self: self.storing or self.subject.shared)
    @rule(which=st.integers(0, 7), bad=bad_places)
    def commit(self, which: int, bad: set[int]) -> None:
        if not self.storing:
            return
        reservation = self.storing.pop(which % len(self.storing))
        keys = reservation.keys
        self.tier.flush()  # else what is hidden at the moment may take what is written with it
        assert self.rig.write(reservation) == {}
        failed = failures([key for n, key in enumerate(keys) if n in bad], Outcome.IO_ERROR)
        self.tier.complete_store(keys, failed)
        self.model.complete_store(keys, failed)
        self.dropped -= set(keys)
        self.dropped |= set(failed)

    # out

    @precondition(lambda self: self.subject.shared or self.model_hits())
    @rule(picks=st.lists(st.integers(0, BLOCKS), max_size=4), held=held, outcome=load_failures)
    def load(self, picks: list[int], held: int, outcome: Outcome | None) -> None:
        if not (hits := self.model_hits()):
            return
        keys = [hits[pick % len(hits)] for pick in picks]
        spec = self.tier.prepare_load(keys)
        self.model.prepare_load(keys)
        assert len(spec) == len(keys)
        self.loading.append((keys, spec))
        while len(self.loading) > held:
            self.finish_load(0, outcome)

    @rule(keys=some_keys)
    def ask_for_what_is_not_there(self, keys: list[BlockKey]) -> None:
        pending = {key for one in self.storing for key in one.keys}
        self.tier.complete_store([key for key in keys if key not in pending])
        if not set(keys) <= set(self.model_hits()):
            with pytest.raises(NotResident):
                self.tier.prepare_load(keys)

    @precondition(lambda self: self.loading or self.subject.shared)
    @rule(which=st.integers(0, 7), outcome=load_failures)
    def finish_load(self, which: int, outcome: Outcome | None) -> None:
        if not self.loading:
            return
        keys, spec = self.loading.pop(which % len(self.loading))
        for key, now in self.rig.read(keys, spec).items():
            assert now is Outcome.OK or (now is Outcome.GONE and key not in self.model_hits())
        if outcome is Outcome.CORRUPT and self.subject.quarantine_blocks:
            outcome = Outcome.IO_ERROR  # the model would not know that room is out of use
        failed = failures(keys[:1], outcome) if outcome else None
        self.tier.complete_load(keys, failed)
        self.model.complete_load(keys, failed)
        self.dropped |= set(failed or ())

    @rule(picks=st.lists(st.integers(0, BLOCKS), max_size=2), strangers=some_keys)
    def forget(self, picks: list[int], strangers: list[BlockKey]) -> None:
        hits = self.model_hits()
        pinned = [key for keys, _ in self.loading for key in keys]
        some = pinned[:2] + hits
        keys = [some[pick] for pick in picks if pick < len(some)] + strangers[:1]
        self.dropped |= set(keys) & set(hits)
        self.tier.forget(keys)
        self.model.forget(keys)

    def quiet(self) -> bool:
        return not self.storing and not self.loading

    @rule(dice=st.integers(0, 9))
    def clear(self, dice: int) -> None:
        if dice != 9:  # seldom, because an empty tier has little to get wrong
            return
        # A medium that gives its files up whole has new room before the old one is out of use.
        if self.subject.revives and not self.quiet():
            return
        self.dropped |= set(self.model_hits())
        self.tier.clear()
        self.model.clear()

    @rule(keys=some_keys, start=st.integers(0, 1000))
    def touch(self, keys: list[BlockKey], start: int) -> None:
        self.tier.touch(keys, start)
        self.tier.tick()

    # time

    @precondition(lambda self: self.subject.persistent)
    @rule(dice=st.integers(0, 3))
    def restart(self, dice: int) -> None:
        """What was reserved or pinned is so no longer; what was committed is there."""
        if dice != 3:
            return
        while self.loading:
            self.finish_load(-1, None)
        self.rig.reopen()
        self.tier = self.rig.tier
        # What had to go is there yet where nothing was written in its place, whatever came of it
        # elsewhere since.
        self.dropped -= {key for one in self.storing for key in one.evicted}
        for reservation in self.storing:
            self.model.complete_store(
                reservation.keys, failures(reservation.keys, Outcome.CANCELLED)
            )
        self.storing.clear()
        self.tier.take_events()
        revived = [key for key in self.rig.resident(UNIVERSE) if key not in self.model_hits()]
        assert not revived or self.subject.revives
        assert not set(revived) & self.dropped
        assert self.model.prepare_store(revived, evict=False).keys == revived
        self.model.complete_store(revived)
        self.visible = set(self.model_hits())

    @precondition(lambda self: self.subject.shared)
    @rule()
    def another_engine_looks(self) -> None:
        self.tier.flush()
        peer = self.rig.peer()
        # It may also find what was evicted here and is not overwritten yet.
        assert set(peer.get(UNIVERSE)) >= set(self.model_hits())
        peer.close()

    def model_hits(self) -> list[BlockKey]:
        found = self.model.lookup(UNIVERSE)
        return [key for key, now in zip(UNIVERSE, found, strict=True) if now is Presence.HIT]

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert self.tier.lookup(UNIVERSE) == self.model.lookup(UNIVERSE)
        assert sorted(self.tier.victims(BLOCKS)) == sorted(self.model.victims(BLOCKS))
        follow(self.rig, self.visible)
        assert self.visible == set(self.model_hits())
        mine, other = self.tier.stats(), self.model.stats()
        assert (mine.blocks, mine.pinned, mine.in_flight) == (
            other.blocks,
            other.pinned,
            other.in_flight,
        )
        self.rig.check_room()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
            self.folder.cleanup()


def tier_machine(subject: Subject) -> type[TierMachine]:
    """A machine for one subject; its `TestCase` is what pytest runs."""
    machine: type[TierMachine] = type("Machine", (TierMachine,), {"subject": subject})
    machine.TestCase.settings = SETTINGS
    return machine
