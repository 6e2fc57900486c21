"""What the commands that look at a stack print, for people and for programs."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from support.processes.cli_world import command, every_kind

from kvtier import Stack
from kvtier.amounts import size
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Namespace

pytestmark = pytest.mark.slow

ALL = [
    ["ls"],
    ["ls", NAMESPACE.id],
    ["du"],
    ["ls", make_keys(1)[0].hex()],
    ["verify"],
    ["verify", "--sample=50%"],
    ["gc", "--dry-run"],
    ["bench", "--chunk", "4KiB", "--blocks", "2", "--rounds", "1"],
    ["doctor"],
]
every = pytest.mark.parametrize("words", ALL, ids=lambda words: "-".join(words[:2]))
FACTS = {"model": "x" * 20, "dtype": "torch.bfloat16", "block_tokens": "128", "chunk_blocks": "16"}


@every
def test_no_file_named(words: list[str]) -> None:
    done = command(*words)
    assert done.code == 2
    assert "--config" in done.err


def test_a_block_takes_a_line_of_a_terminal(filled: Path) -> None:
    out = command("ls", NAMESPACE.id, "-c", filled, "-t", "nvme", columns=80).out
    assert out.startswith(f"namespace {NAMESPACE.id}\n")
    head, _, *lines = out.split("\n\n")[-1].splitlines()
    assert head.split() == ["tier", "key", "group", "size", "hits", "last", "hit", "age"]
    assert len(lines) == 8
    shown = command("ls", lines[0].split()[2], "-c", filled)
    assert shown.code == 0
    assert "namespace  " + NAMESPACE.id in shown.out


def test_a_tier_takes_a_line_of_a_terminal(filled: Path) -> None:
    """Under a line for each namespace, with what is the same in all tiers."""
    with Stack.open(filled, Namespace(facts=FACTS, group_bytes=(4096,))) as stack:
        key = make_keys(1)[0]
        stack.store({key: bytes(4096)})
        assert stack.settle()
    out = command("ls", "-c", filled, columns=80).out
    assert max(map(len, out.splitlines())) <= 80
    sections = [section.splitlines() for section in out.split("\n\n")]
    assert sorted(section[0].split()[1] for section in sections) == ["testing", "x" * 20]
    for _, head, _, *lines in sections:
        assert head.split()[:4] == ["tier", "blocks", "size", "hits"]
        assert {line.split()[1] for line in lines} <= {"cpu", "nvme"}
    wide = command("ls", "-c", filled, columns=160).out
    assert wide.split()[:3] == ["tier", "namespace", "model"]


@every
@every_kind
def test_json(words: list[str], filled: Path) -> None:
    done = command(*words, "-c", filled, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)


def test_slabs_are_called_like_their_files(filled: Path) -> None:
    names = [each.stem for each in (filled.parent / "disk").rglob("*.table")]
    said = command("du", "-c", filled, "--tier", "1").out
    assert names
    assert all(f" {name} " in said for name in names)


def test_what_is_used_is_told_from_what_is_allocated(filled: Path) -> None:
    (nvme,) = json.loads(command("du", "-c", filled, "-t", "nvme", "--json").out)
    assert nvme["used"] == 8 * record_bytes(NAMESPACE.payload_bytes)
    assert nvme["used"] < nvme["allocated"] <= nvme["capacity"]
    said = command("du", "-c", filled, "-t", "nvme").said
    assert f"used {size(nvme['used'])} by 8 blocks allocated {size(nvme['allocated'])}" in said


@pytest.mark.parametrize("words", [["ls"], ["ls", "{id}"], ["ls", "{id}", "--json"]])
def test_names_do_not_command_the_terminal(words: list[str], stack_file: Path) -> None:
    """A namespace's facts come from whoever may write to the folder or bucket."""
    hostile = Namespace(facts={"model": "\x1b]0;mine\x07\x9b2J\r"}, group_bytes=(4096,))
    with Stack.open(stack_file, hostile) as stack:
        key = make_keys(1)[0]
        stack.store({key: payload(key, hostile)})
        assert stack.settle()
    done = command(*[word.format(id=hostile.id) for word in words], "-c", stack_file)
    assert done.code == 0
    assert "mine" in done.out
    assert not set(done.out) & set("\x1b\x07\r") | set(done.err)
    assert "--json" in words or "\x9b" not in done.out


def test_of_two_namespaces_with_the_same_digits_none_is_shown(
    stack_file: Path, tmp_path: Path
) -> None:
    seen: dict[str, Namespace] = {}
    for number in count():
        first = Namespace(facts={"model": str(number)}, group_bytes=(4096,))
        second = seen.setdefault(first.id[:4], first)
        if second is not first:
            break
    for namespace in (first, second):
        home = tmp_path / "disk" / "blocks" / namespace.id
        home.mkdir(parents=True)
        (home / "namespace.json").write_bytes(namespace.to_json())
    done = command("ls", first.id[:4], "-c", stack_file, "--json")
    assert (done.code, done.out) == (1, "")
    assert "2 namespaces begin with" in done.err
    done = command("ls", first.id, "-c", stack_file)
    assert (done.code, "is another, because" in done.out) == (0, False), (
        "another model's is no news"
    )


def test_what_keeps_two_namespaces_of_a_model_apart(stack_file: Path, tmp_path: Path) -> None:
    shared = {"model": "a/model", "dtype": "bfloat16"}
    old = Namespace(facts=shared | {"engine": "1"}, group_bytes=(4096,))
    new = Namespace(facts=shared | {"engine": "2", "model": "model"}, group_bytes=(4096,))
    for namespace in (old, new):
        home = tmp_path / "disk" / "blocks" / namespace.id
        home.mkdir(parents=True)
        (home / "namespace.json").write_bytes(namespace.to_json())
    shown = command("ls", new.id, "-c", stack_file).out
    assert f"the same model's namespace {old.id[:12]} is another, because" in shown
    assert "engine: 2 here, 1 there" in shown
    assert "model: model here, a/model there" in shown
    assert "dtype:" not in shown
    shown = json.loads(command("ls", new.id, "-c", stack_file, "--json").out)
    assert [each["fact"] for each in shown["differs"][old.id]] == ["engine", "model"]


@pytest.mark.parametrize("weights", ["equal", "other"])
def test_one_model_under_two_names(weights: str, stack_file: Path, tmp_path: Path) -> None:
    """`./model` and `/models/model`, say, whose name stands in the digest of the configuration."""
    facts = {"model": "./model", "model_config": "1", "weights": "equal", "dtype": "bfloat16"}
    again = facts | {"model": "/models/model", "model_config": "2", "weights": weights}
    both = [Namespace(facts=each, group_bytes=(4096,)) for each in (facts, again)]
    for namespace in both:
        with Stack.open(stack_file, namespace) as stack:
            key = make_keys(1)[0]
            stack.store({key: bytes(4096)})
            assert stack.settle()
    tokens = tmp_path / "prompts.jsonl"
    tokens.write_text('{"tokens": [1]}\n')
    names = [f"{each.id[:12]} ({each.facts['model']})" for each in both]
    fresh = tmp_path / "fresh.yaml"
    fresh.write_text(stack_file.read_text().replace("/blocks", "/fresh"))
    for words in (["ls"], ["explain", "--prompts", tokens], ["prewarm", "--from", stack_file]):
        done = command(*words, "-c", fresh if words[0] == "prewarm" else stack_file)
        assert all((name in done.said) is (weights == "equal") for name in names), words
        assert ("the same weights under several names" in done.said) is (weights == "equal")
