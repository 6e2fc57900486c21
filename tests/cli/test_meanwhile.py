"""Between the look at a medium and what a command does about it hours may pass."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cli_world import Hold, served

from kvtier import Stack
from kvtier.cli import rubbish
from kvtier.cli.blocks import blocks_of
from kvtier.cli.holdings import look
from kvtier.cli.repair import quarantine, remove_broken
from kvtier.config import load
from kvtier.errors import MediumInUse
from kvtier.testing.records import NAMESPACE, make_keys, payload


class TestAnEngineCameMeanwhile:
    def test_slabs_that_were_taken_over_stay(self, filled: Path, hold: Hold) -> None:
        config = load(filled)
        (nvme,) = look(config, 1)
        nvme.capacity = 0
        beyond = list(rubbish.find(config, [nvme], None))
        assert beyond
        engine = hold(filled)
        assert not any(each.remove() for each in beyond)
        engine.communicate("check\n")
        assert engine.returncode == 0

    def test_nothing_is_marked_in_a_slab_that_was_taken_over(
        self, filled: Path, hold: Hold
    ) -> None:
        (nvme,) = look(load(filled), 1)
        blocks = list(blocks_of(nvme))
        slab = blocks[0].slab
        assert slab is not None
        hold(filled)
        before = slab.table.read_bytes()
        with pytest.raises(MediumInUse):
            quarantine(slab, blocks)
        assert slab.table.read_bytes() == before

    def test_a_namespace_that_was_used_meanwhile_stays(self, filled: Path, tmp_path: Path) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        for table in home.glob("*.table"):
            os.utime(table, (time.time() - 7200,) * 2)
        config = load(filled)
        idle = next(iter(rubbish.find(config, look(config, 1), 3600.0)))
        assert idle.where == str(home)
        assert served(filled) == 8
        assert not idle.remove()
        assert served(filled) == 8

    def test_a_region_that_was_made_anew_is_not_broken(self, filled: Path, tmp_path: Path) -> None:
        region = next(tmp_path.rglob("*.region"))
        os.truncate(region, 5000)
        (place,) = look(load(filled), 0)
        assert place.broken == [region]
        with Stack.open(filled, NAMESPACE) as stack:
            stack.store({key: payload(key) for key in make_keys(8)})
        remove_broken(place, "")
        assert region.exists()
        assert served(filled) == 8

    def test_the_lock_of_an_engine_that_has_just_started_stays(
        self, stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Asked before it has its region, and answered a moment too late: another engine with its
        name would take the region for nobody's."""
        owner = tmp_path / "host" / f"kvtier-{os.getuid()}-kv-cli.owner"
        owner.touch()
        config = load(stack_file)
        (lock,) = rubbish.find(config, look(config, 0), None)
        assert lock.where == str(owner)
        monkeypatch.setattr(rubbish, "in_use", lambda region: False)
        with Stack.open(stack_file, NAMESPACE):
            assert not lock.remove()
            assert owner.exists()
