"""Object clients side by side in one run, and how soon a tier knows what a bucket holds.

    python -m benchmarks.tiers.object [--rounds 5] [--endpoint https://...]

Clients: boto3 with threads as most programs use it; boto3 tuned and reading into the caller's
memory; obstore, which ours is built on; ours. They move whole objects between 32 buffers and a
server in a process of its own that answers from memory: what is measured is the client. With
--endpoint they move them to and from the bucket named "bucket" of a real store, and nothing is said
about targets.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import obstore
import obstore.store
from botocore.config import Config

from benchmarks.measure import memory
from benchmarks.report import Report
from kvtier.backends.object import manifests as manifest
from kvtier.backends.object.caretaker import Limits
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, Timeouts
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.tier import ObjectTier
from kvtier.eviction import create_policy
from kvtier.types import BlockKey, Namespace

SIZES = {"256 KiB": 256 << 10, "2 MiB": 2 << 20, "16 MiB": 16 << 20}
IN_FLIGHT = 32
BYTES_A_RUN = 256 << 20
TUNED = Config(
    connect_timeout=5,
    read_timeout=60,
    retries={"mode": "standard", "total_max_attempts": 1},
    max_pool_connections=64,
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    s3={"addressing_style": "path", "payload_signing_enabled": False},
)
Move = Callable[[str, memoryview], None]


class Client:
    """One contestant: how it gets and puts one object."""

    def __init__(self, name: str, get: Move, put: Move) -> None:
        self.name = name
        self.get = get
        self.put = put


def boto3_plain(endpoint: str) -> Client:
    """Whole bodies as bytes, all settings as they come (but connections for all threads)."""
    client = _boto3(endpoint, Config(max_pool_connections=64))

    def get(name: str, into: memoryview) -> None:
        into[:] = client.get_object(Bucket="bucket", Key=name)["Body"].read()

    def put(name: str, data: memoryview) -> None:
        client.put_object(Bucket="bucket", Key=name, Body=bytes(data))

    return Client("boto3", get, put)


def boto3_tuned(endpoint: str) -> Client:
    """No checksums, no signed bodies, and bodies read into the caller's memory."""
    client = _boto3(endpoint, TUNED)

    def get(name: str, into: memoryview) -> None:
        body = client.get_object(Bucket="bucket", Key=name)["Body"]
        done = 0
        while done < len(into) and (count := body.readinto(into[done : done + (1 << 20)])):
            done += count
        body.close()

    def put(name: str, data: memoryview) -> None:
        client.put_object(Bucket="bucket", Key=name, Body=bytes(data))

    return Client("boto3 tuned", get, put)


def ours(endpoint: str) -> Client:
    """What the object tier uses."""
    patient = Timeouts(5.0, 60.0, 120.0, 60.0)
    store = BucketStore(BucketSettings(bucket="bucket", endpoint=endpoint, timeouts=patient))

    def get(name: str, into: memoryview) -> None:
        store.get(name, into)

    def put(name: str, data: memoryview) -> None:
        store.put(name, [data])

    return Client("kvtier", get, put)


def obstore_alone(endpoint: str) -> Client:
    """The client below ours, called from the same threads, without deadlines of a call."""
    store = obstore.store.S3Store(
        "bucket",
        endpoint=endpoint,
        region="us-east-1",
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True, "timeout": "120s"},
    )

    def get(name: str, into: memoryview) -> None:
        into[:] = obstore.get(store, name).bytes()

    def put(name: str, data: memoryview) -> None:
        obstore.put(store, name, data, use_multipart=False)

    return Client("obstore", get, put)


CLIENTS = {
    "boto3": boto3_plain,
    "boto3 tuned": boto3_tuned,
    "obstore": obstore_alone,
    "kvtier": ours,
}


def _boto3(endpoint: str, config: Config) -> Any:
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


