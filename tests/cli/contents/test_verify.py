"""`kvtier verify`: what it finds, takes out of service, and leaves alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.cli_world import (
    Hold,
    block_file,
    command,
    every_kind,
    fill,
    flip,
    one,
    run,
    served,
)

from kvtier import Stack
from kvtier.cli import app, verify
from kvtier.cli import inspect as parallel
from kvtier.config import load
from kvtier.record.record import HEADER_BYTES, VERSION, record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace

SLOT = record_bytes(NAMESPACE.payload_bytes)
OTHER = Namespace(facts={"model": "another"}, group_bytes=(4096,))


class TestVerify:
    @every_kind
    def test_all_is_well(self, filled: Path) -> None:
        report = run("verify", "-c", filled)
        assert report["ok"]
        assert report["counts"]["good"] == 16
        assert report["bytes"] == 16 * SLOT

    def test_interrupted_it_says_what_it_has_found(
        self,
        filled: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        slab = one(tmp_path, "*.slab")
        flip(slab, HEADER_BYTES)

        def until_ctrl_c(*args: Any) -> Iterator[object]:
            yield from parallel.bounded_map(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(verify, "bounded_map", until_ctrl_c)
        assert app.run(["verify", "-c", str(filled), "--json"]) == 130
        out, err = capsys.readouterr()
        assert out == ""
        bad, interrupted = err.splitlines()
        assert bad == f"kvtier: {slab}:0: the payload fails its checksum"
        said = "interrupted: 16 of 16 blocks were checked: 15 good, 1 bad"
        assert interrupted == f"kvtier: {said}"

    def test_a_list_that_is_cut_says_so(
        self,
        filled: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for slot in range(3):
            flip(one(tmp_path, "*.slab"), slot * SLOT + HEADER_BYTES)
        monkeypatch.setattr(verify, "_SHOWN", 2)
        assert app.run(["verify", "-c", str(filled)]) == 1
        assert "... and 1 more that are bad: --json names all" in capsys.readouterr().out

    @every_kind
    @pytest.mark.parametrize("at", [0, 20, 50, 88, 128, HEADER_BYTES, HEADER_BYTES + 8191])
    def test_any_flipped_bit_is_found(
        self, filled: Path, tmp_path: Path, at: int, second_tier: str
    ) -> None:
        flip(block_file(tmp_path, second_tier), at)
        report = run("verify", "-c", filled, "--tier", second_tier, code=1)
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
        done = command("ls", bad["key"], "-c", filled)
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

    @every_kind
    @pytest.mark.slow
    def test_a_sample_reads_so_many(self, filled: Path) -> None:
        assert run("verify", "-c", filled, "--sample", "3")["counts"]["good"] == 3
        assert run("verify", "-c", filled, "--sample", "25%")["counts"]["good"] == 4
        assert run("verify", "-c", filled, "--sample", "1%")["counts"]["good"] == 1
        assert "write a number" in command("verify", "-c", filled, "--sample", "0%").err

    @pytest.mark.parametrize("where", ["disk", pytest.param("host", marks=pytest.mark.slow)])
    def test_repair_takes_it_out_of_use(self, filled: Path, tmp_path: Path, where: str) -> None:
        slab = one(tmp_path / where, "*.slab")
        flip(slab, slab.read_bytes().index(b"KVTBLK") + HEADER_BYTES)
        assert len(run("verify", "-c", filled, code=1)["bad"]) == 1
        report = run("verify", "-c", filled, "--repair")
        assert (report["ok"], report["repaired"]) == (True, 1)
        report = run("verify", "-c", filled)
        assert report["counts"] == report["counts"] | {"bad": 0, "quarantined": 1, "good": 15}
        assert served(filled) == 8, "the other tier has it still"

    @every_kind
    @pytest.mark.slow
    def test_repair_waits_for_the_owner(
        self, stack_file: Path, tmp_path: Path, hold: Hold, second_tier: str
    ) -> None:
        engine = hold(stack_file)
        bad = block_file(tmp_path, second_tier)
        flip(bad, HEADER_BYTES)
        before = {path: path.read_bytes() for path in bad.parent.iterdir() if path.is_file()}
        done = command("verify", "-c", stack_file, "--repair")
        assert done.code == 1
        assert "stop its engine first" in done.err
        assert {path: path.read_bytes() for path in before} == before
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

    def test_a_damaged_slab_of_memory_is_removed(self, filled: Path, tmp_path: Path) -> None:
        table = one(tmp_path / "host", "*.table")
        flip(table, 20)
        assert command("verify", "-c", filled).code == 1
        assert command("verify", "-c", filled, "--repair").code == 0
        assert not table.exists()
        assert served(filled) == 8
