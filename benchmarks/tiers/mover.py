"""The mover on threads beside the mover as a process, with an idle and with a busy main thread.

    python -m benchmarks.tiers.mover              JSON=result.json python -m benchmarks.tiers.mover
    python -m benchmarks.tiers.mover --folder /mnt/nvme --rounds 15

An engine's scheduler runs Python without a pause. So the question is not only how fast each mover
is, but what it is when the GIL is never free, and what the scheduler itself loses to it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report
from kvtier.interfaces.backend import TierContext, backend
from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import Mover, Transfer, TransferKind
from kvtier.interfaces.tier import Tier
from kvtier.move.process import ProcessMover
from kvtier.move.threads import ThreadMover
from kvtier.record import record as records
from kvtier.settings import ByteSize, Capacity, Persistence
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, SlotSpec, block_key

COUNT = 256
SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20}
MOVERS = ("threads", "process")
STEP_LOOPS = 2000
WARM_UP = 2


class Media:
    """A CPU and an NVMe tier that hold the same blocks, and both movers over them."""

    def __init__(self, folder: Path, payload: int) -> None:
        namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(payload,))
        context = TierContext(namespace, f"benchmark-{os.getpid()}-{payload}")
        size = records.record_bytes(payload)
        cpu, nvme = backend("cpu"), backend("nvme")
        settings = [
            cpu.settings(
                capacity=Capacity.parse((COUNT + 1) * (size + 64) + 16384),
                name="benchmark-mover",
                eviction="lru",
                persistence=Persistence.DISCARD,
            ),
            nvme.settings(
                capacity=Capacity.parse(2 * COUNT * size + (4 << 20)),
                path=str(folder / str(payload)),
                free_floor=ByteSize(0),
                persistence=Persistence.DISCARD,
            ),
        ]
        kinds = (cpu, nvme)
        self.tiers = [
            kind.open_tier(each, context) for kind, each in zip(kinds, settings, strict=True)
        ]
        self.keys = [block_key(b"%d" % index) for index in range(COUNT)]
        self.specs = [reserve(tier, self.keys) for tier in self.tiers]
        handlers = [
            kind.open_handler(each, context) for kind, each in zip(kinds, settings, strict=True)
        ]
        host = handlers[0]
        assert isinstance(host, HostHandler)
        for key, view in zip(self.keys, host.views(self.specs[0]), strict=True):
            records.seal(view, records.Header(key, namespace.digest, payload))
        self.tiers[0].complete_store(self.keys)
        self.movers: dict[str, Mover] = {
            "threads": ThreadMover(handlers, namespace),
            "process": ProcessMover(settings, context),
        }
        self._ids = itertools.count(1)

    def transfer(self, kind: TransferKind, blocks: int) -> Transfer:
        """The first so many blocks, up or down."""
        source, target = (1, 0) if kind is TransferKind.LOAD else (0, 1)
        keys: list[BlockKey] = self.keys[:blocks]
        return Transfer(
            id=next(self._ids),
            kind=kind,
            source=source,
            target=target,
            keys=keys,
            source_spec=self.specs[source].select(0, blocks),
            target_spec=self.specs[target].select(0, blocks),
            deadline=time.monotonic() + 60,
        )

    def run(
        self, mover: Mover, kind: TransferKind, blocks: int, *, busy: bool
    ) -> tuple[float, int]:
        """Seconds from submission to the result in hand, and the steps made meanwhile."""
        transfer = self.transfer(kind, blocks)
        steps = 0
        start = time.perf_counter()
        accepted = mover.submit(transfer)
        assert accepted
        while not (results := mover.poll()):
            if busy:
                step()
                steps += 1
            else:
                mover.wait(1.0)
        wall = time.perf_counter() - start
        assert all(outcome is Outcome.OK for outcome in results[0].outcomes)
        return wall, steps

    def close(self) -> None:
        """End everything; the media are discarded."""
        for mover in self.movers.values():
            mover.close()
        self.tiers[1].complete_store(self.keys)
        for tier in self.tiers:
            tier.close()


class NullHandler(Handler):
    """Moves nothing in no time, so that what is left is the mover itself."""

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[records.Buffer]
    ) -> list[Outcome]:
        return [Outcome.OK] * len(keys)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[records.Buffer]
    ) -> list[Outcome]:
        return [Outcome.OK] * len(keys)


class NullMemory(NullHandler, HostHandler):
    """Host memory in which all records are one."""

    def __init__(self, record: records.Buffer) -> None:
        self._record = record

    def views(self, spec: LoadStoreSpec) -> list[records.Buffer]:
        return [self._record] * len(spec)

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        pass


def measure_overhead(report: Report, rounds: int) -> None:
    """CPU time a block of a mover whose handlers do nothing."""
    namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(4096,))
    record = memoryview(bytearray(records.record_bytes(4096)))
    mover = ThreadMover([NullMemory(record), NullHandler()], namespace)
    costs = []
    for number in range(rounds * 20):
        spec = SlotSpec(list(range(COUNT)))
        keys = [block_key(b"%d" % index) for index in range(COUNT)]
        transfer = Transfer(
            id=number,
            kind=TransferKind.STORE,
            source=0,
            target=1,
            keys=keys,
            source_spec=spec,
            target_spec=spec,
            deadline=time.monotonic() + 60,
        )
        start = time.process_time()
        mover.submit(transfer)
        while not mover.poll():
            mover.wait(1.0)
        costs.append(time.process_time() - start)
    mover.close()
    report.at_most("the mover itself", statistics.median(costs) / COUNT * 1e6, "us a block", 6)


def reserve(tier: Tier, keys: list[BlockKey]) -> LoadStoreSpec:
    """Places for all keys; a new folder makes its room in the background."""
    pieces: list[LoadStoreSpec] = []
    until = time.monotonic() + 30
    while rest := keys[sum(map(len, pieces)) :]:
        assert time.monotonic() < until, "the tier makes no room"
        tier.tick()
        reservation = tier.prepare_store(rest, evict=False)
        assert reservation.keys == rest[: len(reservation.keys)]
        if reservation.keys:
            pieces.append(reservation.spec)
    return type(pieces[0]).join(pieces)


def step() -> int:
    """What a scheduler does all the time: Python, about a tenth of a millisecond of it."""
    value = 1
    for _ in range(STEP_LOOPS):
        value = value * 31 + 7 & 0xFFFF
    return value


def step_rate() -> float:
    """Steps a second with nothing else going on in this process, polling as between any two."""
    start = time.perf_counter()
    for _ in range(200):
        step()
    return 200 / (time.perf_counter() - start)


def measure(report: Report, label: str, media: Media, rounds: int) -> None:
    """All cases one after the other in every round, beginning with another one each time."""
    walls: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    kept: dict[str, list[float]] = defaultdict(list)
    cases = [(name, busy) for name in MOVERS for busy in (False, True)]
    for number in range(rounds + WARM_UP):
        turn = number % len(cases)
        for name, busy in cases[turn:] + cases[:turn]:
            mover = media.movers[name]
            state = "busy" if busy else "idle"
            rate = step_rate()
            seconds, steps = 0.0, 0
            jobs = [(TransferKind.STORE, COUNT), (TransferKind.LOAD, COUNT)]
            for kind, blocks in jobs + [(TransferKind.LOAD, 1)] * 5:
                wall, made = media.run(mover, kind, blocks, busy=busy)
                if number < WARM_UP:
                    continue
                if blocks == 1:
                    walls[name, state, "one block"].append(wall)
                    continue
                walls[name, state, kind.value].append(wall)
                seconds, steps = seconds + wall, steps + made
            if busy and seconds:
                kept[name].append(steps / seconds / rate)
    summarize(report, label, walls, kept)


def summarize(
    report: Report,
    label: str,
    walls: dict[tuple[str, str, str], list[float]],
    kept: dict[str, list[float]],
) -> None:
    """Medians, and the process against the threads in the same state."""
    megabytes = COUNT * SIZES[label] / 1e6
    for state in ("idle", "busy"):
        for what in ("store", "load"):
            speed = {
                name: megabytes / statistics.median(walls[name, state, what]) for name in MOVERS
            }
            for name in MOVERS:
                report.add(f"{label} {what}, {state}, {name}", speed[name], "MB/s")
            ratio = speed["process"] / speed["threads"]
            report.add(f"{label} {what}, {state}, process / threads", ratio, "x")
        for name in MOVERS:
            latency = statistics.median(walls[name, state, "one block"]) * 1e6
            report.add(f"{label} load of one block, {state}, {name}", latency, "us")
    for name in MOVERS:
        share = 100 * statistics.median(kept[name])
        report.add(f"{label} main thread keeps while moving, {name}", share, "%")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary)")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    report = Report("The mover on threads and as a process")
    measure_overhead(report, arguments.rounds)
    for label, payload in SIZES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="kvtier-mover-") as folder:
            media = Media(Path(folder), payload)
            try:
                measure(report, label, media, arguments.rounds)
            finally:
                media.close()
    report.finish()


if __name__ == "__main__":
    main()
