"""The stacks that scenarios open: host memory, a folder and a store, all in a round's folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier import Stack
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, payload
from kvtier.types import BlockKey

SLOT = record_bytes(NAMESPACE.payload_bytes)


def described(
    folder: Path, *, host: str = "host", blocks: int = 2048, **more: Any
) -> dict[str, Any]:
    """A stack of three tiers with room for so many blocks each; `more` is for its last tier."""
    (folder / host).mkdir(parents=True, exist_ok=True)
    size = blocks * (SLOT + 64) + (1 << 20)
    store = {"kind": "object", "url": f"file://{folder}/store", "capacity": size}
    return {
        "version": 1,
        "name": "campaign",
        "mover": {"mode": "threads"},
        "tiers": [
            {"kind": "cpu", "path": str(folder / host), "capacity": size},
            {"kind": "nvme", "path": str(folder / "nvme"), "capacity": size, "free_floor": 0},
            {**store, "refresh": "200ms", **more},
        ],
    }


def payloads(keys: Sequence[BlockKey]) -> dict[BlockKey, bytes]:
    """The right bytes of each."""
    return {key: payload(key) for key in keys}


def wrong_in(found: dict[BlockKey, bytes]) -> list[str]:
    """The keys that came with other bytes than theirs."""
    return [key.hex() for key, data in found.items() if data != payload(key)]


def idle(stack: Stack, seconds: float = 30.0) -> None:
    """Step as an engine does that nobody talks to, as long as kvtier wants it."""
    end = time.monotonic() + seconds
    while stack.chain.has_pending_work and time.monotonic() < end:
        stack.mover.wait(0.001)
        stack.chain.poll()
