"""Engines that share a folder, step by step in any order, with deaths and with files that vanish:
every slot that a catalogue owns is accounted for once, and what is being read is not free."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from support.tiers import cpu_regions, nvme_rig

from kvtier.backends.nvme import NvmeTier
from kvtier.errors import MediumError
from kvtier.slab.folder_tier import FolderTier
from kvtier.testing.subject import blank, make_keys, prove, sealed
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Presence, Reservation

KEYS = make_keys(40)
STEPS = 120


class Walker:
    """One engine and what it has under way."""

    def __init__(self, root: Path, medium: str, dice: random.Random) -> None:
        rate = 1e9 if dice.random() < 0.5 else None
        self.engine: cpu_regions.Engine | nvme_rig.Engine
        if medium == "cpu":
            self.engine = cpu_regions.Engine(root, blocks=12)
        else:
            self.engine = nvme_rig.Engine(root, blocks=12, write_rate=rate)
        self.tier: FolderTier = self.engine.tier
        self.dice = dice
        self.stores: list[Reservation] = []
        self.loads: list[tuple[list[BlockKey], LoadStoreSpec]] = []

    def reserve(self) -> None:
        taken = self.tier.prepare_store(self.dice.sample(KEYS, self.dice.randint(1, 4)))
        self.stores.append(taken)

    def store(self) -> None:
        if not self.stores:
            return
        taken = self.stores.pop(self.dice.randrange(len(self.stores)))
        records = [sealed(key) for key in taken.keys]
        outcomes = [Outcome.GONE] * len(taken.keys)
        with contextlib.suppress(MediumError):  # as the mover does: that memory has vanished
            outcomes = self.engine.handler.store(taken.spec, taken.keys, records)
        failed = {key: why for key, why in zip(taken.keys, outcomes, strict=True) if not why.ok}
        self.tier.complete_store(taken.keys, failed | self._chosen(taken.keys, 0.1))

    def pin(self) -> None:
        asked = self.dice.sample(KEYS, 6)
        found = self.tier.lookup(asked)
        hits = [key for key, now in zip(asked, found, strict=True) if now is Presence.HIT]
        self.loads.append((hits, self.tier.prepare_load(hits)))

    def load(self) -> None:
        if not self.loads:
            return
        keys, spec = self.loads.pop(self.dice.randrange(len(self.loads)))
        records = [blank() for _ in keys]
        failed = {}
        outcomes = [Outcome.GONE] * len(keys)
        with contextlib.suppress(MediumError):
            outcomes = self.engine.handler.load(spec, keys, records)
        for key, record, outcome in zip(keys, records, outcomes, strict=True):
            proved = prove(record, key) if outcome.ok else outcome
            if not proved.ok:
                failed[key] = proved
        self.tier.complete_load(keys, failed | self._chosen(keys, 0.08))

    def _chosen(self, keys: list[BlockKey], share: float) -> dict[BlockKey, Outcome]:
        kinds = [Outcome.CORRUPT, Outcome.GONE, Outcome.IO_ERROR]
        return {key: self.dice.choice(kinds) for key in keys if self.dice.random() < share}

    def forget(self) -> None:
        self.tier.forget(self.dice.sample(KEYS, 3))

    def touch(self) -> None:
        self.tier.touch(self.dice.sample(KEYS, 5))
        self.tier.tick()

    def keep(self) -> None:
        self.engine.keeper.work(thorough=self.dice.random() < 0.5)

    def clear(self) -> None:
        if self.dice.random() < 0.1:
            self.tier.clear()

    def vanish(self) -> None:
        """Somebody removes a slab of anyone."""
        tables = sorted(self.engine.root.glob("*/*.table"))
        if tables and self.dice.random() < 0.1:
            self.dice.choice(tables).unlink()
        if self.dice.random() < 0.1:
            (self.engine.root / "writes").unlink(missing_ok=True)

    @property
    def ways(self) -> list[Callable[[], None]]:
        often = [self.reserve, self.store, self.pin, self.load, self.keep] * 2
        return [*often, self.tier.refresh, self.tier.flush, self.forget, self.touch, self.clear,
                self.vanish]  # fmt: skip

    def die(self) -> None:
        """As kill -9 leaves it: nothing is written down, the locks are gone."""
        self.engine.handler.close()
        os.close(self.engine.keeper._owner_fd)

    def end(self) -> None:
        """Everything under way comes to an end, and nothing is held any more."""
        for taken in self.stores:
            cancelled = dict.fromkeys(taken.keys, Outcome.CANCELLED)
            self.tier.complete_store(taken.keys, cancelled)
        for keys, _ in self.loads:
            self.tier.complete_load(keys)
        for _ in range(3):
            self.tier.refresh()
        self.check()
        tier = self.tier
        held = [tier._pins, tier._reserved, tier._dropped_pinned, tier._unwanted, tier._unwritten]
        assert not any(held)
        assert not tier._tainted
        if isinstance(tier, NvmeTier) and tier.allowance is not None:
            assert tier.allowance.spent >= 0
            assert tier.allowance.stats().left < 1e13
        self.engine.close()

    def check(self) -> None:
        tier = self.tier
        where = tier._where
        assert all(tier._key_of[slot] == key for key, slot in where.items())
        assert not where.keys() & tier._reserved.keys()
        named = [where.values(), tier._reserved.values(), tier._dropped_pinned.values()]
        keyed = [slot for slot, key in enumerate(tier._key_of) if key is not None]
        assert sorted(keyed) == sorted(chain(*named)), "a slot whose news nobody would hear"
        own = {
            slot for place in tier._places.by_slab.values() if place.mine for slot in place.slots
        }
        free = list(tier._free)
        places = [free, tier._reserved.values(), where.values(), tier._dropped_pinned.values()]
        times = Counter(slot for slots in [*places, tier._quarantine] for slot in slots)
        assert max(times.values(), default=0) <= 1, "a slot in two places"
        assert own <= times.keys() | tier._unwritten, "a slot is lost"
        assert own.issuperset(free)
        assert not tier._unwritten.union(tier._pins).intersection(free)
        known = [where, tier._reserved, tier._dropped_pinned]
        for key, slot in tier._copies.slot_of.items():
            assert slot not in own
            held = tier._key_of[slot] is not None or any(key in each for each in known)
            assert held, "a block that could be offered"
        policy = {slot for slot in own if slot in tier._policy}
        assert policy == own.intersection(where.values())


@pytest.mark.parametrize("medium", ["cpu", "nvme"])
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))]
)
def test_every_slot_is_accounted_for(
    tmp_path: Path, seed: int, medium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    names = random.Random(seed)
    monkeypatch.setattr(secrets, "randbits", names.getrandbits)
    walkers = [Walker(tmp_path / "kv", medium, dice) for _ in range(2)]
    for _ in range(STEPS):
        which = dice.randrange(len(walkers))
        if dice.random() < 0.02:
            walkers[which].die()
            walkers[which] = Walker(tmp_path / "kv", medium, dice)
        else:
            dice.choice(walkers[which].ways)()
        for walker in walkers:
            walker.check()
    for walker in walkers:
        walker.end()
    shutil.rmtree(tmp_path)
