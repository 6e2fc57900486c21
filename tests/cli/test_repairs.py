"""`kvtier verify`, `gc` and `clear`: what they find, change, and never touch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_world import KVTIER, Hold, command, fill, run, served

from kvtier import Stack
from kvtier.cli import look_slabs, rubbish
from kvtier.cli.clear import _clear
from kvtier.cli.holdings import BENCH_MARK, look
from kvtier.cli.repair import remove_broken
from kvtier.cli.rubbish import remove_home
from kvtier.config import load
from kvtier.core.record import HEADER_BYTES, VERSION, record_bytes
from kvtier.core.slab import layout
from kvtier.testing.records import NAMESPACE, make_keys, payload
from kvtier.types import Namespace

SLOT = record_bytes(NAMESPACE.payload_bytes)
OTHER = Namespace(facts={"model": "another"}, group_bytes=(4096,))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 1]))


def one(folder: Path, pattern: str) -> Path:
    """The one such file; of slabs the one that has blocks."""
    (found,) = [
        path
        for path in folder.rglob(pattern)
        if path.suffix not in (".slab", ".table") or has_blocks(path.with_suffix(".table"))
    ]
    return found


def has_blocks(table: Path) -> bool:
    """Not the table of a spare slab, which an engine that runs may be about to make."""
    return table.exists() and any(table.read_bytes()[layout.TABLE_AT :])


class TestVerify:
    def test_all_is_well(self, filled: Path) -> None:
        report = run("verify", "-c", filled)
        assert report["ok"]
        assert report["counts"]["good"] == 16
        assert report["bytes"] == 16 * SLOT

    @pytest.mark.parametrize("at", [0, 20, 50, 88, 128, HEADER_BYTES, HEADER_BYTES + 8191])
    def test_any_flipped_bit_is_found(self, filled: Path, tmp_path: Path, at: int) -> None:
        flip(one(tmp_path, "*.slab"), at)
        report = run("verify", "-c", filled, "--tier", "nvme", code=1)
        assert report["counts"]["good"] == 7
        assert len(report["bad"]) == 1
        assert report["bad"][0]["key"] in {key.hex() for key in make_keys(8)}
        assert report["bad"][0]["why"]

    def test_what_cannot_be_read_is_said_beside_a_bad_block(
        self, filled: Path, tmp_path: Path
    ) -> None:
        slab = one(tmp_path, "*.slab")
        flip(slab, HEADER_BYTES)
        (bad,) = run("verify", "-c", filled, "--tier", "nvme", code=1)["bad"]
        stray = slab.with_name("ffffffff.table")
        stray.write_bytes(b"nothing of ours")
        done = command("show", bad["key"], "-c", filled)
        assert (done.code, "bad" in done.out) == (1, True)
        assert str(stray) in done.err

    def test_a_record_of_a_newer_version_is_left_alone(self, filled: Path, tmp_path: Path) -> None:
        slab = one(tmp_path, "*.slab")
        with slab.open("r+b") as data:
            data.seek(8)
            data.write(bytes([VERSION + 1]))
        before = slab.read_bytes(), one(tmp_path, "*.table").read_bytes()
        report = run("verify", "-c", filled, "--tier", "nvme", "--repair")
        assert report["counts"]["newer"] == 1
        assert (slab.read_bytes(), one(tmp_path, "*.table").read_bytes()) == before

    @pytest.mark.slow
    def test_a_sample_reads_so_many(self, filled: Path) -> None:
        assert run("verify", "-c", filled, "--sample", "3")["counts"]["good"] == 3
        assert run("verify", "-c", filled, "--sample", "25%")["counts"]["good"] == 4
        assert run("verify", "-c", filled, "--sample", "1%")["counts"]["good"] == 1
        assert "write a number" in command("verify", "-c", filled, "--sample", "0%").err

    @pytest.mark.parametrize(
        "pattern", ["*.slab", pytest.param("*.region", marks=pytest.mark.slow)]
    )
    def test_repair_takes_it_out_of_use(self, filled: Path, tmp_path: Path, pattern: str) -> None:
        slab = one(tmp_path, pattern)
        flip(slab, slab.read_bytes().index(b"KVTBLK") + HEADER_BYTES)
        assert len(run("verify", "-c", filled, code=1)["bad"]) == 1
        report = run("verify", "-c", filled, "--repair")
        assert (report["ok"], report["repaired"]) == (True, 1)
        report = run("verify", "-c", filled)
        assert report["counts"] == report["counts"] | {"bad": 0, "quarantined": 1, "good": 15}
        assert served(filled) == 8, "the other tier has it still"

    @pytest.mark.slow
    def test_repair_waits_for_the_owner(self, stack_file: Path, tmp_path: Path, hold: Hold) -> None:
        engine = hold(stack_file)
        flip(one(tmp_path, "*.slab"), HEADER_BYTES)
        table = one(tmp_path, "*.table").read_bytes()
        done = command("verify", "-c", stack_file, "--repair")
        assert done.code == 1
        assert "stop its engine first" in done.err
        assert one(tmp_path, "*.table").read_bytes() == table
        engine.communicate("go\n")
        assert run("verify", "-c", stack_file, "--repair")["repaired"] == 1

    @pytest.mark.parametrize(
        "size", [100, *(pytest.param(size, marks=pytest.mark.slow) for size in (0, 5000))]
    )
    def test_a_table_cut_short_is_removed(self, filled: Path, tmp_path: Path, size: int) -> None:
        table = one(tmp_path, "*.table")
        os.truncate(table, size)
        assert "kvtier verify --repair" in command("verify", "-c", filled).err
        done = command("verify", "-c", filled, "--repair")
        assert done.code == 0, done.err
        assert not table.exists()
        assert command("verify", "-c", filled).code == 0

    @pytest.mark.slow
    def test_repair_of_one_namespace_leaves_the_others(self, filled: Path, tmp_path: Path) -> None:
        with Stack(load(filled), OTHER, engine="other") as stack:
            assert stack.store({make_keys(1)[0]: bytes(4096)})
            assert stack.settle()
        table = one(tmp_path / "disk" / "blocks" / NAMESPACE.id, "*.table")
        os.truncate(table, 0)
        done = command("verify", "-c", filled, "--namespace", OTHER.id[:8], "--repair")
        assert (done.code, table.exists()) == (1, True)
        assert f"{table}: the slab's header page is cut short; kvtier verify --repair" in done.err
        assert command("verify", "-c", filled, "-n", NAMESPACE.id[:8], "--repair").code == 0
        assert not table.exists()

    @pytest.mark.slow
    def test_a_damaged_description_is_nothing_to_repair(self, filled: Path, tmp_path: Path) -> None:
        text = tmp_path / "disk" / "blocks" / NAMESPACE.id / "namespace.json"
        text.write_text("garbage")
        done = command("verify", "-c", filled, "--repair")
        assert (done.code, text.read_text()) == (1, "garbage")
        assert "the next engine that serves it writes it anew" in done.err
        assert served(filled) == 8
        assert command("verify", "-c", filled).code == 0

    @pytest.mark.parametrize("blocks", [8, 0])
    def test_what_is_said_to_remove_a_namespace_removes_it(
        self, blocks: int, stack_file: Path, tmp_path: Path
    ) -> None:
        """One that nobody serves any more, and whose description a loss of power has emptied."""
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        home.mkdir(parents=True)
        if blocks:
            fill(stack_file, blocks)
        (home / "namespace.json").write_text("")
        said = command("ls", "-c", stack_file).said
        if f"and {home} can be removed" in said:
            shutil.rmtree(home)
        else:
            advice = f"kvtier clear {NAMESPACE.id[:12]} --tier 1"
            assert f"{advice} removes its blocks here" in said
            done = command(*advice.split()[1:], "-c", stack_file, "--yes")
            assert "blocks (96 KiB) were removed" in done.out
        assert not home.exists()
        assert command("ls", "-c", stack_file).code == 0

    def test_a_damaged_region_is_removed(self, filled: Path, tmp_path: Path) -> None:
        region = one(tmp_path, "*.region")
        flip(region, 20)
        assert command("verify", "-c", filled).code == 1
        assert command("verify", "-c", filled, "--repair").code == 0
        assert not region.exists()
        assert served(filled) == 8


class TestGc:
    def found(self, *args: object) -> list[str]:
        return [row["what"] for row in run("gc", *args)["found"]]

    def test_nothing_to_do(self, stack_file: Path) -> None:
        assert self.found("-c", stack_file) == []

    def test_nothing_is_left_by_an_engine_that_was_stopped(self, filled: Path) -> None:
        assert self.found("-c", filled) == []

    @pytest.mark.slow
    def test_what_dead_processes_leave(self, filled: Path, tmp_path: Path) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        (home / "0000aaaa.0000bbbb.data.making").write_bytes(b"x" * 100)
        (home / "0000cccc.slab").write_bytes(b"x" * 100)
        (home / "owners" / "0000dddd").touch()
        host = tmp_path / "host"
        (host / f"kvtier-{os.getuid()}-kv-gone.owner").touch()
        (host / f"kvtier-{os.getuid()}-kv-half.making").write_bytes(b"x")
        bench = tmp_path / "disk" / f"{BENCH_MARK}1-x"
        bench.mkdir()
        os.utime(bench, (0, 0))
        young = tmp_path / "disk" / f"{BENCH_MARK}2-y"
        young.mkdir()
        would = self.found("-c", filled, "--dry-run")
        assert (home / "0000cccc.slab").exists()
        assert self.found("-c", filled) == would
        assert sorted(would) == [
            "file that a dead process was making",
            "folder of a measurement that was killed",
            "lock without its region",
            "mark of a dead owner",
            "region that was never finished",
            "slab without a table",
        ]
        assert self.found("-c", filled) == []
        assert not bench.exists()
        assert young.exists()
        assert served(filled) == 8

    @pytest.mark.slow
    def test_tables_whose_slabs_somebody_removed(self, filled: Path, tmp_path: Path) -> None:
        slabs = list((tmp_path / "disk").rglob("*.slab"))
        for path in slabs:
            path.unlink()
        assert self.found("-c", filled, "--dry-run") == ["table without a slab"] * len(slabs)
        assert self.found("-c", filled) == ["table without a slab"] * len(slabs)
        assert self.found("-c", filled) == []
        assert not list((tmp_path / "disk").rglob("*.table"))

    def test_what_only_looks_like_a_measurement_stays(self, filled: Path, tmp_path: Path) -> None:
        others = tmp_path / "disk" / f"{BENCH_MARK}1-x"
        others.mkdir(mode=0)
        file = tmp_path / "disk" / f"{BENCH_MARK}2-y"
        file.touch()
        for path in (others, file):
            os.utime(path, (0, 0))
        done = command("gc", "-c", filled, rights=False)
        assert (done.code, done.err) == (0, "")
        assert others.exists()
        assert file.exists()

    def test_what_is_in_use_stays(self, stack_file: Path, hold: Hold) -> None:
        engine = hold(stack_file)
        assert self.found("-c", stack_file, "--idle", "0s") == []
        engine.communicate("check\n")
        assert engine.returncode == 0

    @pytest.mark.slow
    def test_idle_namespaces(self, filled: Path, tmp_path: Path) -> None:
        assert self.found("-c", filled, "--idle", "1h") == []
        for path in (tmp_path / "disk").rglob("*.table"):
            os.utime(path, (time.time() - 7200,) * 2)
        assert "namespace that nobody used for so long" in self.found("-c", filled, "--idle", "1h")
        assert not (tmp_path / "disk" / "blocks" / NAMESPACE.id).exists()

    def test_idle_host_memory(self, filled: Path, tmp_path: Path) -> None:
        """Of this stack: regions of others lie beside it, and have a `keep_for` of their own."""
        other = tmp_path / "other.yaml"
        other.write_text(filled.read_text().replace("name: cli", "name: other"))
        with Stack.open(other, NAMESPACE) as stack:
            key = make_keys(1)[0]
            stack.store({key: payload(key)})
        for path in (tmp_path / "host").glob("*.region"):
            os.utime(path, (time.time() - 7200,) * 2)
        assert self.found("-c", filled, "--tier", "cpu", "--idle", "3h") == []
        assert self.found("-c", filled, "--tier", "cpu", "--idle", "1h") == [
            "region that nobody used for so long"
        ]
        assert one(tmp_path, "*.region").name.endswith("-other.region")

    def test_beyond_the_capacity(self, filled: Path, tmp_path: Path) -> None:
        filled.write_text(filled.read_text().replace("16MiB", "1MiB"))
        assert "slab beyond the capacity, written longest ago" in self.found("-c", filled)
        taken = sum(p.stat().st_size for p in (tmp_path / "disk").rglob("*") if p.is_file())
        assert taken <= 1 << 20

    def test_discarded_regions(self, filled: Path, tmp_path: Path) -> None:
        os.utime(one(tmp_path, "*.region"), (0, 0))
        assert "region that nobody will come back to" in self.found("-c", filled)
        assert list((tmp_path / "host").iterdir()) == []


class TestClear:
    def test_it_asks(self, filled: Path) -> None:
        done = command("clear", "-c", filled)
        assert done.code == 2
        assert "--yes" in done.err
        assert served(filled) == 8

    def test_an_answer_is_heard(self, filled: Path) -> None:
        assert talk(filled, "n\n") == 1
        assert served(filled) == 8
        assert talk(filled, "y\n") == 0
        assert served(filled) == 0

    def test_an_end_is_a_no(self, filled: Path) -> None:
        assert talk(filled, "\x04") == 1
        assert served(filled) == 8

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_interrupted_while_it_asks(self, number: int, filled: Path) -> None:
        main, child = os.openpty()
        words = [KVTIER, "clear", "-c", filled]
        process = subprocess.Popen(words, stdin=child, stdout=subprocess.PIPE, stderr=child)
        shown = b""
        while b"?" not in shown:
            shown += os.read(main, 1024)
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        os.close(child)
        os.close(main)
        assert (process.returncode, out) == (128 + number, b"")
        assert served(filled) == 8

    def test_one_tier(self, filled: Path, tmp_path: Path) -> None:
        assert [row["kind"] for row in run("clear", "-c", filled, "--tier", "1", "--yes")] == [
            "nvme"
        ]
        assert list((tmp_path / "disk" / "blocks").iterdir()) == [
            tmp_path / "disk" / "blocks" / "lock"
        ]
        assert served(filled) == 8

    def test_one_namespace_of_two(self, filled: Path) -> None:
        key = make_keys(1)[0]
        with Stack(load(filled), OTHER, engine="other") as stack:
            stack.store({key: bytes(4096)})
            assert stack.settle()
        run("clear", NAMESPACE.id[:8], "-c", filled, "--yes")
        with Stack(load(filled), OTHER, engine="other") as stack:
            assert stack.load([key]) == {key: bytes(4096)}
        assert served(filled) == 0

    def test_what_is_in_use_stays(self, stack_file: Path, hold: Hold) -> None:
        engine = hold(stack_file)
        done = command("clear", "-c", stack_file, "--yes")
        assert done.code == 1
        assert done.err.count("stop its engine") == 2
        engine.communicate("check\n")
        assert engine.returncode == 0

    @pytest.mark.slow
    def test_one_region_in_use_keeps_no_other(
        self, stack_file: Path, tmp_path: Path, hold: Hold
    ) -> None:
        engine = hold(stack_file)
        for name in ("cli-dp1", "cli-dp0"):  # of the ranks that ran beside it, before and behind
            with Stack(load(stack_file), NAMESPACE, engine=name) as stack:
                stack.store({key: payload(key) for key in make_keys(3)})
        rows = run("clear", "-c", stack_file, "--tier", "cpu", "--yes", code=1)
        assert sorted((row["blocks"], bool(row["kept"])) for row in rows) == [
            (3, False),
            (3, False),
            (8, True),
        ]
        assert len(list((tmp_path / "host").glob("*.region"))) == 1
        engine.communicate("check\n")
        assert engine.returncode == 0

    def test_other_files_stay(self, filled: Path, tmp_path: Path) -> None:
        folder = tmp_path / "disk" / "blocks"
        (folder / "notes.txt").write_text("mine")
        (folder / NAMESPACE.id / "letter.txt").write_text("mine")
        run("clear", "-c", filled, "--yes")
        assert (folder / "notes.txt").read_text() == "mine"
        assert [path.name for path in (folder / NAMESPACE.id).iterdir()] == ["letter.txt"]

    def test_nothing_to_remove(self, stack_file: Path) -> None:
        assert command("clear", "-c", stack_file).out == "0 blocks (0 B) were removed\n"

    def test_an_unknown_namespace(self, filled: Path) -> None:
        assert "kvtier ls" in command("clear", "ffffffff", "-c", filled, "--yes").err


def talk(stack_file: Path, answer: str) -> int:
    """Run `clear` on a terminal and answer its question."""
    main, child = os.openpty()
    process = subprocess.Popen(
        [sys.executable, KVTIER, "clear", "-c", stack_file],
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(child)
    os.write(main, answer.encode())
    process.communicate(timeout=300)
    os.close(main)
    return process.returncode


class TestAnotherWasQuicker:
    """A namespace that goes while it is looked at is no trouble, and needs no name that exists."""

    def test_it_is_gone_when_it_is_to_be_removed(self, filled: Path, tmp_path: Path) -> None:
        config = load(filled)
        places = look(config)
        root = tmp_path / "disk" / "blocks"
        (region,) = rubbish.find(config, places[:1], 0.0)
        shutil.rmtree(root / NAMESPACE.id)
        one(tmp_path, "*.region").unlink()
        assert remove_home(root, root / NAMESPACE.id)
        assert region.remove()
        assert [each.what for each in rubbish.find(config, places, 0.0)] == [
            "lock without its region"
        ]

    def test_a_region_is_gone_when_it_is_to_be_removed(self, filled: Path, tmp_path: Path) -> None:
        config = load(filled)
        (cpu, nvme) = look(config)
        for path in (tmp_path / "host").iterdir():
            path.unlink()
        assert [each.kept for each in _clear(config, cpu, cpu.parts[0])] == [""]
        cpu.broken = [slab.table for slab in cpu.slabs]
        nvme.broken = [slab.table for slab in nvme.slabs]
        shutil.rmtree(nvme.where)
        assert remove_broken(cpu, "") + remove_broken(nvme, "") == []
        assert list((tmp_path / "host").iterdir()) == []

    def test_it_goes_while_gc_looks(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        config = load(filled)
        (nvme,) = look(config, 1)
        nvme.capacity = 0
        seen = rubbish.unfinished
        monkeypatch.setattr(rubbish, "unfinished", lambda home: shutil.rmtree(home) or seen(home))
        found = rubbish.find(config, [nvme], 0.0)
        assert all(each.remove() for each in found)
        assert not home.exists()

    def test_regions_and_measurements_go_while_gc_looks(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = load(filled)
        places = look(config)
        gone = tmp_path / "gone.region"
        monkeypatch.setattr(rubbish, "leftovers", lambda *_: [gone])
        bench = tmp_path / "disk" / f"{BENCH_MARK}1"
        bench.mkdir()
        lives = rubbish._bench_lives
        monkeypatch.setattr(rubbish, "_bench_lives", lambda path: bench.rmdir() or lives(path))
        assert list(rubbish.find(config, places, None)) == []

    def test_it_goes_while_it_is_looked_at(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        read = look_slabs.read_file

        def gone(path: Path, most: int) -> bytes:
            shutil.rmtree(home)
            return read(path, most)

        monkeypatch.setattr(look_slabs, "read_file", gone)
        (place,) = look(load(filled), 1)
        assert (place.parts, place.troubles) == ([], [])
