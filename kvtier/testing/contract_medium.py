"""The part of the contract that is about bytes: handlers, transfers, inspectors."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.errors import ConfigError, Unsupported
from kvtier.inspect import Block, Depth, Inspector, InspectorContext, Proof
from kvtier.interfaces.handler import HostHandler
from kvtier.record.record import ALIGN, HEADER_BYTES, record_bytes
from kvtier.settings import ByteSize, Capacity, dec_hook, enc_hook
from kvtier.testing.faults import Call, FaultyDisk
from kvtier.testing.subject import (
    GROUPED,
    LARGE,
    NAMESPACE,
    Rig,
    Subject,
    blank,
    failures,
    fill,
    load_elsewhere,
    make_keys,
    prove,
    sealed,
)
from kvtier.types import BlockKey, EventKind, Outcome

BLOCKS = 8
CLOSED_S = 30.0
"""How long what a tier has closed may take to be closed."""


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
        # Connections are kept for later calls, and one more is made whenever all are busy; what a
        # transfer leaves open adds up, at least one a round.
        assert opened[-1] < opened[10] + len(opened[10:]) - 1, f"files stay open: {opened}"

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
        for folder, folders, files in os.walk(rig.folder):
            for path in [Path(folder, name) for name in (*folders, *files)]:
                with suppress(FileNotFoundError):  # whose keeper goes on working
                    assert path.stat().st_mode & 0o077 == 0, path


def follow(rig: Rig, visible: set[BlockKey]) -> None:
    """Replay events: the set of visible keys follows from them alone."""
    for event in rig.tier.take_events():
        if event.kind is EventKind.STORED:
            visible.update(event.keys)
        else:
            visible.difference_update(event.keys)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def address(view: memoryview) -> int:
    """Where a writable buffer begins in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


# What a handler owes its callers: threads of the mover, and buffers that are host memory.


class TransferContract:
    """Calls of a handler, many at once and one after the other."""

    subject: Subject

    def test_transfers_run_in_many_threads(self, rig: Rig) -> None:
        keys = make_keys(BLOCKS)
        places = rig.reserve(keys).spec

        def store(place: int) -> list[Outcome]:
            record = sealed(keys[place])
            return rig.handler.store(places.select(place, place + 1), [keys[place]], [record])

        def load(index: int) -> Outcome:
            record, place = blank(), index % BLOCKS
            [outcome] = rig.handler.load(spec.select(place, place + 1), [keys[place]], [record])
            return prove(record, keys[place]) if outcome.ok else outcome

        with ThreadPoolExecutor(rig.handler.concurrency) as threads:
            assert list(threads.map(store, range(BLOCKS))) == [[Outcome.OK]] * BLOCKS
            rig.tier.complete_store(keys)
            spec = rig.tier.prepare_load(keys)
            assert set(threads.map(load, range(8 * BLOCKS))) == {Outcome.OK}
        rig.tier.complete_load(keys)

    def test_a_store_has_ended_when_it_says_so(self, rig: Rig) -> None:
        """Its buffers are host memory, which others read meanwhile, and write to afterwards."""
        keys = make_keys(BLOCKS)
        reservation = rig.reserve(keys)
        records = [sealed(key) for key in keys]
        rig.transfer(keys, reservation.spec, records, loading=False)
        assert records == [sealed(key) for key in keys], "a handler changes what it stores"
        for record in records:
            record[:] = bytes(len(record))
        rig.tier.complete_store(keys)
        assert rig.get(keys) == keys

    def test_a_large_record_comes_back_whole(self, tmp_path: Path) -> None:
        """As that of most models is: no socket takes or gives it in one piece."""
        rig = Rig(self.subject, tmp_path, blocks=2, namespace=LARGE)
        keys = make_keys(1)
        assert rig.put(keys) == rig.get(keys) == keys
        rig.close()

    def test_what_is_closed_holds_nothing(self, rig: Rig) -> None:
        held = []
        for start in range(0, 10 * BLOCKS, BLOCKS):
            rig.get(rig.put(make_keys(BLOCKS, start=start)))
            rig.close()
            held.append((_open_files(), threading.active_count()))
            # What is opened once for all later ones is open by the third round; connections may
            # still be closed by a thread of their own.
            end = time.monotonic() + CLOSED_S
            base = held[min(2, len(held) - 1)]
            while time.monotonic() < end and (
                held[-1][0] >= base[0] + 4 or held[-1][1] >= base[1] + 4
            ):
                held[-1] = _open_files(), threading.active_count()
            rig.open()
        assert held[-1][0] < held[2][0] + 4, f"files stay open: {held}"
        assert held[-1][1] < held[2][1] + 4, f"threads stay alive: {held}"

    def test_another_process_finds_the_medium(self, rig: Rig) -> None:
        """When an engine serves, handlers are opened in that of the mover."""
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(1))
        spec = rig.tier.prepare_load(keys)
        rig.handler.close()  # there is one at a time
        assert load_elsewhere(rig.settings, rig.context, spec, keys) == [Outcome.OK]
        rig.handler = self.subject.open_handler(rig.settings, rig.context, rig.disk)
        rig.tier.complete_load(keys)


