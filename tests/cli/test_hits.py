"""How often blocks were used: seen by namespace and by block, and chosen by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_world import STACK, command

from kvtier import Stack
from kvtier.cli import commands, look_objects
from kvtier.cli.ls import layout_of
from kvtier.testing.records import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey

KEYS = make_keys(8)


@pytest.fixture
def used(stack_file: Path) -> Path:
    """Eight blocks, of which the first was used three times and the second once."""
    with Stack.open(stack_file, NAMESPACE) as stack:
        stack.store({key: payload(key) for key in KEYS})
        assert stack.settle()
        for keys in (KEYS[:1], KEYS[:2], KEYS[:1]):
            assert len(stack.load(keys)) == len(keys)
        stack.settle()
    return stack_file


def run(*args: object) -> Any:
    done = command(*args, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_by_namespace(used: Path) -> None:
    parts = run("ls", "-c", used)["namespaces"]
    assert [(part["kind"], part["hits"]) for part in parts] == [("cpu", 4), ("nvme", 4)]
    assert all(part["used"] >= part["newest"] for part in parts)
    assert [each["namespaces"][0]["hits"] for each in run("du", "-c", used)] == [4, 4]
    assert [part["hits"] for part in run("show", NAMESPACE.id, "-c", used)["tiers"]] == [4, 4]
    for words in (["ls"], ["show", NAMESPACE.id]):
        shown = command(*words, "-c", used).out
        assert "hits" in shown
        assert "last hit" in shown
    assert ", 4 hits" in command("du", "-c", used).out


def test_by_block(used: Path) -> None:
    rows = run("ls", NAMESPACE.id, "-c", used, "--tier", "nvme")["blocks"]
    hits = {row["key"]: row["hits"] for row in rows}
    assert [hits[key.hex()] for key in KEYS] == [3, 1, 0, 0, 0, 0, 0, 0]
    assert {row["used"] is None for row in rows if not row["hits"]} == {True}
    (cpu, nvme) = run("show", KEYS[0].hex(), "-c", used)
    assert (cpu["hits"], nvme["hits"]) == (3, 3)
    assert "hits       3" in command("show", KEYS[0].hex(), "-c", used).out


def with_store(stack_file: Path, folder: Path) -> Path:
    stack_file.write_text(
        f"{stack_file.read_text()}  - {{kind: object, capacity: 64MiB, url: 'file://{folder}'}}\n"
    )
    return stack_file


def test_what_nobody_used_has_no_hits_in_a_store(stack_file: Path, tmp_path: Path) -> None:
    with Stack.open(with_store(stack_file, tmp_path / "store"), NAMESPACE) as stack:
        stack.store({key: payload(key) for key in KEYS})
        assert stack.settle()
    (part,) = run("ls", "-c", stack_file, "--tier", "object")["namespaces"]
    assert (part["blocks"], part["hits"], part["used"]) == (8, None, None)


def test_a_snapshot_takes_the_counts_along_once(used: Path, tmp_path: Path) -> None:
    stack = with_store(used, tmp_path / "store")
    for copied in (8, 0):
        assert run("snapshot", "-c", stack)["namespaces"][0]["copied"] == copied
        (part,) = run("ls", "-c", stack, "--tier", "object")["namespaces"]
        assert (part["blocks"], part["hits"]) == (8, 4)
        here = run("ls", "-c", stack, "--tier", "nvme")["namespaces"][0]
        assert part["used"] == here["used"], "when they were used, not when that was copied"
    rows = run("ls", NAMESPACE.id[:8].upper(), "-c", stack, "--tier", "object")["blocks"]
    hits = {row["key"]: row["hits"] for row in rows}
    assert [hits[key.hex()] for key in KEYS] == [3, 1, 0, 0, 0, 0, 0, 0]
    assert {row["used"] is None for row in rows if not row["hits"]} == {True}
    assert [each["namespaces"][0]["hits"] for each in run("du", "-c", stack)] == [4, 4, 4]
    assert [row["hits"] for row in run("show", KEYS[0].hex(), "-c", stack)] == [3, 3, 3]
    for tier in ("cpu", "nvme"):
        run("clear", "-c", stack, "--tier", tier, "--yes")
    (copied,) = run("prewarm", "-c", stack, "--hottest", "--size", "24KiB")["namespaces"]
    assert copied["copied"] == 2
    rows = run("ls", NAMESPACE.id, "-c", stack, "--tier", "nvme")["blocks"]
    assert {BlockKey(bytes.fromhex(row["key"])) for row in rows} == set(KEYS[:2])


@pytest.mark.parametrize("words", [["verify"], ["prewarm"], ["gc", "--dry-run"]])
def test_counts_are_read_only_where_they_are_shown(
    words: list[str], used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = with_store(used, tmp_path / "store")
    assert commands.run(["snapshot", "-c", str(stack)]) == 0
    read: list[str] = []
    monkeypatch.setattr(look_objects, "used_blocks", lambda store, _: read.append("listed"))
    monkeypatch.setattr(look_objects, "count_uses", lambda store, *_: read.append("counted"))
    assert commands.run([*words, "-c", str(stack)]) == 0
    assert not read
    assert commands.run(["ls", "-c", str(stack)]) == 0
    assert read == ["listed"]


@pytest.mark.parametrize("how", ["snapshot", "prewarm"])
def test_the_hottest_first(used: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "other" / "host").mkdir(parents=True)
    other = tmp_path / "other" / "stack.yaml"
    other.write_text(
        STACK.format(host=tmp_path / "other" / "host", blocks=tmp_path / "other" / "b")
    )
    if how == "prewarm":
        words = ["prewarm", "-c", other, "--from", used]
    else:
        other.write_text(
            f"{other.read_text()}  - {{kind: object, capacity: 64MiB, "
            f"url: 'file://{tmp_path}/store'}}\n"
        )
        words = ["snapshot", "-c", used, "--to", other]
    (copied,) = run(*words, "--hottest", "--size", "24KiB")["namespaces"]
    assert copied["copied"] == 2
    tier = "object" if how == "snapshot" else "nvme"
    rows = run("ls", NAMESPACE.id, "-c", other, "--tier", tier)["blocks"]
    assert {BlockKey(bytes.fromhex(row["key"])) for row in rows} == set(KEYS[:2])


def test_the_hottest_of_a_store_first(stack_file: Path, tmp_path: Path) -> None:
    with_store(stack_file, tmp_path / "store")
    for first in (True, False):  # by two engines, one after the other
        with Stack.open(stack_file, NAMESPACE) as stack:
            if first:
                stack.store({key: payload(key) for key in KEYS})
                assert stack.settle()
            for keys in (KEYS[4:6], KEYS[5:6]):
                assert len(stack.load(keys)) == len(keys)
            stack.settle()
    for tier in ("cpu", "nvme"):
        run("clear", "-c", stack_file, "--tier", tier, "--yes")
    (copied,) = run("prewarm", "-c", stack_file, "--hottest", "--size", "24KiB")["namespaces"]
    assert copied["copied"] == 2
    rows = run("ls", NAMESPACE.id, "-c", stack_file, "--tier", "nvme")["blocks"]
    assert {BlockKey(bytes.fromhex(row["key"])) for row in rows} == set(KEYS[4:6])
    (part,) = run("ls", "-c", stack_file, "--tier", "object")["namespaces"]
    assert (part["blocks"], part["hits"]) == (8, 6)


def test_layouts_in_short() -> None:
    facts = {"dtype": "torch.bfloat16", "kv_dtype": "auto", "tensor_parallel": "1"}
    assert layout_of({}) == "-"
    assert layout_of(facts) == "bfloat16"
    assert layout_of(facts | {"kv_dtype": "auto,[]"}) == "bfloat16", "as an engine states it"
    facts |= {
        "kv_dtype": "fp8,['0']",
        "tensor_parallel": "4",
        "block_tokens": "16",
        "chunk_blocks": "8",
    }
    assert layout_of(facts) == "fp8 tp4 16x8"
