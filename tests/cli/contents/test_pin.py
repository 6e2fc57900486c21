"""`kvtier pin`, and what other commands and engines make of it."""

from __future__ import annotations

import errno
import json
import stat
import time
from pathlib import Path

import pytest
from support.processes.cli_world import command, run

from kvtier import Stack
from kvtier.cli import app
from kvtier.eviction.retention import PINNED
from kvtier.testing.subject import make_keys, payload
from kvtier.types import BlockKey, Namespace, Presence
from kvtier.vllm.identity.prompts import Prompt, chunk_keys

FACTS = {
    "model": "./model",
    "hash": "sha256_cbor",
    "hash_seed": "default",
    "block_tokens": "16",
    "chunk_blocks": "2",
}
ENGINE = Namespace(facts=FACTS, group_bytes=(4096,))
TOKENS = [7 * i % 50000 for i in range(200)]
KEYS = [key for (key,) in chunk_keys(Prompt(TOKENS), ENGINE)]
STORED = KEYS[:4]
STACK = """\
version: 1
name: pins
mover: {{mode: threads}}
prefetch: {{warmup_share: 0}}
retain: {{share: {share}}}
tiers:
  - {{kind: cpu, path: "{folder}/host", capacity: 128KiB, eviction: lru}}
  - {{kind: nvme, path: "{folder}/blocks", capacity: 1MiB, free_floor: 0, eviction: lru}}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"tokens": TOKENS}) + "\n")
    return path


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """Four chunks of the prompt are there, and something else."""
    (tmp_path / "host").mkdir()
    path = tmp_path / "stack.yaml"
    path.write_text(STACK.format(folder=tmp_path, share=0.25))
    with Stack.open(path, ENGINE) as opened:
        keys = [*STORED, *make_keys(4)]
        opened.store({key: payload(key, ENGINE) for key in keys})
        assert opened.settle()
    return path


def here(opened: Stack, keys: list[BlockKey]) -> int:
    return opened.chain.tiers[1].lookup(keys).count(Presence.HIT)


def flood(opened: Stack, start: int) -> None:
    """More than the disk holds."""
    for first in range(start, start + 240, 8):
        opened.store({key: payload(key, ENGINE) for key in make_keys(8, start=first)})
        assert opened.settle()


def test_what_is_pinned_outlives_a_flood_until_it_is_unpinned(stack: Path, prompts: Path) -> None:
    found = run("pin", "--prompts", prompts, "-c", stack)
    assert found["tiers"] == [{"tier": "1 nvme", "pinned": len(KEYS), "refused": 0}]
    file = stack.parent / "blocks" / ENGINE.id / "pinned.bin"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Stack.open(stack, ENGINE, serving=True) as opened:
        flood(opened, 100)
        assert here(opened, STORED) == len(STORED)
        assert here(opened, make_keys(4)) == 0
    assert run("pin", "--remove", "--prompts", prompts, "-c", stack) == {"removed": len(KEYS)}
    assert not file.exists()
    with Stack.open(stack, ENGINE, serving=True) as opened:
        flood(opened, 500)
        assert here(opened, STORED) == 0


def test_a_running_engine_heeds_it(stack: Path, prompts: Path) -> None:
    with Stack.open(stack, ENGINE, serving=True) as opened:
        tier = opened.chain.tiers[1]
        run("pin", "--prompts", prompts, "-c", stack)
        end = time.monotonic() + 60
        while list(tier.retained_for(PINNED)) != KEYS and time.monotonic() < end:
            opened.chain.poll()
        assert list(tier.retained_for(PINNED)) == KEYS
        command("pin", "--remove", "-c", stack)
        while tier.stats().retained and time.monotonic() < end:
            opened.chain.poll()
        assert tier.stats().retained == 0


def test_a_full_disk_is_named(
    stack: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvtier.slab.retention_list.write", full)
    assert app.run(["pin", "--prompts", str(prompts), "-c", str(stack)]) == 1
    where = stack.parent / "blocks" / ENGINE.id / "pinned.bin"
    assert f"kvtier: {where}: No space left on device; free some" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prewarm", "copy"])
def test_a_copy_evicts_last_what_its_engines_retain(
    stack: Path, prompts: Path, tmp_path: Path, how: str
) -> None:
    """The disk is full of newer blocks, and its engine is gone."""
    run("pin", "--prompts", prompts, "-c", stack)
    kept = make_keys(4)
    with Stack.open(stack, ENGINE, serving=True) as opened:
        opened.chain.retention.retain(kept, "agent 7", 600.0)
        flood(opened, 100)
        assert opened.chain.tiers[1].stats().evicted
    copied = make_keys(40, start=900)
    source = tmp_path / "source.yaml"
    source.write_text(STACK.format(folder=tmp_path / "source", share=0))
    (tmp_path / "source" / "host").mkdir(parents=True)
    with Stack.open(source, ENGINE) as opened:
        for at in range(0, 40, 8):
            opened.store({key: payload(key, ENGINE) for key in copied[at : at + 8]})
            assert opened.settle()
    _copy(how, source, stack)
    with Stack.open(stack, ENGINE, serving=True) as opened:
        assert here(opened, copied) == len(copied)
        assert (here(opened, STORED), here(opened, kept)) == (len(STORED), len(kept))
        assert list(opened.chain.tiers[1].retained_for("agent 7")) == kept
    lists = {path.name for path in (tmp_path / "blocks" / ENGINE.id).glob("*.bin")}
    assert lists == {"pinned.bin", "retained-pins.bin"}, "a copy leaves none of its own"


def _copy(how: str, source: Path, target: Path) -> None:
    """The blocks of the source's disk into the target's."""
    store = f"file://{source.parent}/store"
    if how == "prewarm":
        run("prewarm", "-c", target, "--from", source)
    else:
        run("copy", source, store)
        run("copy", store, target)


def test_a_copy_into_host_memory_evicts_last_what_is_retained_there(
    stack: Path, tmp_path: Path
) -> None:
    kept = make_keys(2, start=50)
    with Stack.open(stack, ENGINE, serving=True) as opened:
        opened.store({key: payload(key, ENGINE) for key in kept})
        assert opened.settle()
        opened.chain.retention.retain(kept, "agent 7", 600.0)
        flood(opened, 100)
    run("prewarm", "-c", stack, "--into", "cpu", "--size", "64KiB")
    with Stack.open(stack, ENGINE, serving=True) as opened:
        host = opened.chain.tiers[0]
        assert host.lookup(kept) == [Presence.HIT] * len(kept)


@pytest.mark.slow
def test_other_commands_show_it(stack: Path, prompts: Path) -> None:
    run("pin", "--prompts", prompts, "-c", stack)
    with Stack.open(stack, ENGINE, serving=True) as opened:
        opened.chain.retention.retain(STORED[:2], "agent 7", 600.0)
    rows = run("ls", "-c", stack)["namespaces"]
    assert {row["kind"]: row["retained"] for row in rows} == {"cpu": 2, "nvme": 4}
    assert "retained" in command("ls", "-c", stack).out
    blocks = run("ls", ENGINE.id, "-c", stack)["blocks"]
    kept = {row["key"]: row["retained"] for row in blocks if row["kind"] == "nvme"}
    assert kept[STORED[0].hex()] == ["agent 7", PINNED]
    assert kept[STORED[3].hex()] == [PINNED]
    assert "retained" in command("ls", ENGINE.id, "-c", stack).out
    shown = command("ls", STORED[0].hex(), "-c", stack).said
    assert "session agent 7, for 9" in shown
    assert "pinned, until it is removed" in shown
    assert run("ls", STORED[3].hex(), "-c", stack)["copies"][-1]["retained"] == [
        {"session": PINNED, "until": None}
    ]
    runs = run("explain", "--prompts", prompts, "-c", stack)["answers"][0]["runs"]
    assert [(each["first"], each["last"], each["retained"]) for each in runs] == [
        (0, 3, True),
        (4, 5, False),
    ]
    assert "(retained)" in command("explain", "--prompts", prompts, "-c", stack).out


def test_there_is_no_place_for_more(stack: Path, prompts: Path) -> None:
    stack.write_text(STACK.format(folder=stack.parent, share=0.03))
    done = command("pin", "--prompts", prompts, "-c", stack, "--tier", "nvme", "--for", "1h")
    assert done.code == 1
    assert "3 blocks of these prompts are pinned" in done.said
    assert "no place for 3 more" in done.said


def test_media_that_do_not_remember_say_so(stack: Path, prompts: Path) -> None:
    done = command("pin", "--prompts", prompts, "-c", stack, "--tier", "cpu")
    assert done.code == 1
    assert "no tier of this stack remembers what is pinned" in done.said


def test_lists_that_are_damaged_hide_nothing(stack: Path, prompts: Path) -> None:
    run("pin", "--prompts", prompts, "-c", stack)
    home = stack.parent / "blocks" / ENGINE.id
    (home / "pinned.bin").write_bytes(b"rubbish")
    done = command("ls", "-c", stack)
    assert done.code == 1
    assert "does not say what is retained" in done.said
    assert "nvme" in done.out
    assert "remove it" in command("pin", "--prompts", prompts, "-c", stack, "--tier", "nvme").said
    with Stack.open(stack, ENGINE, serving=True) as opened:
        assert here(opened, STORED) == len(STORED)
    assert command("clear", "-c", stack, "--yes").code == 0
    assert not home.exists()
