"""Between the look at a medium and what a command does about it hours may pass."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from support.processes.cli_world import Hold, served

from kvtier import Stack
from kvtier.cli import clear as gc
from kvtier.cli.inspect import look
from kvtier.config import load
from kvtier.errors import MediumInUse
from kvtier.inspect.inspector import BENCH_MARK, holding
from kvtier.slab.files import hold_owner
from kvtier.testing.subject import NAMESPACE, make_keys, payload


class TestAnEngineCameMeanwhile:
    def test_slabs_that_were_taken_over_stay(self, filled: Path, hold: Hold) -> None:
        config = load(filled)
        (nvme,) = look(config, 1)
        nvme.contents.capacity = 0
        beyond = list(gc.find_garbage([nvme], None))
        assert beyond
        engine = hold(filled)
        assert not any(each.remove() for each in beyond)
        engine.communicate("check\n")
        assert engine.returncode == 0

    def test_nothing_is_marked_in_a_slab_that_was_taken_over(
        self, filled: Path, hold: Hold
    ) -> None:
        (nvme,) = look(load(filled), 1)
        found = list(nvme.blocks())
        slab = found[0].slab
        hold(filled)
        before = slab.table.read_bytes()
        with pytest.raises(MediumInUse):
            nvme.quarantine(found)
        assert slab.table.read_bytes() == before

    def test_a_namespace_that_was_used_meanwhile_stays(self, filled: Path, tmp_path: Path) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        for table in home.glob("*.table"):
            os.utime(table, (time.time() - 7200,) * 2)
        config = load(filled)
        idle = next(iter(gc.find_garbage(look(config, 1), 3600.0)))
        assert idle.where == str(home)
        assert served(filled) == 8
        assert not idle.remove()
        assert served(filled) == 8

    @pytest.mark.parametrize("idle_s", [None, 3600.0])
    def test_host_memory_that_was_used_meanwhile_stays(
        self, filled: Path, tmp_path: Path, idle_s: float | None
    ) -> None:
        root = next((tmp_path / "host").iterdir())
        tables = list(root.rglob("*.table"))
        for path in tables if idle_s is not None else [root / "lock"]:
            os.utime(path, (0 if idle_s is None else time.time() - 7200,) * 2)
        config = load(filled)
        (found,) = gc.find_garbage(look(config, 0), idle_s)
        assert found.where in (str(root), str(tables[0].parent))
        with Stack.open(filled, NAMESPACE):
            assert not found.remove()
        assert tables[0].exists()

    def test_what_is_being_made_again_or_is_whole_by_now_stays(
        self, filled: Path, tmp_path: Path
    ) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        mark, half = home / "owners" / "0000dddd", home / "0000cccc.slab"
        making = home / "0000aaaa.0000dddd.data.making"
        for path in (mark, half, making):
            path.touch()
        config = load(filled)
        found = list(gc.find_garbage(look(config, 1), None))
        assert {each.where for each in found} == {str(mark), str(half), str(making)}
        half.with_suffix(".table").touch()
        owner = hold_owner(mark.parent, 0xDDDD)
        assert not any(each.remove() for each in found)
        os.close(owner)
        assert all(path.exists() for path in (mark, half, making))

    def test_a_folder_in_which_somebody_measures_by_now_stays(
        self, stack_file: Path, tmp_path: Path
    ) -> None:
        bench = tmp_path / "disk" / f"{BENCH_MARK}1"
        bench.mkdir()
        os.utime(bench, (0, 0))
        (tmp_path / "disk" / "blocks").mkdir()
        config = load(stack_file)
        places = look(config, 1) * 2  # also where two tiers lie side by side it is found once
        (found,) = gc.find_garbage(places, None)
        with holding(bench):
            assert not found.remove()
        assert bench.exists()
        assert found.remove()

    def test_a_slot_that_was_used_again_is_not_marked(self, filled: Path) -> None:
        (nvme,) = look(load(filled), 1)
        was, other = list(nvme.blocks())[:2]
        before = was.slab.table.read_bytes()
        assert nvme.quarantine([msgspec.structs.replace(was, key=other.key)]) == 0
        assert was.slab.table.read_bytes() == before

    def test_a_slab_that_is_whole_again_or_in_a_folder_in_use_is_not_removed(
        self, filled: Path, tmp_path: Path
    ) -> None:
        (place,) = look(load(filled), 1)
        table = next(place.blocks()).slab.table
        text = table.read_bytes()
        os.truncate(table, 100)
        (place,) = look(load(filled), 1)
        assert place.broken == [table]
        mark = table.parent / "owners" / "0000dddd"
        mark.touch()
        owner = hold_owner(mark.parent, 0xDDDD)
        (left,) = place.remove_broken("")
        os.close(owner)
        assert "is in use" in left
        assert table.exists()
        table.write_bytes(text)
        assert place.remove_broken("") == []
        assert table.exists()

    def test_memory_that_was_made_anew_is_not_broken(self, filled: Path, tmp_path: Path) -> None:
        table = next((tmp_path / "host").rglob("*.table"))
        os.truncate(table, 5000)
        (place,) = look(load(filled), 0)
        assert place.broken == [table]
        with Stack.open(filled, NAMESPACE) as stack:
            stack.store({key: payload(key) for key in make_keys(8)})
        place.remove_broken("")
        assert served(filled) == 8
