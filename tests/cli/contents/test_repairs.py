"""`kvtier gc` and `clear`: what they find, change, and never touch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes.cli_world import KVTIER, Hold, command, one, run, served, stack_text
from support.tiers.nvme_rig import Engine

from kvtier import Stack
from kvtier.backends.cpu import inspect as cpu_garbage
from kvtier.cli import clear as gc
from kvtier.cli.inspect import look
from kvtier.config import load
from kvtier.inspect import inspector
from kvtier.inspect.inspector import BENCH_MARK
from kvtier.record.record import record_bytes
from kvtier.slab import folder_inspect as nvme_garbage
from kvtier.slab import folder_inspect as nvme_inspector
from kvtier.slab.folder_inspect import remove_home
from kvtier.slab.shares import retaining
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Namespace

SLOT = record_bytes(NAMESPACE.payload_bytes)
OTHER = Namespace(facts={"model": "another"}, group_bytes=(4096,))


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
        (host / f"kvtier-{os.getuid()}-kv-old.region").write_bytes(b"x")
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
            "mark of a dead owner",
            "memory of a kvtier before this one",
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
        """Of this stack: those of others lie beside it, and have a `keep_for` of their own."""
        other = tmp_path / "other.yaml"
        other.write_text(filled.read_text().replace("name: cli", "name: other"))
        with Stack.open(other, NAMESPACE) as stack:
            key = make_keys(1)[0]
            stack.store({key: payload(key)})
        for path in (tmp_path / "host").rglob("*.table"):
            os.utime(path, (time.time() - 7200,) * 2)
        assert self.found("-c", filled, "--tier", "cpu", "--idle", "3h") == []
        assert self.found("-c", filled, "--tier", "cpu", "--idle", "1h") == [
            "namespace that nobody used for so long"
        ]
        assert one(tmp_path / "host", "*.table").parent.parent.name.endswith("-other")

    def test_beyond_the_capacity(self, filled: Path, tmp_path: Path) -> None:
        filled.write_text(filled.read_text().replace("16MiB", "1MiB"))
        assert "slab beyond the capacity, written longest ago" in self.found("-c", filled)
        taken = sum(p.stat().st_size for p in (tmp_path / "disk").rglob("*") if p.is_file())
        assert taken <= 1 << 20

    def test_beyond_the_capacity_what_is_retained_goes_last(self, tmp_path: Path) -> None:
        disk = Engine(tmp_path / "blocks", blocks=16)
        disk.tier.retain_at_most(4)
        for start in range(0, 16, 4):
            disk.put(make_keys(4, start=start))
        disk.tier.retain(make_keys(1), "agent", time.time() + 600)
        disk.tier._between_rounds()  # which writes that down
        disk.close()
        (kept,) = retaining(disk.root / NAMESPACE.id, disk.root.rglob("*.table"))
        os.utime(kept, (0, 0))
        (tmp_path / "host").mkdir()
        stack = tmp_path / "stack.yaml"
        stack.write_text(stack_text(tmp_path / "host", disk.root).replace("16MiB", "80KiB"))
        found = [row["where"] for row in run("gc", "-c", stack, "--dry-run")["found"]]
        assert found
        assert str(kept.with_suffix(".slab")) not in found

    def test_discarded_memory(self, filled: Path, tmp_path: Path) -> None:
        os.utime(next((tmp_path / "host").glob("*/lock")), (0, 0))
        assert "memory that nobody will come back to" in self.found("-c", filled)
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
        assert [bool(row["kept"]) for row in rows] == [True], "an engine of the stack runs"
        engine.communicate("check\n")
        assert engine.returncode == 0

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


def test_a_broken_slab_is_told_by_all_and_its_removal_too(filled: Path, tmp_path: Path) -> None:
    """`doctor` said ok where `ls` did not, and `verify --repair` removed it without a word."""
    table = next(each for each in tmp_path.rglob("*.table") if b"\2" in each.read_bytes()[4096:])
    os.truncate(table, 100)
    cut = f"{table}: the slab's header page is cut short"
    assert f"WARN 1 nvme: {cut}" in " ".join(command("doctor", "-c", filled).out.split())
    done = command("verify", "-c", filled, "--repair")
    assert f"removed, with what was in it: {cut}" in " ".join(done.out.split())
    assert not table.exists()
    assert "cut short" not in command("doctor", "-c", filled).out


def test_gc_says_that_it_has_no_right_to_remove_anything(filled: Path, tmp_path: Path) -> None:
    home = tmp_path / "disk" / "blocks" / NAMESPACE.id
    (home / "0000cccc.slab").write_bytes(b"x" * 100)
    home.chmod(0o500)
    try:
        done = command("gc", "-c", filled, "--dry-run", rights=False)
    finally:
        home.chmod(0o700)
    assert done.code == 1
    assert "nothing to remove in what can be seen" in done.out
    assert f"{home}: no right to remove anything here; run this as its owner" in done.err


class TestAnotherWasQuicker:
    """A namespace that goes while it is looked at is no trouble, and needs no name that exists."""

    def test_it_is_gone_when_it_is_to_be_removed(self, filled: Path, tmp_path: Path) -> None:
        config = load(filled)
        places = look(config)
        root = tmp_path / "disk" / "blocks"
        (host,) = gc.find_garbage(places[:1], 0.0)
        shutil.rmtree(root / NAMESPACE.id)
        shutil.rmtree(next((tmp_path / "host").iterdir()))
        assert remove_home(root, root / NAMESPACE.id)
        assert host.remove()
        assert [each.what for each in gc.find_garbage(places, 0.0)] == []

    def test_memory_is_gone_when_it_is_to_be_removed(self, filled: Path, tmp_path: Path) -> None:
        config = load(filled)
        (cpu, nvme) = look(config)
        shutil.rmtree(next((tmp_path / "host").iterdir()))
        cpu.broken = [slab.table for slab in cpu.slabs]
        nvme.broken = [slab.table for slab in nvme.slabs]
        shutil.rmtree(nvme.contents.where)
        assert cpu.remove_broken("") + nvme.remove_broken("") == []

    def test_it_goes_while_gc_looks(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        config = load(filled)
        (nvme,) = look(config, 1)
        nvme.contents.capacity = 0
        seen = nvme_garbage.unfinished
        monkeypatch.setattr(
            nvme_garbage, "unfinished", lambda home: shutil.rmtree(home) or seen(home)
        )
        found = gc.find_garbage([nvme], 0.0)
        assert all(each.remove() for each in found)
        assert not home.exists()

    def test_memory_and_measurements_go_while_gc_looks(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = load(filled)
        places = look(config)
        gone = tmp_path / "gone"
        monkeypatch.setattr(cpu_garbage, "leftovers", lambda *_: [gone])
        bench = tmp_path / "disk" / f"{BENCH_MARK}1"
        bench.mkdir()
        lives = inspector._lives
        monkeypatch.setattr(inspector, "_lives", lambda path: bench.rmdir() or lives(path))
        assert list(gc.find_garbage(places, None)) == []

    def test_it_goes_while_it_is_looked_at(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "disk" / "blocks" / NAMESPACE.id
        read = nvme_inspector.read_file

        def gone(path: Path, most: int) -> bytes:
            shutil.rmtree(home)
            return read(path, most)

        monkeypatch.setattr(nvme_inspector, "read_file", gone)
        (place,) = look(load(filled), 1)
        assert (place.contents.parts, place.contents.troubles) == ([], [])
