"""Kills writers at random moments, hundreds of times, on one medium that lives through it all.

    python -m kvtier.testing.crash_campaign my_tests:SUBJECT --kills 300 --seed 1

After each death another process opens the medium and proves: every block that it offers has its
right bytes; every block whose commit was reported is there, unless its eviction was; nothing that
was aborted, or forgotten for good, came back; the capacity holds; and the room that the dead had
reserved is free again.

A writer dies by SIGKILL: at a call of the disk (in the middle of a write, too), at any step of the
bytecode of the tier, or at a random instant of the clock. The first two are the same for the same
seed. A subject that hands on no disk (it overrides neither `open_tier` nor `open_handler`) has no
deaths at its calls.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.testing.crash_processes import BLOCKS, Finding, Moment, Writer, look
from kvtier.testing.subject import Rig, Subject
from kvtier.types import BlockKey

KINDS = ("call", "step", "time")


class Broken(AssertionError):
    """A promise did not survive a crash."""


class Books:
    """What a medium must, may and must not hold, by what its writers have reported."""

    def __init__(self) -> None:
        self.due: set[BlockKey] = set()
        """Committed, and not known to be gone: must be found."""
        self.possible: set[BlockKey] = set()
        """Committed once, or about to be when the writer died."""
        self.banned: set[BlockKey] = set()
        """Aborted or forgotten, for good."""
        self.slack = 0
        """How many due blocks an unfinished reservation may have evicted unreported."""
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
            for what, _, text in (line.partition(" ") for line in lines):
                keys = set() if what == "N" else {_key(word) for word in text.split()}
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
                elif what == "G":
                    self.banned |= keys
            self.slack += unfinished
        self.committed += len(committed)
        self.due = (self.due | committed) - gone

    def check(self, finding: Finding, subject: Subject) -> None:
        """Raise Broken with the promises that the finding breaks; then go on from what is left."""
        found = {BlockKey(key) for key in finding.resident}
        lost = len(self.due - found)
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


class Campaign:
    """One medium and its many deaths."""

    def __init__(self, subject: Subject, folder: Path, seed: int, engines: int = 1) -> None:
        self.subject = subject
        self.folder = folder
        self.engines = engines
        self.dice = random.Random(seed)
        self.seed = seed
        self.books = Books()
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
        lives = [self._life(number + index, moment) for index, moment in enumerate(moments)]
        said = in_forks(lives)
        when = f"deaths {number} ({', '.join(map(str, moments))})"
        for line in chain.from_iterable(said):
            if line.startswith("N"):
                _, calls, steps = line.split()
                self._calls = max(self._calls, int(calls))
                self._steps = max(self._steps, int(steps))
            elif line.startswith("X"):
                raise Broken(f"a writer raised before {when}: {line[2:]}")
        self.deaths.update(moment.kind for moment in moments)
        self.books.read(said)
        try:
            self.books.check(self._look(), self.subject)
        except Broken as broken:
            raise Broken(f"after {when}: {broken}") from None
        self.proved += len(self.books.due)

    def _life(self, number: int, moment: Moment) -> Life:
        seed = self.seed * 1_000_003 + number
        engine = f"engine-{number % self.engines}" if self.engines > 1 else ""

        def live(pipe: int) -> None:
            Writer(self.subject, self.folder, pipe, seed, engine).live(moment)

        return Life(live, moment.at if moment.kind == "time" else None)

    def _look(self) -> Finding:
        """What a fresh process finds; it shuts down in order, or just vanishes."""
        keys = sorted(self.books.possible | self.books.banned)
        orderly = self.dice.random() < 0.5

        def check(pipe: int) -> None:
            rig = Rig(self.subject, self.folder, blocks=BLOCKS)
            finding = look(rig, keys)
            os.write(pipe, msgspec.json.encode(finding) + b"\n")
            if orderly:
                rig.close()

        (said,) = in_forks([Life(check)])
        if not said or said[0].startswith("X"):
            raise Broken(f"the checker fails: {said}")
        return msgspec.json.decode(said[0], type=Finding)


class Life(NamedTuple):
    """What a child does with its pipe, and after how many seconds it is killed, if by the clock."""

    work: Callable[[int], None]
    kill_after: float | None = None


def in_forks(lives: Sequence[Life]) -> list[list[str]]:
    """Run each in a child of its own until it is dead; what each wrote, by line."""
    children = [_fork(life.work) for life in lives]
    said = [b""] * len(lives)
    left = {pipe: index for index, (_, pipe) in enumerate(children)}
    begin = time.monotonic()
    due = sorted(
        (life.kill_after, children[index][0])
        for index, life in enumerate(lives)
        if life.kill_after is not None
    )
    while left:
        timeout = max(0.0, begin + due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select(list(left), [], [], timeout)
        if not ready:
            os.kill(due.pop(0)[1], signal.SIGKILL)
        for pipe in ready:
            chunk = os.read(pipe, 1 << 16)
            if chunk:
                said[left[pipe]] += chunk
            else:
                del left[pipe]
    for process, pipe in children:
        os.close(pipe)
        os.waitpid(process, 0)
    return [text.decode().splitlines() for text in said]


def _fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Start a child; its process number and the pipe that it writes to."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return child, read_end
    try:
        os.close(read_end)
        work(write_end)
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's stack
        text = " | ".join(traceback.format_exc().splitlines())
        os.write(write_end, f"X {text}\n".encode())
    finally:
        os._exit(0)


def _key(word: str) -> BlockKey:
    return BlockKey(bytes.fromhex(word))


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
        campaign = Campaign(subject, Path(folder), options.seed, options.engines)
        try:
            campaign.run(options.kills)
        except Broken as broken:
            print(f"BROKEN (seed {options.seed}): {broken}")
            return 1
    deaths = ", ".join(f"{count} by {kind}" for kind, count in sorted(campaign.deaths.items()))
    print(
        f"{campaign.deaths.total()} deaths ({deaths}); {campaign.books.committed} commits, "
        f"{campaign.books.evicted} evictions; {campaign.proved} blocks found and proved"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
