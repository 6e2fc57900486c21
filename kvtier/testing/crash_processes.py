"""What the processes of a crash test do: one that is killed while it writes, one that checks.

The writer reports over a pipe, one line an event, each written before or after the deed so that a
death between the deed and the report can be told from a lie:

    T keys   about to store these           C keys   committed: `complete_store` has returned
    E keys   evicted by that reservation    F keys   about to drop these
    G keys   dropped, and flushed: must never come back
    R keys  given up by the tier itself, where the subject says that it may
    N calls steps   the whole life took so many calls of the disk and bytecode steps
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from kvtier.errors import KVTierError
from kvtier.interfaces.backend import Backend
from kvtier.testing.faults import Call, Fault, FaultyDisk, die
from kvtier.testing.subject import Rig, Subject, failures, make_keys
from kvtier.types import BlockKey, EventKind, Outcome

BLOCKS = 16
ROUNDS = 12


class Moment(msgspec.Struct, frozen=True):
    """When a writer dies: at a call of the disk, at a step of its bytecode, or when told so."""

    kind: str
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.at:g}"


class Finding(msgspec.Struct, kw_only=True):
    """What a process that looks at the medium after a death has found there."""

    resident: list[bytes]
    served: int
    bytes_used: int
    bytes_capacity: int
    occupied_bytes: int
    in_flight: int
    room: int
    """Blocks that can be reserved without an eviction."""
    blocks: int
    capacity: int


TRACED = ("core", "eviction", "interfaces", "record", "slab", "system")
"""The folders of the library that a tier's own code is made of."""


class Steps:
    """Counts the bytecode steps of a tier's own code, and dies at one of them."""

    def __init__(self, backend: Backend[Any], last: int) -> None:
        library = Path(inspect.getfile(KVTierError)).parent
        own = Path(inspect.getfile(type(backend))).parent
        places = [own, *(library / folder for folder in TRACED)]
        self.places = tuple(
            f"{path}{os.sep}" for place in places for path in (place, place.resolve())
        )
        self.last = last
        self.count = 0

    def start(self) -> None:
        # Python 3.12 traces no instructions if no frame has asked for that before.
        sys._getframe().f_trace_opcodes = True
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.places):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.last:
                die()
        return self._step


class Writer:
    """Stores, loads and forgets on a medium until it is killed."""

    def __init__(
        self, subject: Subject, folder: Path, pipe: int, seed: int, engine: str = ""
    ) -> None:
        self._subject = subject
        self._folder = folder
        self._engine = engine
        self._pipe = pipe
        self._dice = random.Random(seed)
        self._keys = make_keys(ROUNDS * 8, start=1_000_000 * (seed + 1))

    def live(self, moment: Moment) -> None:
        """Open the medium, use it, die. The last line kills whoever outlived the moment."""
        sheds = self._subject.sheds and bool(self._engine)

        def plan(call: Call) -> Fault | None:
            dead = moment.kind == "call" and call.number == int(moment.at)
            if sheds and call.name == "unlink":
                self._say("U", "")
            return Fault.DEATH if dead else None

        disk = FaultyDisk(plan, seed=self._dice.randrange(1 << 30))
        steps = Steps(self._subject.backend, int(moment.at))
        if moment.kind == "step":
            steps.start()
        rig = Rig(self._subject, self._folder, blocks=BLOCKS, disk=disk, engine=self._engine)
        mine: list[BlockKey] = []
        for number in range(ROUNDS):
            keys = self._keys[number * 8 :][: self._dice.randint(1, 6)]
            self._store(rig, keys)
            mine += keys
            some = self._dice.sample(mine, min(len(mine), 4))
            rig.get(some)
            rig.tier.touch(some)
            if self._dice.random() < 0.2:
                self._forget(rig, some[:2])
            rig.tier.tick()
            if sheds:
                self._report("R", _removed(rig))
        self._say("N", f"{disk.calls} {steps.count}")
        die()

    def _store(self, rig: Rig, keys: Sequence[BlockKey]) -> None:
        self._report("T", keys)
        reservation = rig.reserve(keys)
        self._report("E", reservation.evicted)
        failed = rig.write(reservation)
        if self._dice.random() < 0.2:
            failed |= failures(reservation.keys[:1], Outcome.CANCELLED)
        rig.tier.complete_store(reservation.keys, failed)
        self._report("C", [key for key in reservation.keys if key not in failed])
        if failed:
            rig.tier.flush()
            self._report("G", list(failed))

    def _forget(self, rig: Rig, keys: Sequence[BlockKey]) -> None:
        pinned = rig.resident(keys)[:1]
        rig.tier.prepare_load(pinned)
        self._report("F", keys)
        rig.tier.forget(keys)
        rig.tier.flush()
        if not self._engine:  # else the room may be another engine's by now, and only it can tell
            self._report("G", keys)
        rig.tier.complete_load(pinned)

    def _report(self, what: str, keys: Sequence[BlockKey]) -> None:
        self._say(what, " ".join(key.hex() for key in keys))

    def _say(self, what: str, text: str) -> None:
        os.write(self._pipe, f"{what} {text}\n".encode())


def _removed(rig: Rig) -> list[BlockKey]:
    """What has left the tier since it was asked last."""
    events = rig.tier.take_events()
    return [key for each in events if each.kind is EventKind.REMOVED for key in each.keys]


def look(rig: Rig, keys: Sequence[BlockKey]) -> Finding:
    """Load and prove everything that the tier offers of these keys, and measure its room."""
    rig.settle()
    resident = rig.resident(keys)
    served = rig.get(resident)
    stats = rig.tier.stats()
    free: list[BlockKey] = []
    while more := rig.reserve(make_keys(rig.blocks, start=10**12), evict=False).keys:
        free += more
        rig.settle()  # a medium may grow in pieces
    rig.tier.complete_store(free, failures(free, Outcome.CANCELLED))
    return Finding(
        resident=[bytes(key) for key in resident],
        served=len(served),
        bytes_used=stats.bytes_used,
        bytes_capacity=stats.bytes_capacity,
        occupied_bytes=rig.occupied_bytes(),
        in_flight=stats.in_flight,
        room=len(free),
        blocks=rig.blocks,
        capacity=rig.capacity,
    )
