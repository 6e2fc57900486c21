"""Two questions about uploads, asked of a real store:

    python -m benchmarks.tiers.object_puts --endpoint http://127.0.0.1:9000 [--rounds 5]

Would it be faster to send an object in parts? And what does it cost to upload what is there
already: the whole body before the store refuses it, the body kept back until the store has had a
look (Expect: 100-continue), or a HEAD before? Everything goes to the bucket named "bucket".
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from benchmarks.report import Report
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, Timeouts
from kvtier.backends.object.stores.store import PutOutcome

MIB = 1 << 20
PARTS = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB, max_concurrency=8)


def seconds(
    calls: dict[str, Callable[[int], object]], rounds: int, at_once: int
) -> dict[str, float]:
    """Median seconds for so many calls of each kind at once, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    with ThreadPoolExecutor(at_once) as threads:
        for turn in range(rounds + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                list(threads.map(call, range(at_once)))
                if turn:  # the first one warms up
                    found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def in_parts(endpoint: str, store: BucketStore, rounds: int, report: Report) -> None:
    """One PUT against the parts that boto3 would make of it."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        config=Config(
            max_pool_connections=64,
            request_checksum_calculation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        ),
    )
    for size in (16 * MIB, 64 * MIB):
        data = os.urandom(MIB) * (size // MIB)
        for at_once in (1, 8):

            def whole(index: int, data: bytes = data) -> object:
                return store.put(f"whole{index}", [memoryview(data)])

            def parts(index: int, data: bytes = data) -> object:
                return client.upload_fileobj(
                    io.BytesIO(data), "bucket", f"parts/{index}", Config=PARTS
                )

            taken = seconds({"one PUT": whole, "parts of 8 MiB": parts}, rounds, at_once)
            label = f"{at_once} x {size // MIB} MiB"
            for name, spent in taken.items():
                report.add(f"{label}, {name}", at_once * size / spent / 1e6, "MB/s")
            ratio = taken["parts of 8 MiB"] / taken["one PUT"]
            report.add(f"{label}, one PUT / parts", ratio, "x")


def there_already(store: BucketStore, rounds: int, report: Report) -> None:
    """What a second writer of an object spends."""
    for size in (MIB // 4, 2 * MIB, 16 * MIB):
        data = memoryview(os.urandom(MIB) * max(1, size // MIB))[:size]
        name = f"there/{size}"
        store.put(name, [data])
        if store.put(name, [data], if_absent=True) is PutOutcome.STORED:
            return  # this store does not refuse

        def refused(_: int, name: str = name, data: memoryview = data) -> object:
            return store.put(name, [data], if_absent=True)

        def head(_: int, name: str = name) -> object:
            return store.head(name)

        def accepted(index: int, name: str = name, data: memoryview = data) -> object:
            return store.put(f"{name}-{index}", [data])

        calls: dict[str, Callable[[int], object]] = {
            "refused PUT": refused,
            "HEAD": head,
            "accepted PUT": accepted,
        }
        for what, spent in seconds(calls, rounds, 8).items():
            report.add(f"8 x {size >> 10} KiB that is there, {what}", spent * 1e3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint", required=True)
    options = parser.parse_args()
    patient = Timeouts(5.0, 60.0, 120.0, 60.0)
    store = BucketStore(
        BucketSettings(bucket="bucket", prefix="puts", endpoint=options.endpoint, timeouts=patient)
    )
    report = Report(f"Uploads to {options.endpoint}")
    in_parts(options.endpoint, store, options.rounds, report)
    there_already(store, options.rounds, report)
    store.close()
    report.finish()


if __name__ == "__main__":
    main()
