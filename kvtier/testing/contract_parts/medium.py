"""The half of the contract that concerns bytes: transfers, outcomes, and room."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtier.core.interfaces.handler import HostHandler
from kvtier.core.records.record import ALIGN, HEADER_BYTES, record_bytes
from kvtier.core.settings import ByteSize, Capacity
from kvtier.core.settings.values import dec_hook, enc_hook
from kvtier.errors import ConfigError
from kvtier.testing.faults import Call, FaultyDisk
from kvtier.testing.records import GROUPED, NAMESPACE, blank, fill, make_keys, prove, sealed
from kvtier.testing.subject import Rig, Subject, failures
from kvtier.types import BlockKey, EventKind, Outcome

BLOCKS = 8


class MediumContract:
    """The `Handler` half, the backend's door, and what happens to bytes over time."""

    subject: Subject

    @pytest.fixture
    def grouped(self, tmp_path: Path) -> Iterator[Rig]:
        rig = Rig(self.subject, tmp_path, blocks=BLOCKS, namespace=GROUPED)
        yield rig
        rig.close()

    # the door

    def test_the_backend_speaks_for_its_settings(self, rig: Rig) -> None:
        backend, settings = rig.backend, rig.settings
        assert backend.kind == settings.kind
        assert type(settings) is backend.settings
        assert isinstance(rig.tier.prepare_load([]), backend.spec)
        assert isinstance(rig.handler, HostHandler) is backend.host
        one = record_bytes(NAMESPACE.payload_bytes)
        backend.check(settings, one)
        backend.check(settings, None)
        tiny = msgspec.structs.replace(settings, capacity=Capacity(size=ByteSize(one - 1)))
        with pytest.raises(ConfigError) as caught:
            backend.check(tiny, one)
        assert caught.value.place == ".capacity"

    def test_settings_survive_a_file(self, rig: Rig) -> None:
        written = msgspec.json.encode(rig.settings, enc_hook=enc_hook)
        read = msgspec.json.decode(written, type=type(rig.settings), dec_hook=dec_hook)
        assert read == rig.settings

    def test_specs_cross_processes(self, rig: Rig) -> None:
        keys = rig.put(make_keys(5))
        spec = rig.tier.prepare_load(keys)
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=rig.backend.spec)
        assert len(there) == 5
        part = there.select(1, 4)
        assert len(part) == 3
        assert len(there.select(2, 2)) == 0
        assert rig.read(keys[1:4], part) == dict.fromkeys(keys[1:4], Outcome.OK)
        turned = type(there).join([there.select(3, 5), there.select(0, 3)])
        assert set(rig.read(keys[3:] + keys[:3], turned).values()) == {Outcome.OK}
        rig.tier.complete_load(keys)

    # transfers

    def test_records_of_every_group_come_back_whole(self, grouped: Rig) -> None:
        keys = [make_keys(1, start=10 + group, group=group)[0] for group in range(6)]
        assert grouped.put(keys) == keys
        assert grouped.get(keys) == keys
        assert grouped.get(keys[::-1]) == keys[::-1]

    def test_one_hash_in_two_groups_is_two_blocks(self, grouped: Rig) -> None:
        keys = [make_keys(1, group=group)[0] for group in range(4)]
        grouped.put(keys[:2])
        assert grouped.resident(keys) == keys[:2]
        assert grouped.get(keys) == keys[:2]

    def test_the_header_arrives_as_it_was_sealed(self, grouped: Rig) -> None:
        (key,) = grouped.put(make_keys(1))
        record, sent = blank(GROUPED), sealed(key, GROUPED)
        outcomes = grouped.handler.load(grouped.tier.prepare_load([key]), [key], [record])
        assert outcomes == [Outcome.OK]
        length = HEADER_BYTES + GROUPED.payload_of(key)
        assert record[:length] == sent[:length]
        grouped.tier.complete_load([key])

    def test_files_hold_what_they_are_said_to(self, grouped: Rig) -> None:
        keys = grouped.put([make_keys(1, start=group, group=group)[0] for group in range(4)])
        places = grouped.tier.files(grouped.tier.prepare_load(keys))
        assert len(places) == (len(keys) if grouped.tier.in_files else 0)
        for key, place in zip(keys, places, strict=False):
            record = blank(GROUPED)
            with open(place.path, "rb") as file:
                file.seek(place.at)
                assert file.readinto(record) > 0
            assert prove(record, key, GROUPED) is Outcome.OK
        assert bool(places) == (grouped.backend.folder(grouped.settings) is not None)
        grouped.tier.complete_load(keys)

    def test_a_damaged_record_is_never_served(self, rig: Rig) -> None:
        keys = make_keys(4)
        reservation = rig.reserve(keys)
        records = [sealed(key) for key in keys]
        records[1][HEADER_BYTES + 17] ^= 1  # a flip in the payload
        records[2][30] ^= 1  # one in the header
        records[3][:] = records[0]  # another key's record
        rig.transfer(keys, reservation.spec, records, loading=False)
        rig.tier.complete_store(keys)
        assert rig.get(keys) == keys[:1]
        assert rig.resident(keys) == keys[:1]
        assert rig.tier.stats().corrupt == 3
        rig.settle()
        assert rig.put(keys) == keys[1:]
        assert rig.get(keys) == keys

    def test_an_outdated_spec_serves_no_other_block(self, rig: Rig) -> None:
        old = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(old)
        rig.tier.complete_load(old)
        rig.put(make_keys(BLOCKS, start=100))
        for outcome in rig.read(old, spec).values():  # which proves whatever is OK
            assert outcome in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT)

    def test_what_is_gone_is_a_miss_and_raises_nothing(self, rig: Rig) -> None:
        keys = rig.put(make_keys(4))
        spec = rig.tier.prepare_load(keys)
        rig.tier.complete_load(keys)
        rig.tier.forget(keys)
        rig.settle()
        never = rig.reserve(make_keys(2, start=50))  # of which not one byte arrives
        for some, where in ((keys, spec), (never.keys, never.spec)):
            for outcome in rig.read(some, where).values():
                assert outcome in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT)
        rig.tier.complete_store(never.keys, failures(never.keys, Outcome.CANCELLED))

    def test_an_overwritten_slot_holds_nothing_of_the_past(self, grouped: Rig) -> None:
        for group in (3, 0, 1, 2):
            keys = make_keys(BLOCKS, start=100 * group, group=group)
            assert grouped.put(keys) == keys
            assert grouped.get(keys) == keys

    def test_transfers_leave_no_file_open(self, rig: Rig) -> None:
        opened = []
        for start in range(0, 30 * BLOCKS, BLOCKS):
            keys = make_keys(BLOCKS, start=start)
            assert rig.put(keys) == rig.get(keys) == keys
            opened.append(len(list(Path("/proc/self/fd").iterdir())))
        # What is kept for later calls is open by the tenth round.
        assert opened[-1] < opened[10] + 10, f"files stay open: {opened}"

    # host media

    def test_views_are_the_records_in_place(self, rig: Rig) -> None:
        handler = rig.handler
        if not isinstance(handler, HostHandler):
            return  # only host memory can be looked at in place
        keys = make_keys(4)
        reservation = rig.reserve(keys)
        views = handler.views(reservation.spec)
        for index, (key, view) in enumerate(zip(keys, views, strict=True)):
            assert len(view) >= record_bytes(NAMESPACE.payload_of(key))
            assert address(view) % ALIGN == 0
            fill(view, key)
            handler.landed(reservation.spec, index, Outcome.OK)
        rig.tier.complete_store(keys)
        assert rig.get(keys) == keys
        spec = rig.tier.prepare_load(keys)
        for key, view in zip(keys, handler.views(spec), strict=True):
            assert prove(view, key) is Outcome.OK
        rig.tier.complete_load(keys)

    def test_a_block_that_never_lands_is_aborted(self, rig: Rig) -> None:
        handler = rig.handler
        if not isinstance(handler, HostHandler):
            return
        keys = make_keys(3)
        reservation = rig.reserve(keys)
        for index in range(3):
            handler.landed(reservation.spec, index, Outcome.IO_ERROR)
        rig.tier.complete_store(keys, failures(keys, Outcome.IO_ERROR))
        assert rig.resident(keys) == []
        assert rig.put(keys) == keys
        assert rig.get(keys) == keys

    # room, at every moment

    def test_a_long_walk_keeps_every_promise(self, rig: Rig) -> None:
        dice = random.Random(7)
        universe = make_keys(4 * BLOCKS)
        visible: set[BlockKey] = set()
        before = rig.tier.stats()
        for _ in range(300):
            some = dice.sample(universe, dice.randint(1, BLOCKS))
            step = dice.random()
            if step < 0.5:
                rig.put(some, evict=dice.random() < 0.8)
            elif step < 0.8:
                assert rig.get(some) == rig.resident(some)
            elif step < 0.9:
                rig.tier.touch(some, start=dice.randint(0, 5))
            elif step < 0.95:
                rig.tier.forget(some)
            else:
                reserved = rig.reserve(some)
                rig.tier.complete_store(reserved.keys, failures(reserved.keys, Outcome.TIMEOUT))
            rig.tier.tick()
            rig.check_room()
            stats = rig.tier.stats()
            for counter in ("stored", "evicted", "dropped"):
                assert getattr(stats, counter) >= getattr(before, counter)
            before = stats
            follow(rig, visible)
            assert visible == set(rig.resident(universe))

    def test_the_catalogue_answers_from_memory(self, tmp_path: Path) -> None:
        """A scheduler's thread calls it: the disk is touched by other threads or not at all."""
        if not self.subject.off_disk:
            return
        disk = FaultyDisk()
        rig = Rig(self.subject, tmp_path, blocks=BLOCKS, disk=disk)
        scheduler, busy = threading.get_ident(), False

        def plan(call: Call) -> None:
            assert not (busy and threading.get_ident() == scheduler), f"{call.name} in the tier"

        disk.plan = plan
        for start in range(0, 5 * BLOCKS, BLOCKS):
            keys = make_keys(BLOCKS, start=start)
            busy = True
            rig.tier.lookup(keys)
            reservation = rig.tier.prepare_store(keys)
            busy = False
            failed = rig.write(reservation)
            busy = True
            rig.tier.complete_store(reservation.keys, failed)
            rig.tier.touch(keys)
            hits = rig.resident(keys)
            rig.tier.prepare_load(hits)
            rig.tier.complete_load(hits, failures(hits[:1], Outcome.IO_ERROR))
            rig.tier.forget(hits[1:2])
            rig.tier.victims(3)
            rig.tier.take_events()
            rig.tier.stats()
            rig.tier.tick()
            busy = False
        busy = True
        rig.tier.clear()
        busy = False
        rig.close()

    def test_nobody_else_may_read_or_write(self, rig: Rig) -> None:
        rig.put(make_keys(BLOCKS))
        for path in rig.folder.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path


def follow(rig: Rig, visible: set[BlockKey]) -> None:
    """Replay events: the set of visible keys follows from them alone."""
    for event in rig.tier.take_events():
        if event.kind is EventKind.STORED:
            visible.update(event.keys)
        else:
            visible.difference_update(event.keys)


def address(view: memoryview) -> int:
    """Where a writable buffer begins in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
