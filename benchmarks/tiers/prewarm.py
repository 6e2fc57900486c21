"""`kvtier prewarm` beside what its two sides can do alone, from a folder and from an S3 server.

    python -m benchmarks.tiers.prewarm [--blocks 10000] [--chunk-kib 256] [--rounds 3]
                                       [--folder DIR]

The source is one store of so many blocks, reached as file:// and, the same files, through rclone.
In every round, one after the other:

- each side alone: the store's objects read into memory by kvtier's own client on as many threads as
  a tier has, and slots of the same size written to a file by direct I/O; nothing is proved;
- the command itself in a process of its own, into an empty folder and into a CPU region. Its rate
  is of the time from its first read to its last commit; that of the process in all is stated too.

A ratio is the median over the rounds of each round's own.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from support.object.object_servers import ACCESS_KEY, SECRET_KEY, rclone

from benchmarks.measure import median_ratio, memory
from benchmarks.report import Report
from benchmarks.tiers.peers import BareSlab, shared_memory
from kvtier import Stack
from kvtier.backends.object.settings import open_for
from kvtier.config import load
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.types import Namespace, block_key

KVTIER = Path(sys.executable).with_name("kvtier")
MIB = 1 << 20
CLIENT_THREADS = 32
PIECE = 128
"""Blocks that are stored, or written, at once."""


class World:
    """The source that all rounds read, and what was measured."""

    def __init__(self, home: Path, host: Path, blocks: int, chunk: int) -> None:
        self.home = home
        self.host = host
        self.blocks = blocks
        self.namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(chunk,))
        self.bytes = blocks * chunk
        self.times: dict[str, list[float]] = defaultdict(list)
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.memory: dict[str, int] = defaultdict(int)

    def stack(self, name: str, url: str, **more: Any) -> Path:
        """A stack file that names this source, in a folder of its own."""
        folder = self.home / name
        folder.mkdir()
        room = self.blocks * (record_bytes(self.namespace.payload_bytes) + 64) * 5 // 4 + 128 * MIB
        tiers: list[dict[str, Any]] = [
            {"kind": "cpu", "path": str(self.host)},
            {"kind": "nvme", "path": f"{folder}/slabs", "free_floor": 0},
            {"kind": "object", "url": url, **more},
        ]
        described = [tier | {"capacity": room} for tier in tiers]
        path = folder / "stack.yaml"
        path.write_text(json.dumps({"version": 1, "name": "prewarm", "tiers": described}))
        return path

    def empty(self, stack: Path) -> None:
        """Remove what a round has left."""
        shutil.rmtree(stack.parent / "slabs", ignore_errors=True)
        for region in self.host.iterdir():
            shutil.rmtree(region)

    def fill_source(self, stack: Path) -> None:
        """Put all blocks into the store, as an engine would."""
        config = json.loads(stack.read_text())
        del config["tiers"][1]
        payload = os.urandom(self.namespace.payload_bytes)
        keys = [block_key(b"bench" + number.to_bytes(8, "big")) for number in range(self.blocks)]
        with Stack.open(config, self.namespace) as opened:
            for start in range(0, self.blocks, PIECE):
                piece = keys[start : start + PIECE]
                assert len(opened.store(dict.fromkeys(piece, payload))) == len(piece)
                assert opened.settle(60.0)
        self.empty(stack)
        os.sync()

    def get_all(self, stack: Path, names: list[str]) -> None:
        """GET everything into memory, with kvtier's client and nothing else."""
        settings: Any = load(stack).tiers[2]
        size = HEADER_BYTES + self.namespace.payload_bytes
        store = open_for(settings)

        def get(first: int) -> None:
            room = memoryview(bytearray(size))
            for name in names[first::CLIENT_THREADS]:
                store.get(name, room)

        with ThreadPoolExecutor(CLIENT_THREADS) as threads:
            list(threads.map(get, range(CLIENT_THREADS)))
        store.close()

    def write_all(self) -> None:
        """Write as many slots, as they lie in a slab."""
        slot = record_bytes(self.namespace.payload_bytes)
        room = memoryview(shared_memory(slot * PIECE))
        slab = BareSlab(self.home, room, slot, PIECE)
        for _ in range(0, self.blocks, PIECE):
            slab.store(1)
        slab.close()

    def prewarm(self, name: str, stack: Path, into: str) -> None:
        """The whole command, from an empty tier."""
        args: list[str | Path] = [KVTIER, "prewarm", "-c", stack, "--into", into, "--json"]
        start = time.monotonic()
        process = subprocess.Popen(args, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with selectors.DefaultSelector() as ended:
            ended.register(process.stdout, selectors.EVENT_READ)
            while not ended.select(0.02):
                self.memory[name] = max(self.memory[name], peak_bytes(process.pid))
        text = process.stdout.read()
        assert process.wait() == 0, text
        self.wall[name].append(time.monotonic() - start)
        (report,) = json.loads(text)["namespaces"]
        assert report["copied"] == self.blocks, report
        self.times[name].append(report["seconds"])
        self.empty(stack)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had so far, together with the children that it has."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return memory("VmHWM", pid) + sum(peak_bytes(int(child)) for child in children)


def run(world: World, folder: Path, s3: Path, rounds: int) -> None:
    bucket = world.home / "data" / "bucket" / "kv"
    files = (path for path in bucket.rglob("*") if "/blocks/" in str(path) and path.is_file())
    names = [str(path.relative_to(bucket)) for path in files]
    assert len(names) == world.blocks, f"{len(names)} objects"
    alone: dict[str, Callable[[], None]] = {
        "GETs from file://": partial(world.get_all, folder, names),
        "writes": world.write_all,
        "GETs from rclone": partial(world.get_all, s3, names),
    }
    sources = {"file://": folder, "rclone": s3}
    commands = [f"{source} to {into}" for source in sources for into in ("nvme", "cpu")]
    for number in range(rounds):
        for name in (*alone, *commands):
            start = time.monotonic()
            if name in alone:
                alone[name]()
                world.times[name].append(time.monotonic() - start)
            else:
                source, _, into = name.partition(" to ")
                world.prewarm(name, sources[source], into)
            print(f"round {number + 1}: {name} {world.times[name][-1]:.2f} s", file=sys.stderr)


def report(world: World) -> None:
    found = Report(f"prewarm of {world.blocks} blocks of {world.namespace.payload_bytes >> 10} KiB")
    times = world.times
    for name, each in times.items():
        found.add(name, world.bytes / statistics.median(each) / 1e6, "MB/s")
    for name, wall in world.wall.items():
        found.add(f"{name}, whole process", world.bytes / statistics.median(wall) / 1e6, "MB/s")
        rest = [all_ - own for all_, own in zip(wall, times[name], strict=True)]
        found.add(f"{name}, start and end", statistics.median(rest), "s")
    slower = list(map(max, times["GETs from file://"], times["writes"]))
    ratio = median_ratio(slower, times["file:// to nvme"])
    found.at_least("file:// to nvme by its slower side", ratio, "x", 0.7)
    ratio = median_ratio(times["GETs from rclone"], times["rclone to nvme"])
    found.at_least("rclone to nvme by GETs alone", ratio, "x", 0.8)
    for source in ("file://", "rclone"):
        ratio = median_ratio(times[f"GETs from {source}"], times[f"{source} to cpu"])
        found.add(f"{source} to cpu by GETs alone", ratio, "x")
    most = max(world.memory["file:// to nvme"], world.memory["rclone to nvme"])
    found.at_most("peak memory, into nvme", most / MIB, "MiB", 512)
    found.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--chunk-kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-prewarm-", dir=options.folder) as home,
        tempfile.TemporaryDirectory(prefix="kvtier-prewarm-", dir="/dev/shm") as host,
        rclone(Path(home)) as server,
    ):
        world = World(Path(home), Path(host), options.blocks, options.chunk_kib << 10)
        folder = world.stack("folder", f"file://{home}/data/bucket/kv")
        s3 = world.stack("s3", "s3://bucket/kv", endpoint=server.endpoint)
        world.fill_source(folder)
        run(world, folder, s3, options.rounds)
        report(world)


if __name__ == "__main__":
    main()
