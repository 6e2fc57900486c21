"""Asks the scheduler's side as vLLM does: block by block, windows from their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.cost.model import CostModel
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize
from kvtier.testing.subject import make_keys, payload
from kvtier.types import GROUP_BYTES, BlockKey, Namespace, group_of
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.protocol import Report
from kvtier.vllm.requests import Phase, Requests, RequestState

CHUNK = 256
TWO_GROUPS = Namespace(facts={"model": "unit"}, group_bytes=(8192, 8192))
SLOT = record_bytes(TWO_GROUPS.payload_bytes)
FULL, WINDOW, STATE = Shape(CHUNK), Shape(CHUNK, 2), Shape(CHUNK, 1, recurrent=True)


class AddingRequests(Requests):
    """Adds each request when a test first names it: vLLM adds it before it asks anything."""

    def of(self, request: str) -> RequestState:
        if self.get(request) is None:
            self.add(request, RequestState(phase=Phase.COMPUTING))  # which counts for nobody
        return super().of(request)

    def asked(self, request: str, scarce: bool = True) -> None:
        self.of(request)
        super().asked(request, scarce)


class AddingManager(ChainManager):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._requests.__class__ = AddingRequests


class Asking:
    """Requests with keys in all groups of a manager, and vLLM's way of looking them up."""

    def __init__(self, manager: ChainManager) -> None:
        self.manager = manager
        self.calls = 0

    def keys(self, chunks: int, first: int = 0) -> dict[bytes, int]:
        """A prompt's keys with their ends, group after group."""
        return {
            key: (at + 1) * shape.tokens
            for group, shape in self.manager.shapes.items()
            for at, key in enumerate(make_keys(chunks, start=first, group=group))
        }

    def hit(self, request: str, ends: Mapping[bytes, int], tokens: int, start: int = 0) -> int:
        """As vLLM's scheduler: full attention from its start, then windows from their end."""
        self.manager.begin_lookup(request, start, tokens)
        groups = self.manager.shapes
        windowed = any(shape.window for shape in groups.values())
        hit = tokens - windowed
        if any(shape.recurrent for shape in groups.values()):
            hit = hit // CHUNK * CHUNK
        for group, shape in sorted(groups.items(), key=lambda each: each[1].window or 0):
            suffix = group.to_bytes(GROUP_BYTES, "big")
            mine = [key for key in ends if key.endswith(suffix)]
            asked = mine[start // CHUNK : -(-hit // CHUNK)]
            found = self._window(request, ends, asked, shape.window)
            if not found:
                return 0
            hit = min(hit, start // CHUNK * CHUNK + found * CHUNK)
        return hit

    def answers(self, request: str, ends: Mapping[bytes, int], tokens: int) -> set[bool | None]:
        """What it is told of all keys."""
        self.manager.begin_lookup(request, 0, tokens)
        return {self.manager.lookup(key, request, ends) for key in ends}

    def needed(self, ends: Mapping[bytes, int]) -> list[bytes]:
        """What a hit on all of a prompt takes."""
        tokens = max(ends.values())
        return [
            key
            for key, end in ends.items()
            if (window := self._window_of(key)) is None or tokens - window * CHUNK < end
        ]

    def serve(self, request: str, ends: Mapping[bytes, int]) -> int:
        """As an engine: it looks up, and keeps all of what has no window, and else the ends of the
        prompt and of what it shares with others. Answers with the hit."""
        tokens = max(ends.values()) + 1
        self.manager.on_new_request(request)
        hit = self.hit(request, ends, tokens)
        self.manager.mark_used(request, ends)
        kept = [
            key
            for at in (hit, self.manager.junction(request), tokens - 1)
            for key, end in ends.items()
            if (window := self._window_of(key)) is None or at - window * CHUNK < end <= at
        ]
        kept = list(dict.fromkeys(kept))[::-1]
        _, worker_job = self.manager.prepare_store(kept, request)
        self.manager.report(worker_job.number, Report(1))
        self.manager.on_request_finished(request)
        self.manager.on_schedule_end()
        return hit

    def _window_of(self, key: bytes) -> int | None:
        return self.manager.shapes[group_of(BlockKey(key))].window

    def _window(
        self, request: str, ends: Mapping[bytes, int], keys: list[bytes], window: int | None
    ) -> int:
        if window is None:
            for at, key in enumerate(keys):
                if not self.manager.lookup(key, request, ends):
                    return at
            return len(keys)
        streak = 0
        for at in reversed(range(len(keys))):
            streak = streak + 1 if self.manager.lookup(keys[at], request, ends) else 0
            if streak == window:
                return at + window
        return streak


def stored(stack: Stack, ends: Mapping[bytes, int], *, but: int = 0) -> None:
    """Let these lie in host memory, all but the last few of each group."""
    keys = [BlockKey(key) for key, end in ends.items() if end <= max(ends.values()) - but * CHUNK]
    assert len(stack.store({key: payload(key, TWO_GROUPS) for key in keys})) == len(keys)


def on_disk(stack: Stack, *prompts: Mapping[bytes, int]) -> None:
    """Let these lie below host memory alone, which need not have room for more than one."""
    for ends in prompts:
        stored(stack, ends)
        assert stack.settle()
        stack.chain.tiers[0].forget([BlockKey(key) for key in ends])


def manager(
    stack: Stack,
    *shapes: Shape,
    costs: CostModel | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Asking:
    made = AddingManager(stack, region="region", ranks=1, costs=costs, clock=clock)
    made.shapes = dict(enumerate(shapes))
    return Asking(made)


def costs_of(now: list[float], *, known: bool = True) -> CostModel:
    """What an engine costs by this clock, that computes a kilotoken a second, if that is known."""
    costs = CostModel(clock=lambda: now[0])
    if known:
        costs.observe_prefill(1024, 1.0)
    return costs


def host_memory(folder: Path) -> dict[str, Any]:
    (folder / "host").mkdir()
    cpu = {"kind": "cpu", "path": str(folder / "host"), "capacity": str(ByteSize(64 * SLOT))}
    return {
        "version": 1,
        "name": "unit",
        "mover": {"mode": "threads"},
        "tiers": [cpu | {"eviction": "lru"}],
    }


def small_above_large(folder: Path, slots: int = 13) -> dict[str, Any]:
    (folder / "host").mkdir(exist_ok=True)
    cpu = {"kind": "cpu", "path": str(folder / "host"), "capacity": str(ByteSize(slots * SLOT))}
    nvme = {"kind": "nvme", "path": str(folder / "nvme"), "capacity": "16MiB", "free_floor": 0}
    return {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu, nvme]}
