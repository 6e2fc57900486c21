"""How often blocks were used is written down beside them, and never does more than count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers.cpu_regions import CONTEXT
from support.tiers.cpu_regions import settings as cpu_settings
from support.tiers.nvme_rig import Engine

from kvtier.backends.cpu import BACKEND as CPU
from kvtier.backends.cpu import CpuTier
from kvtier.backends.nvme import NvmeTier
from kvtier.eviction import create_policy
from kvtier.eviction.adaptive import Adaptive
from kvtier.slab import catalogue as prompt_order
from kvtier.slab import layout
from kvtier.slab.files import used_bytes
from kvtier.slab.folder import SlabFolder
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.shares import fair_share
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

OTHER_BYTES = [at for at in range(layout.ENTRY_BYTES) if not 16 <= at < 24]


def counts(table: bytes, slots: int) -> dict[BlockKey, int]:
    """The uses of all committed blocks of a table."""
    entries = layout.read_entries(table, slots)
    entries = entries[layout.committed(entries)]
    return dict(zip(layout.keys_of(entries), entries["uses"].tolist(), strict=True))


def on_disk(root: Path) -> dict[BlockKey, int]:
    found: dict[BlockKey, int] = {}
    for path in (root / NAMESPACE.id).glob("*.table"):
        table = path.read_bytes()
        found |= counts(table, layout.SlabHeader.unpack(table).slots)
    return found


class TestNvme:
    def test_uses_are_written_down_and_add_up(self, tmp_path: Path) -> None:
        keys = make_keys(6)
        engine = Engine(tmp_path / "kv")
        engine.put(keys)
        engine.tier.touch(keys[:3])
        engine.tier.touch(keys[:1])
        engine.tier.tick()
        assert set(on_disk(engine.root).values()) == {0}, "nothing is written in the tier's thread"
        engine.tier.refresh()
        assert [on_disk(engine.root)[key] for key in keys] == [2, 1, 1, 0, 0, 0]
        engine.tier.touch([keys[0], *make_keys(1, start=99), keys[5]])
        engine.tier.tick()
        engine.close()
        assert [on_disk(engine.root)[key] for key in keys] == [3, 1, 1, 0, 0, 1]
        again = Engine(tmp_path / "kv")
        again.tier.touch(keys)
        again.tier.tick()
        assert again.read(keys) == keys
        again.close()
        assert [on_disk(again.root)[key] for key in keys] == [4, 2, 2, 1, 1, 2]

    def test_only_eight_bytes_of_an_entry_change(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path / "kv")
        engine.put(make_keys(8))
        tables = sorted((engine.root / NAMESPACE.id).glob("*.table"))
        before = [path.read_bytes() for path in tables]
        engine.tier.touch(make_keys(8))
        engine.tier.tick()
        engine.tier.refresh()
        for path, old in zip(tables, before, strict=True):
            new = path.read_bytes()
            assert new[: layout.TABLE_AT] == old[: layout.TABLE_AT]
            for slot in range(layout.SlabHeader.unpack(old).slots):
                at = layout.entry_at(slot)
                assert [new[at + i] for i in OTHER_BYTES] == [old[at + i] for i in OTHER_BYTES]

    def test_a_slot_that_is_used_again_begins_at_nothing(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path / "kv", blocks=4)
        engine.put(make_keys(4))
        engine.tier.touch(make_keys(4))
        engine.tier.tick()
        engine.tier.refresh()
        new = make_keys(4, start=100)
        engine.put(new)
        engine.tier.refresh()
        assert [on_disk(engine.root)[key] for key in new] == [0, 0, 0, 0]

    def test_others_uses_are_no_news(self, tmp_path: Path) -> None:
        keys = make_keys(4)
        one, other = Engine(tmp_path / "kv"), Engine(tmp_path / "kv")
        one.put(keys)
        assert other.read(keys) == keys
        other.tier.take_events()
        one.tier.touch(keys)
        one.tier.tick()
        one.tier.refresh()
        other.tier.refresh()
        assert other.tier.take_events() == []
        assert other.read(keys) == keys
        other.tier.touch(keys)
        other.tier.tick()
        other.tier.refresh()
        assert set(on_disk(one.root).values()) == {1}, "only the owner writes to a slab"

    def test_what_was_used_last_stays_longest_after_a_restart(self, tmp_path: Path) -> None:
        keys = make_keys(8)
        first = Engine(tmp_path / "kv", blocks=8)
        first.put(keys)
        first.keeper.uses._clock = lambda: 4e9  # long after all of them were stored
        for path in (first.root / NAMESPACE.id).glob("*.table"):
            os.utime(path, (1e9, 1e9))  # a file's times are coarse
        first.tier.touch(keys[:4])
        first.tier.tick()
        first.close()
        second = Engine(tmp_path / "kv", blocks=8)
        second.put(make_keys(4, start=50))
        assert second.hits(keys) == keys[:4]

    def test_a_use_in_days_to_come_does_not_stop_the_time_of_eviction(self, tmp_path: Path) -> None:
        """Written while a clock was wrong: ages would be as if nothing happened until then."""
        keys = make_keys(4)
        first = Engine(tmp_path / "kv")
        first.put(keys)
        first.keeper.uses._clock = lambda: 4e9
        first.tier.touch(keys[:1])
        first.tier.tick()
        first.close()
        now = time.time()
        policy = create_policy("adaptive")
        assert isinstance(policy, Adaptive)
        keeper = SlabKeeper(SlabFolder(first.root, NAMESPACE, Disk()), first.keeper.limits)
        tier = NvmeTier(keeper, policy, lambda: now)
        assert tier.stats().blocks == 4
        for _ in range(2):
            before = policy._now
            now += 500.0
            tier.touch(keys)
            tier.tick()
            assert policy._now >= before + 500.0
        tier.close()

    @given(st.binary(min_size=8, max_size=8), st.integers(1, 3))
    @settings(max_examples=30)
    def test_statistics_may_hold_anything(
        self, tmp_path_factory: pytest.TempPathFactory, text: bytes, uses: int
    ) -> None:
        root = tmp_path_factory.mktemp("any") / "kv"
        engine = Engine(root)
        engine.put(make_keys(4))
        engine.close()
        for path in (root / NAMESPACE.id).glob("*.table"):
            with path.open("r+b") as file:
                for slot in range(layout.SlabHeader.unpack(path.read_bytes()).slots):
                    file.seek(layout.entry_at(slot) + layout.USES_AT)
                    file.write(text)
        again = Engine(root)
        assert again.read(make_keys(4)) == make_keys(4)
        for _ in range(uses):
            again.tier.touch(make_keys(4))
        again.tier.tick()
        again.close()
        wanted = min(int.from_bytes(text[4:], "little") + uses, 0xFFFFFFFF)
        assert set(on_disk(root).values()) == {wanted}

    def test_a_removed_slab_costs_its_statistics_only(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path / "kv")
        engine.put(make_keys(4))
        engine.tier.touch(make_keys(4))
        engine.tier.tick()
        for path in (engine.root / NAMESPACE.id).glob("*.table"):
            path.unlink()
        engine.tier.refresh()


class TestIdleModels:
    """What a model that nobody serves loses to one that somebody does."""

    OTHER = NAMESPACE.__class__(
        facts=NAMESPACE.facts | {"model": "by night"},
        group_bytes=NAMESPACE.group_bytes,
        parts=NAMESPACE.parts,
    )
    THIRD = NAMESPACE.__class__(
        facts=NAMESPACE.facts | {"model": "on sundays"},
        group_bytes=NAMESPACE.group_bytes,
        parts=NAMESPACE.parts,
    )

    def test_one_that_was_used_lately_keeps_its_share(self, tmp_path: Path) -> None:
        by_day = Engine(tmp_path / "kv", blocks=16)
        by_day.put(make_keys(16))
        by_day.close()
        by_night = Engine(tmp_path / "kv", blocks=16, namespace=self.OTHER, keep_s=1e6)
        by_night.put(make_keys(40))
        by_night.close()
        assert used_bytes(by_night.root) <= by_night.capacity
        by_day = Engine(tmp_path / "kv", blocks=16, keep_s=1e6)
        assert 4 <= len(by_day.hits(make_keys(16))) <= 8, "half of the folder, in whole slabs"

    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        for namespace, age in ((self.OTHER, 900), (NAMESPACE, 500)):
            engine = Engine(tmp_path / "kv", blocks=16, namespace=namespace)
            engine.put(make_keys(8))
            engine.close()
            for path in (tmp_path / "kv" / namespace.id).glob("*.table"):
                then = path.stat().st_mtime - age
                os.utime(path, (then, then))
        third = Engine(tmp_path / "kv", blocks=16, namespace=self.THIRD, keep_s=700)
        third.put(make_keys(8))
        assert not (third.root / self.OTHER.id).exists(), "older than what is kept: it goes whole"
        left = list((third.root / NAMESPACE.id).glob("*.table"))
        assert len(left) == 2, "this one is within its share"

    @pytest.mark.parametrize("oldest", [0, 1])
    def test_none_goes_before_one_that_was_used_less_recently(
        self, tmp_path: Path, oldest: int
    ) -> None:
        others = [self.OTHER, self.THIRD]
        for namespace in others:
            engine = Engine(tmp_path / "kv", blocks=20, namespace=namespace)
            engine.put(make_keys(8))
            engine.close()
            age = 900 if namespace is others[oldest] else 500
            for path in (tmp_path / "kv" / namespace.id).glob("*.table"):
                then = path.stat().st_mtime - age
                os.utime(path, (then, then))
        engine = Engine(tmp_path / "kv", blocks=20)
        engine.put(make_keys(8))
        engine.close()
        left = [len(list((engine.root / each.id).glob("*.table"))) for each in others]
        assert left[oldest] < left[1 - oldest] == 2

    def test_one_of_days_to_come_was_not_used_lately(self, tmp_path: Path) -> None:
        """A clock was wrong: its share would be kept until then."""
        other = Engine(tmp_path / "kv", blocks=16, namespace=self.OTHER)
        other.put(make_keys(16))
        other.close()
        for path in (other.root / self.OTHER.id).glob("*.table"):
            os.utime(path, (4e9, 4e9))
        engine = Engine(tmp_path / "kv", blocks=16, keep_s=700)
        engine.put(make_keys(16))
        assert engine.hits(make_keys(16)) == make_keys(16)

    @pytest.mark.parametrize(
        ("idle", "living", "share"),
        [
            ([], 1, 100),
            ([90], 1, 50),
            ([10], 1, 90),
            ([1, 99], 1, 49),
            ([99, 1], 1, 49),
            ([40, 40], 2, 25),
            ([5, 40], 1, 55),
        ],
    )
    def test_who_needs_less_leaves_the_rest(self, idle: list[int], living: int, share: int) -> None:
        assert fair_share(100, idle, living) == share

    def test_a_small_folder_has_room_for_whoever_is_served(self, tmp_path: Path) -> None:
        for namespace in (NAMESPACE, self.OTHER, self.THIRD, NAMESPACE):
            engine = Engine(tmp_path / "kv", blocks=4, namespace=namespace, keep_s=1e6)
            assert engine.put(make_keys(4)), "one slab is all there is room for"
            engine.close()

    def test_what_cannot_be_removed_keeps_nothing_else_there(self, tmp_path: Path) -> None:
        idle = Engine(tmp_path / "kv", blocks=16, namespace=self.OTHER)
        idle.put(make_keys(16))
        idle.close()
        folder = idle.root / self.OTHER.id / "00000000.table"
        folder.mkdir()
        os.utime(folder, (0, 0))
        engine = Engine(tmp_path / "kv", blocks=16)
        assert engine.put(make_keys(4)) == make_keys(4)
        engine.close()
        assert folder.exists()

    def test_what_is_not_a_namespace_is_never_removed(self, tmp_path: Path) -> None:
        mine = tmp_path / "kv" / "photos"
        mine.mkdir(parents=True)
        (mine / "namespace.json").write_text("{}")
        engine = Engine(tmp_path / "kv", blocks=8)
        engine.put(make_keys(8))
        engine.close()
        (engine.root / NAMESPACE.id / "notes.txt").write_text("mine, too")
        other = Engine(tmp_path / "kv", blocks=8, namespace=self.OTHER)
        other.put(make_keys(8))
        other.close()
        assert (mine / "namespace.json").exists()
        assert [path.name for path in (engine.root / NAMESPACE.id).iterdir()] == ["notes.txt"]


def cpu(folder: Path) -> CpuTier:
    return CPU.open_tier(cpu_settings(folder, blocks=60), CONTEXT)


def cpu_counts(tier: CpuTier) -> dict[BlockKey, int]:
    entries = tier.region.entries()[: tier._places.all_slots]
    valid = entries[layout.committed(entries)]
    return dict(zip(layout.keys_of(valid), valid["uses"].tolist(), strict=True))


def put(tier: CpuTier, keys: list[BlockKey]) -> None:
    tier.complete_store(tier.prepare_store(keys).keys)


class TestCpu:
    def test_uses_stand_in_the_region_at_once(self, tmp_path: Path) -> None:
        keys = make_keys(4)
        tier = cpu(tmp_path)
        put(tier, keys)
        for _ in range(3):
            tier.touch(keys[:2])
        tier.tick()
        found = cpu_counts(tier)
        assert [found[key] for key in keys] == [3, 3, 0, 0]
        tier.close()
        again = cpu(tmp_path)
        again.touch(keys)
        again.tick()
        found = cpu_counts(again)
        assert [found[key] for key in keys] == [4, 4, 1, 1]
        again.forget(keys)
        put(again, keys[:1])
        assert cpu_counts(again) == {keys[0]: 0}
        again.close()

    def test_what_was_used_last_stays_longest_after_a_restart(self, tmp_path: Path) -> None:
        tier = cpu(tmp_path)
        keys = make_keys(tier._places.all_slots)
        put(tier, keys)
        tier._clock = lambda: 4e9
        tier.touch(keys[:2])
        tier.tick()
        tier.close()
        again = cpu(tmp_path)
        evicted = again.prepare_store(make_keys(len(keys) - 2, start=1000)).evicted
        assert set(evicted) == set(keys[2:])
        again.close()


KILLED = """
import sys
import time
from pathlib import Path
from support.tiers.nvme_rig import Engine
from kvtier.testing.subject import make_keys
engine = Engine(Path(sys.argv[1]), blocks=16)
engine.put(make_keys(16))
print("ready", flush=True)
while True:
    engine.tier.touch(make_keys(16))
    engine.tier.tick()
    engine.tier.refresh()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", range(6))
def test_kill_while_they_are_written(tmp_path: Path, lines: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "kv")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while max(on_disk(tmp_path / "kv").values()) < 2**lines:
        pass  # it dies in the middle of some later writing
    process.send_signal(signal.SIGKILL)
    process.communicate()
    uses = on_disk(tmp_path / "kv").values()
    assert max(uses) - min(uses) <= 1, "every count is a whole one"
    again = Engine(tmp_path / "kv", blocks=16)
    assert again.read(make_keys(16)) == make_keys(16)


def test_what_was_asked_for_in_vain_is_remembered_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_order, "_EXPECTED_MAX", 100)
    engine = Engine(tmp_path / "kv")
    for start in range(0, 1000, 50):
        engine.tier.touch(make_keys(50, start=start))
        engine.tier.tick()
    assert len(engine.tier._prompts.before) == 100
    assert make_keys(1, start=999)[0] in engine.tier._prompts.before, "the last ones"