class Runner:
    """Runs moves with so many in flight, each with a buffer of its own."""

    def __init__(self, size_max: int) -> None:
        self._threads = ThreadPoolExecutor(IN_FLIGHT)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._free.put(memoryview(bytearray(os.urandom(4096) * (size_max // 4096))))

    def run(self, move: Move, size: int, count: int) -> tuple[float, float]:
        """MB/s and CPU seconds of this process for each GB."""

        def one(index: int) -> None:
            buffer = self._free.get()
            try:
                move(f"k{index % IN_FLIGHT}/{size}", buffer[:size])
            finally:
                self._free.put(buffer)

        wall, cpu = time.perf_counter(), time.process_time()
        for _ in self._threads.map(one, range(count)):
            pass
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        moved = size * count
        return moved / wall / 1e6, cpu / (moved / 1e9)

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def static_server() -> Iterator[str]:
    """The endpoint of a server process, stopped at the end."""
    program = Path(__file__).with_name("static_server.py")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def compare(endpoint: str, rounds: int, report: Report, *, targets: bool) -> None:
    """Speed and CPU of every client, interleaved."""
    clients = [make(endpoint) for make in CLIENTS.values()]
    runner = Runner(max(SIZES.values()))
    for label, size in SIZES.items():
        for verb in ("put", "get"):
            found: dict[str, list[tuple[float, float]]] = {client.name: [] for client in clients}
            for turn in range(rounds + 1):
                for client in clients:
                    count = max(2 * IN_FLIGHT, BYTES_A_RUN // size)
                    figures = runner.run(getattr(client, verb), size, count)
                    if turn:  # the first one warms up
                        found[client.name].append(figures)
            _report(report, f"{verb.upper()} {label}", found, targets=targets)
    runner.close()


def _report(
    report: Report, what: str, found: dict[str, list[tuple[float, float]]], *, targets: bool
) -> None:
    rates = {name: statistics.median(f[0] for f in figures) for name, figures in found.items()}
    cpu = {name: statistics.median(f[1] for f in figures) for name, figures in found.items()}
    for name in found:
        report.add(f"{what}, {name}", rates[name], "MB/s")
        report.add(f"{what}, {name}", cpu[name], "CPU s/GB")
    for peer in ("boto3", "boto3 tuned", "obstore"):
        ratio, share = rates["kvtier"] / rates[peer], cpu["kvtier"] / cpu[peer]
        asked = {"GET 256 KiB": 4.0, "GET 2 MiB": 1.5, "GET 16 MiB": 1.0}.get(what)
        if asked is not None and peer == "boto3" and targets:
            report.at_least(f"{what}, kvtier / {peer}", ratio, "x", asked)
            report.at_most(f"{what}, CPU kvtier / {peer}", share, "x", 1.0)
        else:
            report.add(f"{what}, kvtier / {peer}", ratio, "x")
            report.add(f"{what}, CPU kvtier / {peer}", share, "x")


def memory_growth(client: str, endpoint: str) -> float:
    """MiB that a process of its own grows by while 32 x 16 MiB are read, beyond its buffers."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tiers.object", "--memory", client, endpoint],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def print_memory(client: str, endpoint: str) -> None:
    """The child's part: the peak of resident memory, before and after."""
    size = SIZES["16 MiB"]
    mover = CLIENTS[client](endpoint)
    runner = Runner(size)
    runner.run(mover.get, 4096, IN_FLIGHT)
    before = memory("VmRSS")
    runner.run(mover.get, size, 4 * IN_FLIGHT)
    print((memory("VmHWM") - before) / 2**20)
    runner.close()


def knowing(report: Report) -> None:
    """From opening to the first right answer, by manifests in a folder."""
    namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(2 << 20,))
    for label, count, limit_s in (("10,000", 10_000, 0.05), ("1,000,000", 1_000_000, 5.0)):
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
            store = FileStore(Path(folder) / "store")
            raw = os.urandom(36 * count)
            keys = [BlockKey(raw[at : at + 36]) for at in range(0, len(raw), 36)]
            entries = manifest.pack_entries(
                manifest.ADDED, keys, [0] * count, [2 << 20] * count, range(1, count + 1)
            )
            Journal(store, namespace.id).append(entries)
            times = [_learn(store, namespace, keys) for _ in range(3)]
            report.at_most(f"{label} keys known", statistics.median(times), "s", limit_s)


def _learn(store: FileStore, namespace: Namespace, keys: list[BlockKey]) -> float:
    begin = time.perf_counter()
    keeper = Keeper(store, namespace, Limits(1 << 60, 5.0, 600.0))
    tier = ObjectTier(keeper, create_policy())
    keeper._publish(keeper._journal.read_all())
    tier.start()
    spent = time.perf_counter() - begin
    assert len(tier.prepare_load(keys)) == len(keys)
    keeper.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint")
    parser.add_argument("--memory", nargs=2, metavar=("CLIENT", "ENDPOINT"))
    options = parser.parse_args()
    if options.endpoint:
        report = Report(f"Object clients against {options.endpoint}, 32 in flight")
        compare(options.endpoint, options.rounds, report, targets=False)
        report.finish()
        return
    os.environ.update(
        AWS_ACCESS_KEY_ID="benchmark",
        AWS_SECRET_ACCESS_KEY="benchmark",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    if options.memory:
        print_memory(*options.memory)
        return
    report = Report("Object clients against a static server, 32 in flight")
    with static_server() as endpoint:
        compare(endpoint, options.rounds, report, targets=True)
        for name in CLIENTS:
            growth = memory_growth(name, endpoint)
            if name == "kvtier":
                report.at_most(f"memory growth, {name}", growth, "MiB", 64)
            else:
                report.add(f"memory growth, {name}", growth, "MiB")
    knowing(report)
    report.finish()


if __name__ == "__main__":
    main()
