"""What was committed in one tier, and not written to the next when its engine was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes import held_life

from kvtier import Stack
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload

SLOT = record_bytes(NAMESPACE.payload_bytes)
COUNT = 12
KEYS = make_keys(COUNT)
BLOCKS = {key: payload(key) for key in KEYS}
PATIENCE_S = 30.0


def config(folder: Path, kinds: str, **last: Any) -> dict[str, Any]:
    (folder / "host").mkdir(exist_ok=True)
    tiers: list[dict[str, Any]] = [
        {"kind": "cpu", "path": str(folder / "host"), "capacity": 32 * (SLOT + 64) + 12288}
    ]
    if "nvme" in kinds:
        path = str(folder / "nvme")
        tiers.append({"kind": "nvme", "path": path, "capacity": "4MiB", "free_floor": 0})
    if "object" in kinds:
        url = f"file://{folder}/bucket"
        tiers.append({"kind": "object", "url": url, "capacity": "64MiB", "refresh": "50ms"})
    tiers[-1].update(last)
    return {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": tiers}


def killed(stack: dict[str, Any], held: int, count: int = COUNT, used: int = 0) -> None:
    """A life that commits so many blocks, and is killed before the held tier gets any."""
    done = subprocess.run(
        [
            *(sys.executable, held_life.__file__, msgspec.json.encode(stack).decode()),
            *map(str, (held, count, used)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def idle(stack: Stack) -> None:
    """Step as an engine does to which nobody talks, as long as kvtier wants it."""
    end = time.monotonic() + PATIENCE_S
    while stack.chain.has_pending_work and time.monotonic() < end:
        stack.mover.wait(0.001)
        stack.chain.poll()


def assert_all_below(stack: Stack, tier: int) -> None:
    """The tier serves every block with its bytes, alone."""
    assert stack.chain.tiers[tier].stats().blocks == COUNT
    for above in stack.chain.tiers[:tier]:
        above.forget(KEYS)
    assert stack.load(KEYS) == BLOCKS
    assert stack.chain.chain_stats().hits[tier] == COUNT


@pytest.mark.parametrize(
    ("kinds", "held"),
    [("cpu nvme", 1), ("cpu object", 1), ("cpu nvme object", 2)],
    ids=["cpu-nvme", "cpu-object", "nvme-object"],
)
def test_the_next_life_writes_what_the_one_before_could_not(
    tmp_path: Path, kinds: str, held: int
) -> None:
    described = config(tmp_path, kinds)
    killed(described, held)
    killed(described, held, count=0)
    if held == 2:  # so that it is the folder's blocks alone that can come down
        for root in (tmp_path / "host").iterdir():
            shutil.rmtree(root)
    with Stack.open(described, NAMESPACE) as stack:
        assert stack.chain.chain_stats().links[-1].behind == COUNT
        idle(stack)
        link = stack.chain.chain_stats().links[-1]
        assert (link.behind, link.written, link.drops) == (0, COUNT, {})
        assert_all_below(stack, held)


def test_what_is_below_already_is_not_written_again(tmp_path: Path) -> None:
    described = config(tmp_path, "cpu nvme object")
    with Stack.open(described, NAMESPACE) as stack:
        stack.store(BLOCKS)
        assert stack.settle()
    with Stack.open(described, NAMESPACE) as stack:
        assert [link.behind for link in stack.chain.chain_stats().links] == [COUNT, COUNT]
        idle(stack)
        links = stack.chain.chain_stats().links
        assert [(link.behind, link.offered) for link in links] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("write", ["never", "on_evict"])
def test_what_is_not_written_through_waits_for_its_time(tmp_path: Path, write: str) -> None:
    killed(config(tmp_path, "cpu nvme"), held=1)
    with Stack.open(config(tmp_path, "cpu nvme", write=write), NAMESPACE) as stack:
        idle(stack)
        assert not stack.chain.has_pending_work
        assert stack.chain.tiers[1].stats().blocks == 0


def test_second_touch_takes_what_the_dead_had_used_again(tmp_path: Path) -> None:
    described = config(tmp_path, "cpu nvme", admission="second_touch")
    killed(described, held=1, used=5)
    with Stack.open(described, NAMESPACE) as stack:
        idle(stack)
        assert stack.chain.tiers[1].stats().blocks == 5
        assert stack.load(KEYS[5:8]) == {key: BLOCKS[key] for key in KEYS[5:8]}
        idle(stack)
        assert stack.chain.tiers[1].stats().blocks == 8, "their second use"


@pytest.mark.parametrize("when", ["in this life", "in the next"])
def test_a_store_that_is_away_when_an_engine_starts_gets_the_blocks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Until it can be read everything seems to be missing there."""
    described = config(tmp_path, "cpu object")
    with Stack.open(described, NAMESPACE) as stack:
        stack.store({key: BLOCKS[key] for key in KEYS[:4]})
        assert stack.settle()
    described["tiers"][1]["write"] = "never"
    with Stack.open(described, NAMESPACE) as stack:
        stack.store({key: BLOCKS[key] for key in KEYS[4:]})
    del described["tiers"][1]["write"]

    def refuse(*_: Any, **__: Any) -> Any:
        raise Unavailable("the store is away")

    with monkeypatch.context() as away:
        for call in ("put", "get", "list"):
            away.setattr(FileStore, call, refuse)
        stack = Stack.open(described, NAMESPACE)
        for _ in range(50):
            stack.chain.poll()
        assert stack.chain.chain_stats().links[0].offered == 0
    if when == "in the next":
        stack.close()
        stack = Stack.open(described, NAMESPACE)
    with stack:
        end = time.monotonic() + PATIENCE_S
        while stack.chain.chain_stats().links[0].behind and time.monotonic() < end:
            stack.mover.wait(0.01)
            stack.chain.poll()
        assert stack.chain.chain_stats().links[0].written == COUNT - 4
        assert_all_below(stack, 1)
