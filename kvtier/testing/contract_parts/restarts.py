"""What happens to blocks over time: restarts of an engine, and other engines beside it."""

from __future__ import annotations

from kvtier.testing.records import GROUPED, make_keys
from kvtier.testing.subject import Rig, Subject, failures
from kvtier.types import BlockKey, Outcome

BLOCKS = 8


class RestartContract:
    """What outlives a process, and what engines see of each other."""

    subject: Subject

    def test_a_restart_serves_what_was_committed_and_nothing_else(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        landed = make_keys(2, start=50)
        rig.write(rig.reserve(landed))
        rig.reserve(make_keys(1, start=60))  # of which not one byte arrives
        aborted = rig.reserve(make_keys(1, start=70)).keys
        rig.tier.complete_store(aborted, failures(aborted, Outcome.IO_ERROR))
        rig.tier.forget(keys[3:])
        rig.reopen()
        here = keys[:3] + (landed if self.subject.revives else [])
        assert rig.resident(make_keys(100)) == here
        assert rig.get(here) == here
        assert rig.tier.stats().blocks == len(here)
        rig.check_room()
        rig.tier.forget(landed)
        rig.settle()
        new = make_keys(BLOCKS - 3, start=49)  # among them what was reserved then
        assert rig.put(new, evict=False) == new
        assert rig.put(make_keys(1, start=300), evict=False) == []
        assert rig.get(keys + new) == keys[:3] + new

    def test_what_outlived_a_process_is_told_once_if_at_all(self, rig: Rig) -> None:
        keys = rig.put(make_keys(4))
        rig.tier.forget(keys[3:])
        rig.tier.flush()
        rig.reopen()
        told: list[BlockKey] = []
        while left := rig.tier.recovered:
            some, uses = rig.tier.take_recovered(2)
            assert len(some) == len(uses) <= 2
            assert rig.tier.recovered < left, "it would be asked for ever"
            told += some
        assert sorted(told) in ([], sorted(keys[:3]))
        hottest: list[BlockKey] = []
        while some := rig.tier.take_hottest(2):
            assert len(some) <= 2
            hottest += some
        assert hottest in ([], told), "both are told in one order"
        rig.tier.forget_hottest()
        assert list(rig.tier.take_hottest(1)) == []

    def test_what_was_dropped_while_it_was_read_stays_dropped(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        rig.tier.prepare_load(keys)
        rig.tier.forget(keys[:1])
        rig.tier.prepare_load(keys[1:2])
        rig.tier.complete_load(keys[1:2], failures(keys[1:2], Outcome.IO_ERROR))
        rig.tier.flush()
        rig.reopen()  # with pins, which go with the process that held them
        assert rig.get(keys) == keys[2:]

    def test_what_was_cleared_stays_away(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        rig.tier.prepare_load(keys[:1])
        landed = rig.reserve(make_keys(2, start=50))
        rig.write(landed)
        rig.tier.clear()
        rig.tier.flush()
        rig.reopen()
        may_revive = landed.keys if self.subject.revives else []
        assert set(rig.resident(make_keys(100))) <= set(may_revive)

    def test_a_smaller_capacity_holds_after_a_restart(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        rig.close()
        smaller = Rig(self.subject, rig.folder, blocks=3)
        smaller.settle()
        for _ in range(10):
            assert smaller.get(keys) == smaller.resident(keys)
            smaller.check_room()
            assert len(smaller.put(make_keys(5, start=100))) <= 3
            smaller.tier.tick()
        smaller.close()
        rig.open()

    def test_another_namespace_sees_nothing(self, rig: Rig) -> None:
        keys = rig.put(make_keys(3))
        rig.close()
        other = Rig(self.subject, rig.folder, blocks=BLOCKS, namespace=GROUPED)
        assert other.resident(keys) == []
        assert other.get(keys) == []
        other.close()
        rig.open()  # the other one may have needed the room
        assert rig.get(keys) == rig.resident(keys)

    def test_engines_find_what_others_commit(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        keys = rig.put(make_keys(5))
        peer.tier.refresh()
        assert peer.get(keys) == keys
        more = peer.put(make_keys(3, start=50))
        rig.tier.refresh()
        assert rig.get(more) == more
        assert rig.put(more) == []
        peer.close()
        rig.tier.refresh()
        assert rig.get(keys + more) == keys + more

    def test_engines_stop_finding_what_others_drop(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        keys = rig.put(make_keys(5))
        peer.tier.refresh()
        rig.tier.forget(keys[:2])
        rig.tier.flush()
        peer.tier.refresh()
        assert peer.get(keys) == keys[2:]
        peer.close()

    def test_engines_share_one_budget(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        for start in range(0, 10 * BLOCKS, BLOCKS):
            for one in (rig, peer):
                one.put(make_keys(BLOCKS, start=start))
                one.tier.tick()
            rig.check_room()
        peer.close()
