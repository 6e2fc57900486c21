"""A tier under the faults of `kvtier.testing.faults`: subclass `TierFaults` with your subject.

Right bytes or a miss, at every moment; nothing raises; and full service when the faults end.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import MediumError
from kvtier.testing.faults import Call, Fault, FaultyDisk, Plan, never, scripted, seeded
from kvtier.testing.records import make_keys
from kvtier.testing.subject import Rig, Subject, failures
from kvtier.types import Outcome

BLOCKS = 6
SURVIVABLE = tuple(fault for fault in Fault if fault is not Fault.DEATH)
SEEDS = range(5)


def remove(path: Path) -> None:
    """Somebody cleans up."""
    path.unlink()


def empty(path: Path) -> None:
    """A file system forgot the data of a file that was not synced."""
    os.truncate(path, 0)


def cut(path: Path) -> None:
    """... or the second half of it."""
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    """Something else entirely lies there."""
    path.write_bytes(b"\xa5" * path.stat().st_size)


DAMAGES = (remove, empty, cut, overwrite)


class TierFaults:
    """For tiers whose files are reached through a `Disk`."""

    subject: Subject

    def rig(self, folder: Path, disk: FaultyDisk) -> Rig:
        """A tier that was opened while all was well."""
        return Rig(self.subject, folder, blocks=BLOCKS, disk=disk)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("fault", [*SURVIVABLE, None], ids=lambda f: f.value if f else "all")
    def test_right_bytes_or_a_miss(self, tmp_path: Path, fault: Fault | None, seed: int) -> None:
        disk = FaultyDisk(seed=seed)
        rig = self.rig(tmp_path, disk)
        disk.plan = seeded(seed, 0.25, [fault] if fault else SURVIVABLE)
        walk(rig, random.Random(seed), steps=60)
        assert disk.happened
        disk.plan = never
        self.check_full_service(rig)
        rig.close()

    @pytest.mark.parametrize("fault", SURVIVABLE, ids=lambda f: f.value)
    def test_a_medium_that_always_fails_is_a_tier_that_misses(
        self, tmp_path: Path, fault: Fault
    ) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        disk.plan = lambda call: fault
        walk(rig, random.Random(1), steps=30)
        disk.plan = never
        self.check_full_service(rig)
        rig.close()

    @pytest.mark.parametrize("fault", SURVIVABLE, ids=lambda f: f.value)
    def test_one_fault_at_every_call_of_a_life(self, tmp_path: Path, fault: Fault) -> None:
        """Store, load, evict, drop: with the fault at the first call, then at the second, ..."""
        calls = self.a_life(tmp_path / "healthy", never)
        for number in range(calls):
            self.a_life(tmp_path / str(number), scripted({number: fault}))

    def a_life(self, folder: Path, plan: Plan) -> int:
        folder.mkdir()
        disk = FaultyDisk(seed=1)
        rig = self.rig(folder, disk)
        disk.plan, disk.calls = plan, 0
        keys = make_keys(BLOCKS + 2)
        rig.put(keys[:BLOCKS])
        rig.get(keys[:BLOCKS])
        rig.put(keys[BLOCKS:])
        rig.tier.forget(keys[:1])
        rig.tier.tick()
        assert rig.get(keys) == rig.resident(keys)
        disk.plan, calls = never, disk.calls
        self.check_full_service(rig)
        rig.close()
        return calls

    @pytest.mark.parametrize("seed", SEEDS)
    def test_opening_fails_by_name_or_works(self, tmp_path: Path, seed: int) -> None:
        disk = FaultyDisk(seed=seed)
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        rig.close()
        faults = [fault for fault in SURVIVABLE if fault is not Fault.TORN_WRITE]
        for attempt in range(8):
            disk.plan = seeded(8 * seed + attempt, 0.3, faults)
            try:
                rig.open()
            except MediumError:
                continue
            rig.get(keys)
            rig.close()
        disk.plan = never
        rig.open()
        assert rig.get(keys) == rig.resident(keys)
        self.check_full_service(rig)
        rig.close()

    def test_a_full_disk_drops_stores_and_keeps_what_is_there(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        old = rig.put(make_keys(3))
        disk.plan = lambda call: Fault.ENOSPC
        new = make_keys(3, start=50)
        reservation = rig.reserve(new, evict=False)
        failed = rig.write(reservation)
        assert set(failed.values()) <= {Outcome.NO_SPACE}
        rig.tier.complete_store(reservation.keys, failed)
        assert rig.get(old) == old
        disk.plan = never
        assert rig.get(old) == old
        self.check_full_service(rig)
        rig.close()

    def test_short_transfers_are_no_failure(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = make_keys(BLOCKS)
        disk.plan = lambda call: Fault.SHORT_WRITE
        assert rig.put(keys) == keys
        disk.plan = lambda call: Fault.SHORT_READ
        assert rig.get(keys) == keys
        rig.close()

    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    def test_damage_done_by_others_is_a_miss(
        self, tmp_path: Path, damage: Callable[[Path], None]
    ) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        for path in self.subject.block_files(tmp_path):
            with suppress(FileNotFoundError):  # damage that was found may be cleaned up meanwhile
                damage(path)
        assert rig.get(keys) == rig.resident(keys)
        for path in self.subject.block_files(tmp_path):
            with suppress(FileNotFoundError):  # damage that was found may be cleaned up meanwhile
                damage(path)
        rig.reopen()
        assert rig.get(keys) == rig.resident(keys)
        rig.close()

    def test_a_slow_transfer_sees_no_other_block(self, tmp_path: Path) -> None:
        """While one load hangs in the disk, the tier is as full and as busy as it can be."""
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:2])

        def meanwhile(call: Call) -> None:
            disk.plan = never
            rig.put(make_keys(BLOCKS, start=100))

        disk.on_latency = meanwhile
        disk.plan = lambda call: Fault.LATENCY
        assert rig.read(keys[:2], spec) == dict.fromkeys(keys[:2], Outcome.OK)
        rig.tier.complete_load(keys[:2])
        rig.close()

    def check_full_service(self, rig: Rig) -> None:
        """The tier stores and serves as much as ever, and so does the one after a restart."""
        rig.settle()
        new = make_keys(BLOCKS - self.subject.quarantine_blocks, start=1000)
        assert rig.put(new) == new
        assert rig.get(new) == new
        stats = rig.tier.stats()
        assert stats.in_flight == stats.pinned == 0
        rig.reopen()
        assert rig.resident(new) == (new if self.subject.persistent else [])
        assert rig.get(new) == rig.resident(new)


def walk(rig: Rig, dice: random.Random, *, steps: int) -> None:
    """Use a tier in every way; whatever it serves on the way is proved by `Rig.get`."""
    universe = make_keys(3 * BLOCKS)
    for _ in range(steps):
        some = dice.sample(universe, dice.randint(1, BLOCKS))
        step = dice.random()
        if step < 0.45:
            rig.put(some)
        elif step < 0.85:
            rig.get(universe)
        elif step < 0.9:
            rig.tier.forget(some)
        elif step < 0.95:
            reserved = rig.reserve(some).keys
            rig.tier.complete_store(reserved, failures(reserved, Outcome.TIMEOUT))
        else:
            rig.tier.touch(some)
        rig.tier.tick()
        rig.check_room()
