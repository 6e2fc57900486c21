"""`kvtier prewarm` beside what its two sides can do alone, from a folder and from an S3 server.

    python -m benchmarks.tiers.prewarm [--blocks 10000] [--chunk-kib 256] [--rounds 3]
                                       [--folder DIR]

The source is one store of so many blocks, reached as file:// and, the same files, through rclone.
In every round, one after the other:

- each side alone, by the very handlers and threads that prewarm uses: the source read and proved
  into memory, and an empty folder of slabs filled from memory, room made and blocks committed;
- the plain client: our own object client, GETs into memory on as many threads, nothing proved;
- the command itself in a process of its own, into an empty folder and into a CPU region. Its rate
  is of the time from its first read to its last commit; that of the process in all is stated too.

A ratio is the median over the rounds of each round's own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.object.object_servers import ACCESS_KEY, SECRET_KEY, rclone

from benchmarks.memory import memory
from benchmarks.report import Report
from kvtier.backends.object.settings import open_for
from kvtier.cli.console import Progress
from kvtier.cli.inspect import inspector_of, look
from kvtier.cli.selection import Choice, ChoiceReader, Numbers, choose
from kvtier.cli.sink import Copied, Pace, open_sink
from kvtier.config import StackConfig, load
from kvtier.inspect import Depth
from kvtier.inspect.filling import ROW
from kvtier.interfaces.handler import HostHandler
from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.move.threads import ThreadMover
from kvtier.record.record import HEADER_BYTES, Buffer, Header, record_bytes, seal
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome, block_key

KVTIER = Path(sys.executable).with_name("kvtier")
MIB = 1 << 20
CLIENT_THREADS = 32
STACK = """\
version: 1
name: prewarm
tiers:
  - {{kind: cpu, path: {host}, capacity: {room}}}
  - {{kind: nvme, path: {folder}/slabs, capacity: {room}, free_floor: 0}}
  - {{kind: object, url: "{url}", capacity: {room}{more}}}