# What an inspector promises: it finds what a tier has committed, and changes only what it is asked
# to change. What a kind cannot do is said in a typed error.


class InspectionContract:
    """The `Inspector`, beside a tier that is open and after it was closed."""

    subject: Subject

    @pytest.fixture
    def kept(self, rig: Rig) -> list[BlockKey]:
        """Blocks that are committed, of a tier that is open."""
        keys = rig.put(make_keys(5))
        assert keys
        rig.settle()
        return keys

    def test_before_the_medium_is_made_nothing_is_there(self, tmp_path: Path) -> None:
        size = record_bytes(NAMESPACE.payload_bytes)
        settings = self.subject.settings(tmp_path, BLOCKS, size)
        found = self.subject.backend.open_inspector(settings, InspectorContext(tier=1)).look()
        assert found.parts == []
        assert list(tmp_path.iterdir()) == []

    def test_a_look_finds_what_is_committed(self, rig: Rig, kept: list[BlockKey]) -> None:
        inspector = opened(rig)
        if sees(inspector):
            (part,) = inspector.contents.parts
            assert (part.kind, part.namespace) == (rig.backend.kind, NAMESPACE.id)
            assert part.blocks == len(kept)
            assert part.bytes <= inspector.contents.used
            assert part.newest is not None
            assert not inspector.contents.troubles
            assert sorted(block.key for block in inspector.blocks()) == sorted(kept)
            names = opened(rig)
            names.look(Depth.NAMES)
            assert [each.namespace for each in names.contents.parts] == [NAMESPACE.id]

    def test_blocks_are_listed_by_namespace_and_by_key(
        self, rig: Rig, kept: list[BlockKey]
    ) -> None:
        inspector = opened(rig)
        if sees(inspector):
            assert list(inspector.blocks("f" * 32)) == []
            digits = kept[0].hex()[:12]
            found = {block.key for block in inspector.blocks(NAMESPACE.id[:6], [digits])}
            assert kept[0] in found

    def test_looking_changes_nothing(self, rig: Rig, kept: list[BlockKey]) -> None:
        def files() -> dict[str, tuple[int, int]]:
            found = (path for path in rig.folder.rglob("*") if path.is_file())
            status = {str(path): path.lstat() for path in found}
            return {name: (each.st_mtime_ns, each.st_size) for name, each in status.items()}

        rig.close()
        before = files()
        inspector = opened(rig)
        if sees(inspector):
            list(inspector.blocks())
            assert proofs(inspector) == {Proof.GOOD}
            supported(lambda: list(inspector.garbage(None)))
            list(inspector.checks())
        assert files() == before
        rig.open()

    def test_every_record_is_proved(self, rig: Rig, kept: list[BlockKey]) -> None:
        """While its engine runs, too."""
        inspector = opened(rig)
        if sees(inspector):
            assert proofs(inspector) == {Proof.GOOD}

    def test_damage_is_found_and_taken_out_of_use(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        if sees(inspector) and damage(self.subject.block_files(rig.folder)):
            bad = [block for block, proof in proved(inspector) if proof is Proof.BAD]
            assert bad
            homes = {inspector.home_of(block) for block in bad}
            for home in homes:
                some = [block for block in bad if inspector.home_of(block) == home]
                taken = supported(partial(inspector.quarantine, some))
                assert taken in (None, len(some))
            if taken is not None:
                inspector.look()
                left = [block for block in inspector.blocks() if not block.quarantined]
                assert not {block.key for block in left} & {block.key for block in bad}
        rig.open()
        rig.get(kept)  # none of them is served wrong

    def test_what_is_tidy_has_no_garbage(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        if sees(inspector):
            assert supported(lambda: list(inspector.garbage(None))) in ([], None)
        rig.open()

    def test_what_is_cleared_is_gone(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        cleared = None
        if sees(inspector):
            (part,) = inspector.contents.parts
            cleared = supported(lambda: list(inspector.clear(part)))
        if cleared is not None:
            assert [each.kept for each in cleared] == [""]
            assert sum(each.blocks for each in cleared) == len(kept)
            assert not sum(part.blocks for part in inspector.look().parts)
        rig.open()
        if cleared is not None:
            assert rig.resident(kept) == []

    def test_a_copy_reads_what_is_there(self, rig: Rig, kept: list[BlockKey]) -> None:
        rig.close()
        inspector = opened(rig)
        inspector.look(Depth.RECORDED)
        found: dict[BlockKey, bool] = {}
        for source in [] if inspector.contents.unseen else inspector.sources(NAMESPACE.id):
            source.open(NAMESPACE)
            for row in source.rows():
                key = BlockKey(row["key"].tobytes()[: row["key_bytes"]])
                buffer = blank()
                (outcome,) = source.read([int(row["at"])], [key], [buffer])
                found[key] = outcome.ok and prove(buffer, key).ok
            source.close()
        assert found in ({}, dict.fromkeys(kept, True))
        assert inspector.contents.unseen or found
        rig.open()

    def test_a_copy_fills_it(self, rig: Rig) -> None:
        rig.close()
        filling = opened(rig).filling()
        keys = make_keys(3)
        if filling.keeps() and self.subject.persistent:
            with filling.alone():
                filling.check(NAMESPACE)
                rig.tier, rig.handler = filling.open(NAMESPACE)
                stored = rig.put(keys)
                rig.settle()
                filling.carry_uses(rig.tier, NAMESPACE, {keys[0]: (3, 1.0)})
                rig.close()
            assert stored == keys
            written = filling.audit(NAMESPACE)
            if written is not None:
                written.add(keys)
                assert written.missing() == 0
            inspector = opened(rig)
            if sees(inspector):
                assert {block.key for block in inspector.blocks()} == set(keys)
        rig.open()

    def test_what_is_measured_lies_elsewhere(self, rig: Rig, kept: list[BlockKey]) -> None:
        inspector = opened(rig)
        place = supported(lambda: inspector.measuring_place(1 << 20))
        if place is not None:
            with place as settings:
                own, other = (rig.backend.identity(each) for each in (rig.settings, settings))
                assert own != other or rig.backend.host  # which carries the name of an engine
        assert rig.get(kept) == kept


def opened(rig: Rig) -> Inspector[Any]:
    """The inspector of a rig's tier, as that of the first tier of a stack that can be it."""
    context = InspectorContext(tier=0 if rig.backend.host else 1, engine=rig.context.stack)
    return rig.backend.open_inspector(rig.settings, context)


def sees(inspector: Inspector[Any]) -> bool:
    """Look, and say whether this kind can be looked at."""
    return not inspector.look().unseen


def supported(call: Callable[[], Any]) -> Any:
    """What it answers; None if the kind says that it cannot do that."""
    with suppress(Unsupported):
        return call()
    return None


def proved(inspector: Inspector[Any]) -> Iterator[tuple[Block, Proof]]:
    """Every block that is listed, with what its record is worth."""
    prover = inspector.prover(inspector.contents.namespaces)
    try:
        for block in list(inspector.blocks()):
            yield block, prover.prove(block).proof
    finally:
        prover.close()


def proofs(inspector: Inspector[Any]) -> set[Proof]:
    """What all records are worth."""
    return {proof for _, proof in proved(inspector)}


def damage(files: list[Path]) -> bool:
    """Flip a bit in the middle of each; whether there is any."""
    for path in files:
        with path.open("r+b") as file:
            at = os.fstat(file.fileno()).st_size // 2
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    return bool(files)
