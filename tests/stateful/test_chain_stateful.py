"""A chain of three tiers under everything at once: never a wrong block, never a leak.

The mover is a script: it ends any transfer at any time, well or badly, or not before the very end.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
)
from hypothesis.stateful import rule as step
from support.tiers.chains import REST, ChainRig, is_quiet, rule

from kvtier.chain.ledger import Ticket
from kvtier.chain.prefetch import LONGEST_S
from kvtier.chain.store import PAUSE_MAX_S
from kvtier.settings import Admission, PrefetchSettings, RetainSettings, WritePolicy
from kvtier.testing.subject import make_keys, prove
from kvtier.types import BlockKey, EventKind, Outcome, Presence, Reservation

UNIVERSE = make_keys(8)
SLOTS = (4, 6, 8)
REQUESTS = ("a", "b")
QUEUED = ("c", "d", "e")
SESSIONS = ("", "s", "t")

some_keys = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=6, unique=True)
asked_keys = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=6)  # some of them twice
number = st.integers(0, 7)
bad_outcomes = st.sampled_from([outcome for outcome in Outcome if not outcome.ok])
bad_keys = st.dictionaries(st.sampled_from(UNIVERSE), bad_outcomes, max_size=3)
policies = st.sampled_from(WritePolicy)
admissions = st.sampled_from(Admission)


class ChainMachine(RuleBasedStateMachine):
    """Requests, stores, transfers and time in every order."""

    @initialize(
        writes=st.tuples(policies, policies),
        admits=st.tuples(admissions, admissions),
        near=some_keys,
        far=some_keys,
        in_files=st.sets(st.sampled_from([1, 2])),
        restart=st.sampled_from([0.0, 0.75]),
    )
    def begin(
        self,
        writes: tuple[WritePolicy, ...],
        admits: tuple[Admission, ...],
        near: list[BlockKey],
        far: list[BlockKey],
        in_files: set[int],
        restart: float,
    ) -> None:
        rules = [rule(write, admit, 5) for write, admit in zip(writes, admits, strict=True)]
        ahead = PrefetchSettings(memory=0.5, warmup_share=restart)
        kept = RetainSettings(share=0.5)
        self.rig = ChainRig(SLOTS, [rule(), *rules], in_files=in_files, prefetch=ahead, retain=kept)
        for index, tier in enumerate(self.rig.tiers):
            tier.medium = f"tier{index}"
        self.chain = self.rig.chain
        self.storing: list[Reservation] = []
        self.tickets: list[Ticket] = []
        self.unreported: list[Ticket] = []
        self.visible: dict[str, set[BlockKey]] = {tier.medium: set() for tier in self.rig.tiers}
        self.dead: set[BlockKey] = set(UNIVERSE)
        """Never stored, or stored before everything was cleared."""
        self.appear_below(1, near)
        self.appear_below(2, far)

    # other engines, which share the lower tiers

    @step(tier=st.sampled_from([1, 2]), keys=some_keys, appear=st.integers(0, 3))
    def others(self, tier: int, keys: list[BlockKey], appear: int) -> None:
        if appear:
            self.appear_below(tier, keys)
        else:
            self.rig.tiers[tier].forget(keys)

    def appear_below(self, tier: int, keys: list[BlockKey]) -> None:
        self.dead.difference_update(self.rig.put(tier, keys))

    # the engine

    @step(keys=some_keys, hold=st.booleans())
    def reserve(self, keys: list[BlockKey], hold: bool) -> None:
        taken = self.chain.prepare_store(keys)
        assert taken.keys == [key for key in keys if key in taken.keys]
        self.storing.append(taken)
        if not hold:
            self.commit(-1, {})

    @precondition(lambda self: self.storing)
    @step(which=number, fails=bad_keys)
    def commit(self, which: int, fails: dict[BlockKey, Outcome]) -> None:
        taken = self.storing.pop(which % len(self.storing))
        good = [at for at, key in enumerate(taken.keys) if key not in fails]
        for at in good:
            self.rig.write(0, [taken.keys[at]], taken.spec.select(at, at + 1))
        before = self.dead
        self.dead = before - {taken.keys[at] for at in good}
        self.chain.complete_store(taken.keys, {k: o for k, o in fails.items() if k in taken.keys})
        # What was cleared while it was being stored does not come back.
        found = self.rig.resident(0, taken.keys)
        self.dead |= before.difference(found)

    def look_up(self, keys: list[BlockKey]) -> list[BlockKey]:
        before = [self.rig.resident(tier, keys) for tier in range(len(SLOTS))]
        coming = {key for one in self.storing for key in one.keys}
        answers = self.chain.lookup(keys)
        for key, answer in zip(keys, answers, strict=True):
            joinable = key in self.chain._ledger.joinable
            if key in before[0]:
                assert answer is Presence.HIT
            elif key in coming:
                assert answer is Presence.PENDING
            elif not any(key in there for there in before) and not joinable:
                assert answer is not Presence.HIT
            if answer is Presence.HIT:
                assert key not in self.dead
        return [key for key, now in zip(keys, answers, strict=True) if now is Presence.HIT]

    @step(keys=asked_keys, request=st.sampled_from(REQUESTS), patience=st.integers(1, 20))
    def load_what_is_a_hit(self, keys: list[BlockKey], request: str, patience: int) -> None:
        hits = self.look_up(keys)
        self.chain.touch(hits)
        refusing = self.rig.mover.down or not self.rig.mover.accepting
        ticket = self.chain.begin_load(hits, request, self.rig.now + patience)
        assert refusing or not ticket.missing, "lookup promised what could not be taken in"
        self.keep(ticket, hits)

    @step(keys=asked_keys, at_once=st.booleans())
    def load_anything(self, keys: list[BlockKey], at_once: bool) -> None:
        ticket = self.chain.begin_load(keys, "other", self.rig.now + 5.0)
        if at_once:
            self.chain.end_load(ticket)
        else:
            self.keep(ticket, keys)

    def keep(self, ticket: Ticket, asked: list[BlockKey]) -> None:
        elsewhere = {*ticket.missing, *ticket.files}
        assert list(ticket.keys) == [key for key in asked if key not in elsewhere]
        assert elsewhere.union(ticket.keys) == set(asked)
        assert not ticket.files.keys() & set(ticket.missing)
        assert set(ticket.keys) == {*ticket.pinned, *ticket.pending}
        self.tickets.append(ticket)
        if ticket.pending:
            self.unreported.append(ticket)

    @precondition(lambda self: self.tickets)
    @step(which=number, fails=st.one_of(st.just({}), bad_keys))
    def end(self, which: int, fails: dict[BlockKey, Outcome]) -> None:
        ended = self.tickets.pop(which % len(self.tickets))
        read = {*ended.keys, *ended.files}
        self.chain.end_load(ended, {k: o for k, o in fails.items() if k in read})
        self.unreported = [ticket for ticket in self.unreported if ticket is not ended]

    @step(able=st.booleans())
    def say_whether_files_can_be_read(self, able: bool) -> None:
        self.chain.read_directly(able)

    @step(everything=st.sampled_from([False, False, True]), keys=some_keys)
    def lose(self, everything: bool, keys: list[BlockKey]) -> None:
        if everything:
            self.chain.clear()
            self.dead = set(UNIVERSE)
        else:
            self.chain.forget(keys)
            # What the engine itself is storing is not resident yet, and will be.
            self.dead |= set(keys) - {key for one in self.storing for key in one.keys}

    # requests that wait in the engine's queue

    @step(keys=some_keys, request=st.sampled_from(QUEUED))
    def wait_in_the_queue(self, keys: list[BlockKey], request: str) -> None:
        self.chain.prefetches.want(request, keys)
        before = self.rig.resident(0, UNIVERSE)
        pinned = {key for ticket in self.tickets for key in ticket.pinned}
        self.chain.prefetches.begin(request)
        gone = set(before) - set(self.rig.resident(0, UNIVERSE))
        assert not gone & pinned
        assert not gone & self.chain.prefetches._wanted.keys()

    @step(request=st.sampled_from(QUEUED))
    def go_on_with(self, request: str) -> None:
        self.chain.prefetches.begin(request)

    @step(request=st.sampled_from(QUEUED), how=st.sampled_from(["served", "aborted", "too slow"]))
    def leave_the_queue(self, request: str, how: str) -> None:
        if how == "too slow":
            self.chain.prefetches.stop(request)
        else:
            self.chain.prefetches.end(request, served=how == "served")

    @step(keys=asked_keys)
    def lack_room(self, keys: list[BlockKey]) -> None:
        self.chain.match_prefix(list(dict.fromkeys(keys)), 16)
        self.poll()  # what was promised holds until then, also against who looks up

    # what is to be kept

    @step(
        keys=some_keys,
        session=st.sampled_from(SESSIONS),
        seconds=st.sampled_from([None, 1.0, 20.0]),
    )
    def retain(self, keys: list[BlockKey], session: str, seconds: float | None) -> None:
        refused = self.chain.retention.retain(keys, session, seconds)
        assert all(0 <= count <= len(keys) for count in refused)

    @step(keys=some_keys, session=st.sampled_from(SESSIONS), all=st.booleans())
    def release(self, keys: list[BlockKey], session: str, all: bool) -> None:
        self.chain.retention.release(session, keys, all=all)

    @step(tier=st.sampled_from([0, 1, 2]), count=st.integers(1, 4))
    def look_at_what_goes(self, tier: int, count: int) -> None:
        one = self.rig.tiers[tier]
        doomed = one.victims(count)
        spared = [key for key in one.victims(len(UNIVERSE)) if key not in doomed]
        if any(key in one.retained for key in doomed):
            assert all(key in one.retained for key in spared), "others go first"

    # the mover, and time

    @step(down=st.booleans())
    def end_or_begin_again(self, down: bool) -> None:
        if down:
            self.rig.mover.fail_all(Outcome.DROPPED)
        self.rig.mover.down = down
        self.poll()

    @precondition(lambda self: self.rig.mover.queue)
    @step(which=number, fails=st.one_of(st.just({}), bad_keys))
    def carry_out(self, which: int, fails: dict[BlockKey, Outcome]) -> None:
        queue = self.rig.mover.queue
        self.rig.mover.run(queue[which % len(queue)], fails)

    @precondition(lambda self: self.rig.mover.queue)
    @step(bad=st.sampled_from([Outcome.OK, Outcome.OK, *Outcome]))
    def carry_out_all(self, bad: Outcome) -> None:
        self.rig.mover.run_all({} if bad.ok else dict.fromkeys(UNIVERSE, bad))
        self.poll()

    @step()
    def poll(self) -> None:
        ended = self.chain.poll()
        for ticket in ended:
            assert ticket.landed
            if ticket in self.tickets:
                assert set(ticket.keys) == {*ticket.pinned, *ticket.failed}
                self.unreported.remove(ticket)
        assert not any(ticket.landed for ticket in self.unreported), "a ticket was not handed out"

    @step(seconds=st.sampled_from([0.5, 6.0, 11.0, 61.0, 10 * REST]), press=st.integers(0, 4))
    def wait(self, seconds: float, press: int) -> None:
        self.rig.now += seconds
        self.rig.mover.accepting = press > 0
        self.poll()

    @step(used=st.sets(st.sampled_from(UNIVERSE)))
    def die_and_live_on(self, used: set[BlockKey]) -> None:
        self.rig.restart()
        self.chain = self.rig.chain
        for tier in self.rig.tiers:
            tier.used = used
            there = self.rig.resident(self.rig.tiers.index(tier), UNIVERSE)
            self.visible[tier.medium] = set(there)
        self.storing, self.tickets, self.unreported = [], [], []

    # what always holds

    @invariant()
    def every_block_stands_where_its_ticket_says(self) -> None:
        for ticket in self.tickets:
            owners = self.rig.tiers[0].store.owners
            for at, key in enumerate(ticket.keys):
                spec = ticket.spec.select(at, at + 1)
                if key in ticket.pinned:
                    self.rig.check([key], spec)
                else:  # its reader may be looking there, whatever has become of the block
                    assert owners[spec.slots[0]] == key

    @invariant()
    def every_record_lies_in_the_file_that_its_ticket_names(self) -> None:
        for ticket in self.tickets:
            for tier, keys in ticket.pinned_files:
                for key in keys:
                    slot = ticket.files[key].at
                    assert self.rig.tiers[tier].store.owners[slot] == key
                    assert prove(self.rig.tiers[tier].store.record(slot), key).ok

    @invariant()
    def no_slot_of_a_transfer_is_used_for_anything_else(self) -> None:
        for transfer in self.rig.mover.queue:
            for tier, spec in (
                (transfer.source, transfer.source_spec),
                (transfer.target, transfer.target_spec),
            ):
                owners = self.rig.tiers[tier].store.owners
                assert [owners[slot] for slot in spec.slots] == list(transfer.keys)

    @invariant()
    def events_tell_what_is_there(self) -> None:
        for event in [event for tier in self.rig.tiers for event in tier.take_events()]:
            there = self.visible[event.medium]
            if event.kind is EventKind.STORED:
                there.update(event.keys)
            else:
                there.difference_update(event.keys)
        for index, tier in enumerate(self.rig.tiers):
            assert set(self.rig.resident(index, UNIVERSE)) == self.visible[tier.medium]

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for link in self.chain.chain_stats().links:
            assert link.waiting <= 5
            assert 0 <= link.in_flight <= 5

    @invariant()
    def what_is_prefetched_is_bounded(self) -> None:
        prefetches = self.chain.prefetches
        assert sum(prefetches._in_flight) + len(prefetches._unused) <= SLOTS[0] // 2
        assert prefetches._in_flight[0] == 0
        assert min(self.chain._ledger.loading) >= 0

    @invariant()
    def what_is_retained_is_bounded(self) -> None:
        for tier, slots in zip(self.rig.tiers, SLOTS, strict=True):
            known = tier.retained
            assert len(known) <= max(1, slots // 2)
            held = [key for mine in known._sessions.values() for key in mine]
            assert {key: held.count(key) for key in held} == known._held
            assert all(known._sessions.values())
            assert tier._released <= tier._resident.keys()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for request in QUEUED:
            self.chain.prefetches.end(request, served=False)
        self.rig.mover.accepting, self.rig.mover.down = True, False
        for ticket in self.tickets:
            self.chain.end_load(ticket)
        self.tickets, self.unreported = [], []
        while self.storing:
            self.commit(0, {})
        self.poll()
        self.rig.settle(30)
        self.rig.now += 10 * REST + PAUSE_MAX_S  # what rests, or is tried again after a pause
        self.rig.settle(30)
        self.rig.now += LONGEST_S
        self.rig.settle(2)
        assert not self.chain.has_pending_work
        self.rig.now += RetainSettings().max_ttl.seconds
        self.poll()
        assert [tier.stats().retained for tier in self.rig.tiers] == [0] * len(SLOTS)
        prefetches = self.chain.prefetches
        assert not prefetches._moves
        assert not prefetches._wanted
        assert not prefetches._unused
        assert not prefetches._joined
        assert prefetches._bytes == [0] * len(SLOTS)
        counted = prefetches.counted()
        for arrived, used, wasted in zip(
            counted.arrived, counted.used, counted.wasted, strict=True
        ):
            assert used + wasted <= arrived
        assert [link.behind for link in self.chain.chain_stats().links if link.behind] == []
        self.rig.assert_quiet()
        assert is_quiet(self.chain._ledger)
        self.events_tell_what_is_there()


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=50,
    )


class TestChain(ChainMachine.TestCase):  # type: ignore[misc]
    settings = examples(60)


@pytest.mark.slow
class TestChainForLonger(ChainMachine.TestCase):  # type: ignore[misc]
    settings = examples(600)