"""


class World:
    """The source that all rounds read, and what was measured."""

    def __init__(self, home: Path, host: Path, blocks: int, chunk: int) -> None:
        self.home = home
        self.host = host
        self.blocks = blocks
        self.namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(chunk,))
        self.bytes = blocks * chunk
        self.times: dict[str, list[float]] = {}
        self.wall: dict[str, list[float]] = {}
        self.memory: dict[str, int] = {}

    def stack(self, name: str, url: str, more: str = "") -> Path:
        """A stack file that names this source, in a folder of its own."""
        folder = self.home / name
        folder.mkdir()
        room = self.blocks * (record_bytes(self.namespace.payload_bytes) + 64) * 5 // 4 + 128 * MIB
        text = STACK.format(host=self.host, folder=folder, room=room, url=url, more=more)
        path = folder / "stack.yaml"
        path.write_text(text)
        return path

    def empty(self, stack: Path) -> None:
        """Remove what a round has left."""
        shutil.rmtree(stack.parent / "slabs", ignore_errors=True)
        for region in self.host.iterdir():
            region.unlink()

    def note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def rate(self, name: str) -> float:
        """Median, in MB/s."""
        return self.bytes / statistics.median(self.times[name]) / 1e6

    def ratio(self, name: str, *others: str) -> float:
        """How fast it is by the slowest of the others, round by round."""
        slowest = (max(each) for each in zip(*(self.times[other] for other in others), strict=True))
        pairs = zip(self.times[name], slowest, strict=True)
        return float(statistics.median(theirs / mine for mine, theirs in pairs))


class Made(ChoiceReader):
    """Records made in memory: the other side of a target that is measured alone."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(Choice(namespace.id, np.zeros(0, ROW), []), namespace)
        self.concurrency = 8
        self._namespace = namespace
        self._payload = os.urandom(namespace.payload_bytes)
        self.batch_blocks = max(1, (2 << 20) // record_bytes(namespace.payload_bytes))

    def read(
        self, numbers: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        size = len(self._payload)
        for key, buffer in zip(keys, into, strict=True):
            if buffer[HEADER_BYTES + size - 64 : HEADER_BYTES + size] != self._payload[-64:]:
                buffer[HEADER_BYTES : HEADER_BYTES + size] = self._payload  # a buffer not used yet
            seal(buffer, Header(key, self._namespace.digest, size))
        return [Outcome.OK] * len(keys)


class Sinkhole(HostHandler):
    """Memory that keeps nothing, of each thread its own: the other side of a source alone."""

    def __init__(self, record: int, batch: int) -> None:
        self._record, self._batch = record, batch
        self._own = threading.local()

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        if not hasattr(self._own, "views"):
            room = memoryview(mmap.mmap(-1, self._record * self._batch))
            starts = range(0, len(room), self._record)
            self._own.views = [room[start : start + self._record] for start in starts]
        views: list[Buffer] = self._own.views[: len(spec)]
        return views

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        if not outcome.ok:
            raise AssertionError(f"a block of the source is {outcome}")

    def load(self, *_: Any) -> list[Outcome]:
        raise AssertionError("nothing comes from here")

    def store(self, *_: Any) -> list[Outcome]:
        raise AssertionError("nothing is copied to here")


def fill_source(world: World, stack: Path) -> None:
    """Put all blocks into the store, as an engine would."""
    config = load(stack)
    made = Made(world.namespace)
    keys = [block_key(b"bench" + number.to_bytes(8, "big")) for number in range(world.blocks)]
    filling = inspector_of(config, 2).filling()
    with open_sink(filling, world.namespace, made, Pace(None)) as sink:
        pieces = (
            (keys[start : start + sink.piece], list(range(start, world.blocks))[: sink.piece])
            for start in range(0, world.blocks, sink.piece)
        )
        result = Copied("")
        sink.fill(pieces, result, Progress("", 0, ""))
    assert result.copied == world.blocks, result
    os.sync()


def chosen(config: StackConfig, world: World) -> Choice:
    store = look(config, 2, Depth.RECORDED)
    choice = choose(store, world.namespace.id)
    assert len(choice) == world.blocks, store
    return choice


def read_alone(world: World, stack: Path) -> float:
    """Read and prove everything into memory."""
    config = load(stack)
    choice = chosen(config, world)
    reader = ChoiceReader(choice, world.namespace)
    sink = Sinkhole(record_bytes(world.namespace.payload_bytes), reader.batch_blocks)
    mover = ThreadMover([reader, sink], world.namespace)
    start = time.monotonic()
    for number, (keys, rows) in enumerate(choice.pieces(256)):
        spec = Numbers(rows)
        mover.submit(
            Transfer(
                id=number,
                kind=TransferKind.LOAD,
                source=0,
                target=1,
                keys=keys,
                source_spec=spec,
                target_spec=spec,
                deadline=float("inf"),
            )
        )
    ended = 0
    while ended < world.blocks:
        mover.wait(1.0)
        ended += sum(len(result.outcomes) for result in mover.poll())
    seconds = time.monotonic() - start
    mover.close()
    return seconds


def store_alone(world: World, stack: Path, tier: int) -> float:
    """Fill an empty tier from memory."""
    config = load(stack)
    choice = chosen(config, world)
    result = Copied("")
    filling = inspector_of(config, tier).filling()
    with open_sink(filling, world.namespace, Made(world.namespace), Pace(None)) as sink:
        sink.fill(choice.pieces(sink.piece), result, Progress("", 0, ""))
    assert result.copied == world.blocks, result
    world.empty(stack)
    return result.seconds


def plain_client(world: World, stack: Path) -> float:
    """GET everything into memory, with our own client and nothing else."""
    config = load(stack)
    settings: Any = config.tiers[2]
    names = [block.where for block in look(config, 2)[0].blocks(world.namespace.id)]
    size = HEADER_BYTES + world.namespace.payload_bytes
    store = open_for(settings)

    def get(first: int) -> None:
        room = memoryview(bytearray(size))
        for name in names[first::CLIENT_THREADS]:
            store.get(name, [room])

    threads = [threading.Thread(target=get, args=[each]) for each in range(CLIENT_THREADS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    store.close()
    return seconds


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had so far, together with the children that it has."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return memory("VmHWM", pid) + sum(peak_bytes(int(child)) for child in children)


def command(world: World, name: str, stack: Path, into: str) -> None:
    """The whole command, from an empty tier."""
    args: list[str | Path] = [KVTIER, "prewarm", "-c", stack, "--into", into, "--json"]
    start = time.monotonic()
    process = subprocess.Popen(args, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with selectors.DefaultSelector() as ended:
        ended.register(process.stdout, selectors.EVENT_READ)
        while not ended.select(0.02):
            world.memory[name] = max(world.memory.get(name, 0), peak_bytes(process.pid))
    text = process.stdout.read()
    assert process.wait() == 0, text
    wall = time.monotonic() - start
    (report,) = json.loads(text)["namespaces"]
    assert report["copied"] == world.blocks, report
    world.note(name, report["seconds"])
    world.wall.setdefault(name, []).append(wall)
    world.empty(stack)


def run(world: World, folder: Path, s3: Path, rounds: int) -> None:
    contests: dict[str, Callable[[], float | None]] = {
        "read file://": lambda: read_alone(world, folder),
        "store nvme": lambda: store_alone(world, folder, 1),
        "file:// to nvme": lambda: command(world, "file:// to nvme", folder, "nvme"),
        "plain client": lambda: plain_client(world, s3),
        "rclone to nvme": lambda: command(world, "rclone to nvme", s3, "nvme"),
        "store cpu": lambda: store_alone(world, folder, 0),
        "file:// to cpu": lambda: command(world, "file:// to cpu", folder, "cpu"),
        "rclone to cpu": lambda: command(world, "rclone to cpu", s3, "cpu"),
    }
    for number in range(rounds):
        for name, contest in contests.items():
            seconds = contest()
            if seconds is not None:
                world.note(name, seconds)
            print(f"round {number + 1}: {name} {world.times[name][-1]:.2f} s", file=sys.stderr)


def report(world: World) -> None:
    found = Report(f"prewarm of {world.blocks} blocks of {world.namespace.payload_bytes >> 10} KiB")
    for name in world.times:
        found.add(name, world.rate(name), "MB/s")
    for name, wall in world.wall.items():
        found.add(f"{name}, whole process", world.bytes / statistics.median(wall) / 1e6, "MB/s")
        rest = [all_ - own for all_, own in zip(wall, world.times[name], strict=True)]
        found.add(f"{name}, start and end", statistics.median(rest), "s")
    slower = ("read file://", "store nvme")
    found.at_least(
        "file:// to nvme by its slower side", world.ratio("file:// to nvme", *slower), "x", 0.7
    )
    found.at_least(
        "rclone to nvme by the plain client",
        world.ratio("rclone to nvme", "plain client"),
        "x",
        0.8,
    )
    slower = ("read file://", "store cpu")
    found.add("file:// to cpu by its slower side", world.ratio("file:// to cpu", *slower), "x")
    found.add(
        "rclone to cpu by the plain client", world.ratio("rclone to cpu", "plain client"), "x"
    )
    memory = max(world.memory["file:// to nvme"], world.memory["rclone to nvme"])
    found.at_most("peak memory, into nvme", memory / MIB, "MiB", 512)
    found.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--chunk-kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    chosen_ = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-prewarm-", dir=chosen_.folder) as home,
        tempfile.TemporaryDirectory(prefix="kvtier-prewarm-", dir="/dev/shm") as host,
        rclone(Path(home)) as server,
    ):
        world = World(Path(home), Path(host), chosen_.blocks, chosen_.chunk_kib << 10)
        folder = world.stack("folder", f"file://{home}/data/bucket/kv")
        s3 = world.stack("s3", "s3://bucket/kv", f", endpoint: '{server.endpoint}'")
        fill_source(world, folder)
        run(world, folder, s3, chosen_.rounds)
        report(world)


if __name__ == "__main__":
    main()
