"""The stacks that scenarios open (host memory, a folder and a store, all in a round's folder), what
they do with them, commands beside them, and clocks that are wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from campaign.children import Child, Say
from kvtier import Stack
from kvtier.cli import app
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Presence

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


def use(stack: Stack, dice: Random, blocks: int, seconds: float) -> tuple[int, int, list[str]]:
    """Load a few of three times as many blocks as there is room for, and store those that are not
    there; how many were loaded and stored, and which came with wrong bytes."""
    universe = make_keys(3 * blocks)
    start = dice.randrange(len(universe))
    some = universe[start : start + 8]
    found = stack.load(some, seconds)
    stored = stack.store(payloads([key for key in some if key not in found]), seconds)
    if dice.random() < 0.3:  # else all would be found in memory
        stack.settle(0.2)
        stack.chain.tiers[0].forget(universe)
    return len(found), len(stored), wrong_in(found)


def lacking_full_service(stack: Stack, start: int, seconds: float = 60.0) -> str:
    """What is wrong once all is well again: every tier has to keep what is stored from now on, and
    to serve it where those above have lost it. Empty if it does, within so many seconds."""
    end, kept = time.monotonic() + seconds, ""
    tiers = stack.chain.tiers
    while time.monotonic() < end:
        keys = make_keys(8, start=start)
        start += 1000
        stack.store(payloads(keys))
        idle(stack, 5.0)
        stack.settle(5.0)
        counts = {tier.medium: tier.lookup(keys).count(Presence.HIT) for tier in tiers}
        if set(counts.values()) == {len(keys)}:
            for number, tier in enumerate(tiers):
                for above in tiers[:number]:
                    above.forget(keys)
                if len(found := stack.load(keys, 20.0)) < len(keys) or wrong_in(found):
                    return f"only {len(found)} of {len(keys)} blocks are loaded from {tier.medium}"
            return ""
        kept = f"of {len(keys)} blocks tiers keep no more than {counts}"
        stack.mover.wait(0.2)
    return kept


def run_command(stack: Path, text: str) -> Child:
    """A command of kvtier on the stack of this file; what it prints goes to `said` beside that."""

    def work(say: Say) -> None:
        out = os.open(stack.with_name("said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        say(f"command {text}")
        code = app.run([*text.split(), "-c", str(stack)])
        said = stack.with_name("said").read_text(errors="replace")[-2000:].replace("\n", " ")
        say(f"ended {code} {said if code else ''}".rstrip())

    return Child(work)


@contextmanager
def wrong_clock(off_ns: Callable[[], int]) -> Iterator[None]:
    """Have the wall clock off by so much."""
    now_ns = time.time_ns

    def wrong_ns() -> int:
        return now_ns() + off_ns()

    def wrong() -> float:
        return wrong_ns() / 1e9

    with mock.patch.object(time, "time", wrong), mock.patch.object(time, "time_ns", wrong_ns):
        yield
