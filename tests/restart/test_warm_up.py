"""An engine that starts on a full folder has its hottest blocks in CPU memory before they are asked
for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvtier import Stack
from kvtier.backends.nvme.tier import NvmeTier
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Presence

SLOT = record_bytes(NAMESPACE.payload_bytes)
KEYS = make_keys(24)
HOT = KEYS[8:12]


def config(folder: Path, mode: str, **prefetch: Any) -> dict[str, Any]:
    (folder / "host").mkdir(exist_ok=True)
    cpu = {"kind": "cpu", "path": str(folder / "host"), "capacity": 16 * (SLOT + 64) + 12288}
    nvme = {"kind": "nvme", "path": str(folder / "nvme"), "capacity": "4MiB", "free_floor": 0}
    return {
        "version": 1,
        "name": "unit",
        "mover": {"mode": mode},
        "prefetch": prefetch,
        "tiers": [cpu | {"persistence": "discard"}, nvme],
    }


@pytest.fixture(params=["threads", "process"])
def full(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A folder with all of the blocks, four of which were used after the others were stored."""
    with Stack.open(config(tmp_path, "threads"), NAMESPACE) as stack:
        for start in range(0, len(KEYS), 4):
            some = KEYS[start : start + 4]
            stack.store({key: payload(key) for key in some})
            assert stack.settle()
        tier = stack.chain.tiers[1]
        assert isinstance(tier, NvmeTier)
        tier._keeper.uses._clock = lambda: time.time() + 100
        tier.touch(HOT)
        tier.tick()
    return tmp_path, request.param


def test_the_hottest_blocks_are_here_before_anybody_asks(full: tuple[Path, str]) -> None:
    folder, mode = full
    with Stack.open(config(folder, mode, restart=0.5), NAMESPACE, serving=True) as stack:
        assert stack.chain.has_pending_work
        assert stack.settle()
        found = stack.chain.tiers[0].lookup(KEYS)
        here = [key for key, at in zip(KEYS, found, strict=True) if at is Presence.HIT]
        assert len(here) == 8
        assert set(HOT) <= set(here)
        assert stack.chain.chain_stats().prefetch.warmed == [0, 8]
        assert stack.load(KEYS) == {key: payload(key) for key in KEYS}


@pytest.mark.parametrize(("serving", "share"), [(True, 0), (False, 0.5)])
def test_commands_and_those_who_do_not_want_it_have_none_of_it(
    full: tuple[Path, str], serving: bool, share: float
) -> None:
    folder, mode = full
    with Stack.open(config(folder, mode, restart=share), NAMESPACE, serving=serving) as stack:
        assert stack.settle()
        assert stack.chain.tiers[0].stats().blocks == 0
