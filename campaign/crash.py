"""Kills writers at random moments, hundreds of times, on one medium that lives through it all.

    python -m campaign.crash my_tests:SUBJECT --kills 300 --seed 1

After each death another process opens the medium and proves: every block that it offers has its
right bytes; every block whose commit was reported is there, unless its eviction was; nothing that
was aborted, or forgotten for good, came back; the capacity holds; and the room that the dead had
reserved is free again.

A writer dies by SIGKILL: at a call of the disk (in the middle of a write, too), at any step of the
bytecode of the tier, or at a random instant of the clock. The first two are the same for the same
seed. A subject that hands on no disk (it overrides neither `open_tier` nor `open_handler`) has no
deaths at its calls.

The writer reports one line an event, each written before or after the deed so that a death between
the deed and the report can be told from a lie:

    T keys   about to store these           C keys   committed: `complete_store` has returned
    E keys   evicted by that reservation    F keys   about to drop these
    G keys   dropped, and flushed: must never come back
    R keys   given up by the tier itself, where the subject says that it may
    U        about to delete a file of itself, where the subject says that it may
    (and what the medium itself has recorded as given up needs no report)
    N calls steps   the whole life took so many calls of the disk and bytecode steps
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from campaign.children import Child, Say
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


class MediumState(msgspec.Struct, kw_only=True):
    """What a process that looks at the medium after a death has found there."""

    resident: list[bytes]
    given_up: list[bytes] = []
    """Blocks of which the medium itself says so."""
    served: int
    bytes_used: int
    bytes_capacity: int
    occupied_bytes: int
    in_flight: int
    room: int
    """Blocks that can be reserved without an eviction."""
    blocks: int
    capacity: int


TRACED = ("eviction", "interfaces", "record", "slab", "system")
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
        self, subject: Subject, folder: Path, say: Say, seed: int, engine: str = ""
    ) -> None:
        self._subject = subject
        self._folder = folder
        self._engine = engine
        self._say = say
        self._dice = random.Random(seed)
        self._keys = make_keys(ROUNDS * 8, start=1_000_000 * (seed + 1))

    def live(self, moment: Moment) -> None:
        """Open the medium, use it, die. The last line kills whoever outlived the moment."""
        sheds = self._subject.sheds and bool(self._engine)

        def plan(call: Call) -> Fault | None:
            dead = moment.kind == "call" and call.number == int(moment.at)
            if sheds and call.name == "unlink":
                self._say("U")
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
        self._say(f"N {disk.calls} {steps.count}")
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
        self._say(f"{what} {' '.join(key.hex() for key in keys)}")


def _removed(rig: Rig) -> list[BlockKey]:
    """What has left the tier since it was asked last."""
    events = rig.tier.take_events()
    return [key for each in events if each.kind is EventKind.REMOVED for key in each.keys]


def look(rig: Rig, keys: Sequence[BlockKey]) -> MediumState:
    """Load and prove everything that the tier offers of these keys, and measure its room."""
    given_up = rig.subject.recorded_removals(rig.folder)
    rig.settle()
    resident = rig.resident(keys)
    served = rig.get(resident)
    stats = rig.tier.stats()
    free: list[BlockKey] = []
    while more := rig.reserve(make_keys(rig.blocks, start=10**12), evict=False).keys:
        free += more
        rig.settle()  # a medium may grow in pieces
    rig.tier.complete_store(free, failures(free, Outcome.CANCELLED))
    return MediumState(
        resident=[bytes(key) for key in resident],
        given_up=[bytes(key) for key in given_up],
        served=len(served),
        bytes_used=stats.bytes_used,
        bytes_capacity=stats.bytes_capacity,
        occupied_bytes=rig.occupied_bytes(),
        in_flight=stats.in_flight,
        room=len(free),
        blocks=rig.blocks,
        capacity=rig.capacity,
    )


KINDS = ("call", "step", "time")


class Broken(AssertionError):
    """A promise did not survive a crash."""


class Ledger:
    """What a medium must, may and must not hold, by what its writers have reported."""

    def __init__(self) -> None:
        self.due: set[BlockKey] = set()
        """Committed, and not known to be gone: must be found."""
        self.possible: set[BlockKey] = set()
        """Committed once, or about to be when the writer died."""
        self.banned: set[BlockKey] = set()
        """Aborted or forgotten, for good."""
        self.slack = 0
        """How many due blocks may have gone unreported: by an unfinished reservation, or by who
        takes away what is beyond a budget."""
        self.committed = 0
        self.evicted = 0

    def read(self, writers: Sequence[Sequence[str]]) -> None:
        """Take in all that some writers said before they died.

        They lived at the same time: one may have evicted what another had committed, and which
        pipe is read first means nothing. No key is ever stored twice, so that sets tell it all.
        """
        self.slack = 0
        committed: set[BlockKey] = set()
        gone: set[BlockKey] = set()
        for lines in writers:
            unfinished = 0
            shed = [0, 0]  # files that it took away of itself, not yet reported: before R, since
            for what, _, text in (line.partition(" ") for line in lines):
                keys = (
                    set()
                    if what == "N"
                    else {BlockKey(bytes.fromhex(word)) for word in text.split()}
                )
                if what == "T":
                    unfinished = len(keys)
                    self.possible |= keys
                elif what == "E":
                    unfinished = 0
                    gone |= keys
                    self.evicted += len(keys)
                elif what == "C":
                    committed |= keys
                elif what in ("F", "R"):
                    gone |= keys
                    shed = [shed[1], 0] if what == "R" else shed
                elif what == "U":
                    shed[1] += 1
                elif what == "G":
                    self.banned |= keys
            self.slack += unfinished + sum(shed)
        self.committed += len(committed)
        self.due = (self.due | committed) - gone

    def check(self, finding: MediumState, subject: Subject) -> None:
        """Raise Broken with the promises that the finding breaks; then go on from what is left."""
        found = {BlockKey(key) for key in finding.resident}
        lost = len(self.due - found - {BlockKey(key) for key in finding.given_up})
        back = len(found & self.banned)
        alien = len(found - self.possible)
        limit = finding.capacity + subject.overhead_bytes
        usable = finding.room + len(found)
        promises = [
            (finding.served == len(found), f"{len(found) - finding.served} offers are not right"),
            (lost <= self.slack, f"{lost} committed blocks are lost"),
            (back == 0, f"{back} dropped blocks came back"),
            (alien == 0, f"{alien} blocks were never committed"),
            (finding.bytes_used <= finding.bytes_capacity, "more is used than there is"),
            (finding.occupied_bytes <= limit, f"the files take {finding.occupied_bytes} bytes"),
            (finding.in_flight == 0, f"{finding.in_flight} reservations outlived their owner"),
            (
                usable >= finding.blocks - subject.quarantine_blocks,
                f"only {usable} blocks have room",
            ),
        ]
        broken = [problem for kept, problem in promises if not kept]
        if broken:
            raise Broken("; ".join(broken))
        self.due &= found


class CrashCampaign:
    """One medium and its many deaths."""

    def __init__(self, subject: Subject, folder: Path, seed: int, engines: int = 1) -> None:
        self.subject = subject
        self.folder = folder
        self.engines = engines
        self.dice = random.Random(seed)
        self.seed = seed
        self.ledger = Ledger()
        self.deaths: Counter[str] = Counter()
        self.proved = 0
        self._calls = self._steps = 0
        self._seconds = 1.0

    def run(self, kills: int, looked: Callable[[], None] = lambda: None) -> None:
        """Measure a whole life once, then cut `kills` lives short, as many at a time as engines;
        say so after each look at what they left."""
        begin = time.monotonic()
        self._live(0, [Moment("call", -1)])
        self._seconds = time.monotonic() - begin
        self._live(1, [Moment("step", -1)])
        if self._steps <= 1:
            raise Broken("a whole life took no step of the code beside the backend's class")
        if self.subject.through_disk and self._calls <= 1:
            raise Broken("a whole life took no call of the disk that the subject was given")
        possible = [kind for kind in KINDS if kind != "call" or self.subject.through_disk]
        for number in range(2, kills + 2, self.engines):
            kinds = [possible[(number + engine) % len(possible)] for engine in range(self.engines)]
            self._live(number, [self._moment(kind) for kind in kinds])
            looked()

    def _moment(self, kind: str) -> Moment:
        if kind == "time":
            return Moment(kind, self.dice.uniform(0, self._seconds))
        return Moment(kind, self.dice.randrange(self._calls if kind == "call" else self._steps))

    def _live(self, number: int, moments: Sequence[Moment]) -> None:
        """Some lives at once, a death of each, one look."""
        begin = time.monotonic()
        children = [self._child(number + index, moment) for index, moment in enumerate(moments)]
        by_clock = [pair for pair in zip(moments, children, strict=True) if pair[0].kind == "time"]
        for moment, child in sorted(by_clock, key=lambda pair: pair[0].at):
            child.listen(begin + moment.at - time.monotonic())
            child.kill()
        for child in children:
            child.wait()
        said = [child.lines for child in children]
        when = f"deaths {number} ({', '.join(map(str, moments))})"
        for line in chain.from_iterable(said):
            if line.startswith("N"):
                _, calls, steps = line.split()
                self._calls = max(self._calls, int(calls))
                self._steps = max(self._steps, int(steps))
            elif line.startswith("raised"):
                raise Broken(f"a writer {line} before {when}")
        self.deaths.update(moment.kind for moment in moments)
        self.ledger.read(said)
        try:
            self.ledger.check(self._look(), self.subject)
        except Broken as broken:
            raise Broken(f"after {when}: {broken}") from None
        self.proved += len(self.ledger.due)

    def _child(self, number: int, moment: Moment) -> Child:
        seed = self.seed * 1_000_003 + number
        engine = f"engine-{number % self.engines}" if self.engines > 1 else ""
        return Child(lambda say: Writer(self.subject, self.folder, say, seed, engine).live(moment))

    def _look(self) -> MediumState:
        """What a fresh process finds; it shuts down in order, or just vanishes."""
        keys = sorted(self.ledger.possible | self.ledger.banned)
        orderly = self.dice.random() < 0.5

        def check(say: Say) -> None:
            rig = Rig(self.subject, self.folder, blocks=BLOCKS)
            say(f"found {msgspec.json.encode(look(rig, keys)).decode()}")
            if orderly:
                rig.close()

        child = Child(check)
        child.wait()
        if not (found := child.told("found")) or child.told("raised"):
            raise Broken(f"the checker fails: {child.lines}")
        return msgspec.json.decode(found[0], type=MediumState)


def load_subject(name: str) -> Subject:
    """The subject at "package.module:ATTRIBUTE"."""
    module, _, attribute = name.partition(":")
    subject = getattr(importlib.import_module(module), attribute)
    if not isinstance(subject, Subject):
        raise TypeError(f"{name} is {type(subject).__name__}, not a Subject")
    return subject


def main() -> int:
    """Run a campaign from the command line; 1 if a promise broke."""
    parser = argparse.ArgumentParser(description="Kill writers, and prove what they leave behind.")
    parser.add_argument("subject", help="a kvtier.testing.subject.Subject, as module:ATTRIBUTE")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1, help="writers at once (a shared medium)")
    options = parser.parse_args()
    subject = load_subject(options.subject)
    if options.engines > 1 and not subject.shared:
        parser.error(f"--engines {options.engines}: {options.subject} says that it is not shared")
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as folder:
        campaign = CrashCampaign(subject, Path(folder), options.seed, options.engines)
        try:
            campaign.run(options.kills)
        except Broken as broken:
            print(f"BROKEN (seed {options.seed}): {broken}")
            return 1
    deaths = ", ".join(f"{count} by {kind}" for kind, count in sorted(campaign.deaths.items()))
    print(
        f"{campaign.deaths.total()} deaths ({deaths}); {campaign.ledger.committed} commits, "
        f"{campaign.ledger.evicted} evictions; {campaign.proved} blocks found and proved"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
