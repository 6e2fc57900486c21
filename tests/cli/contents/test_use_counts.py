"""How often blocks were used: seen by namespace and by block, and chosen by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes.cli_world import command, put, run, with_store

from kvtier import Stack
from kvtier.backends.object.inspection import inspector, store_survey
from kvtier.cli import app
from kvtier.cli.ls import layout_of
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Namespace

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


def used_at(stack: Path) -> set[float]:
    """When blocks were used last, by each tier of this machine: they write it down one by one."""
    parts = run("ls", "-c", stack)["namespaces"]
    return {part["used"] for part in parts if part["kind"] in ("cpu", "nvme")}


def test_by_namespace(used: Path) -> None:
    parts = run("ls", "-c", used)["namespaces"]
    assert [(part["kind"], part["hits"]) for part in parts] == [("cpu", 4), ("nvme", 4)]
    assert all(part["used"] >= part["newest"] for part in parts)
    assert [each["namespaces"][0]["hits"] for each in run("du", "-c", used)] == [4, 4]
    for words in (["ls"], ["ls", NAMESPACE.id]):
        shown = command(*words, "-c", used).out
        assert "hits" in shown
        assert "last hit" in shown
    assert ", 4 hits" in command("du", "-c", used).out


@pytest.mark.slow
def test_by_block(used: Path) -> None:
    rows = run("ls", NAMESPACE.id, "-c", used, "--tier", "nvme")["blocks"]
    hits = {row["key"]: row["hits"] for row in rows}
    assert [hits[key.hex()] for key in KEYS] == [3, 1, 0, 0, 0, 0, 0, 0]
    assert {row["used"] is None for row in rows if not row["hits"]} == {True}
    (cpu, nvme) = run("ls", KEYS[0].hex(), "-c", used)["copies"]
    assert (cpu["hits"], nvme["hits"]) == (3, 3)
    assert "hits       3" in command("ls", KEYS[0].hex(), "-c", used).out


def test_what_nobody_used_has_no_hits_in_a_store(stack_file: Path, tmp_path: Path) -> None:
    put(with_store(stack_file, tmp_path / "store"), KEYS)
    (part,) = run("ls", "-c", stack_file, "--tier", "object")["namespaces"]
    assert (part["blocks"], part["hits"], part["used"]) == (8, None, None)


HITS = [3, 1, 0, 0, 0, 0, 0, 0]


def hits_in(stack: Path, tier: str) -> list[int]:
    rows = run("ls", NAMESPACE.id[:8].upper(), "-c", stack, "--tier", tier)["blocks"]
    hits = {row["key"]: row["hits"] for row in rows}
    assert {row["used"] is None for row in rows if not row["hits"]} == {True}
    return [hits[key.hex()] for key in KEYS]


@pytest.mark.parametrize(
    "how",
    [
        "stack",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("store", "store to store")),
    ],
)
@pytest.mark.parametrize(
    "into", ["nvme", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cpu", "object"))]
)
def test_a_copy_takes_the_counts_along_once(
    used: Path, fresh: Path, tmp_path: Path, how: str, into: str
) -> None:
    with_store(fresh, tmp_path / "new store")
    if how == "stack":
        copy = ["prewarm", "--from", used]
    else:
        run("snapshot", "-c", used, "--to", f"file://{tmp_path}/store")
        copy = ["prewarm", "--from", f"file://{tmp_path}/store"]
    if how == "store to store":
        run(*copy, "-c", fresh, "--into", "object")
        copy = ["prewarm"] if into != "object" else copy
    before = used_at(used)
    for copied in (0 if how == "store to store" and into == "object" else 8, 0):
        (report,) = run(*copy, "-c", fresh, "--into", into)["namespaces"]
        assert report["copied"] == copied
        assert hits_in(fresh, into) == HITS
    (part,) = run("ls", "-c", fresh, "--tier", into)["namespaces"]
    assert part["hits"] == 4
    assert part["used"] in before
    with Stack.open(fresh, NAMESPACE) as stack:
        assert len(stack.load(KEYS[1:3])) == 2
        stack.settle()
    if into != "object":
        assert hits_in(fresh, into) == [3, 2, 1, 0, 0, 0, 0, 0], "counted on from there"


@pytest.mark.parametrize("words", [["verify"], ["gc", "--dry-run"]])
def test_counts_are_read_only_where_they_are_shown(
    words: list[str], used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = with_store(used, tmp_path / "store")
    assert app.run(["snapshot", "-c", str(stack)]) == 0
    read: list[str] = []
    monkeypatch.setattr(store_survey, "used_blocks", lambda store, _: read.append("listed"))
    monkeypatch.setattr(store_survey, "count_uses", lambda store, *_: read.append("counted"))
    assert app.run([*words, "-c", str(stack)]) == 0
    assert not read
    assert app.run(["ls", "-c", str(stack)]) == 0
    assert read == ["listed"]


@pytest.mark.parametrize("words", [["ls"], ["du"]])
def test_objects_are_looked_at_once_however_many_namespaces_there_are(
    words: list[str],
    stack_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And not once for each namespace: over months, versions pile up."""
    with_store(stack_file, tmp_path / "store")
    for model in "abcd":
        namespace = Namespace(facts={"model": model}, group_bytes=NAMESPACE.group_bytes)
        with Stack.open(stack_file, namespace) as stack:
            stack.store({key: payload(key, namespace) for key in KEYS})
            assert stack.settle()
            stack.load(KEYS[:1])
    looked: list[str] = []
    parse = store_survey.parse_block

    def count(name: str) -> tuple[str, BlockKey, int] | None:
        looked.append(name)
        return parse(name)

    for module in (inspector, store_survey):
        monkeypatch.setattr(module, "parse_block", count)
    assert app.run([*words, "-c", str(stack_file), "--tier", "object", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = (found if words == ["ls"] else found[0])["namespaces"]
    assert [(part["blocks"], part["hits"]) for part in parts] == [(8, 1)] * 4
    assert len(looked) == len(set(looked))


@pytest.mark.parametrize("how", ["snapshot", "prewarm"])
def test_the_hottest_first(used: Path, fresh: Path, tmp_path: Path, how: str) -> None:
    if how == "prewarm":
        words = ["prewarm", "-c", fresh, "--from", used]
    else:
        with_store(fresh, tmp_path / "store")
        words = ["snapshot", "-c", used, "--to", fresh]
    (copied,) = run(*words, "--hottest", "--size", "24KiB")["namespaces"]
    assert copied["copied"] == 2
    tier = "object" if how == "snapshot" else "nvme"
    rows = run("ls", NAMESPACE.id, "-c", fresh, "--tier", tier)["blocks"]
    assert {BlockKey(bytes.fromhex(row["key"])) for row in rows} == set(KEYS[:2])


@pytest.mark.slow
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
