"""CPU memory that the engines of a machine share: how much they hold together, how much of a trace
they hit, and what it costs to read what a neighbour has, also while that overwrites it.

    python -m benchmarks.tiers.shared_memory [--trace requests.jsonl] [--seconds 60]

All with real tiers, and no engine above them. Four that serve the same prompts hold them once. A
trace that is split over four engines, by a router that keeps a conversation on its engine, is hit
nearly as often as by one engine that has all the memory; and nearly so if requests go by turns.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

from benchmarks.eviction.workloads import WORKLOADS
from benchmarks.measure import in_turns, median_ratio
from benchmarks.report import Report
from benchmarks.tiers.pages import Pages, namespace_of, slots_of
from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier, Region
from kvtier.cli.trace_simulation import Request, read_trace
from kvtier.errors import NotResident
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import Header, record_bytes, seal
from kvtier.settings import Capacity, Persistence
from kvtier.testing.subject import blank, make_memory_folder, prove
from kvtier.types import BlockKey, Namespace, Outcome, Presence, block_key

ENGINES = 4
SMALL = Namespace(facts={"model": "shared"}, group_bytes=(160 << 10,))
TRACED = Namespace(facts={"model": "shared"}, group_bytes=(640 << 10,))
"""6,000 are 4 GiB, of which four engines have parts that differ by a sixteenth at most."""
LARGE = Namespace(facts={"model": "shared"}, group_bytes=(1 << 20,))
SERVED = 1 << 30
SIZES = {"8KiB": 8 << 10, "128KiB": 128 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
READ_BYTES = 32 << 20
HELD_MOST, POINTS_MOST, READ_MOST = 1.3, 1.0, 1.15
BLOCKS = 6000
BUSIER, BUSY_S = 1.1, 60.0
"""A router sends no more than so many times its part to an engine. What was asked so long ago
counts half."""
_ROUNDS = 1000


def settings_in(folder: Path | str, blocks: int, namespace: Namespace = SMALL) -> CpuSettings:
    """Of tiers with room for so many blocks."""
    size = blocks * (record_bytes(namespace.payload_bytes) + 64)
    return CpuSettings(
        path=str(folder),
        capacity=Capacity.parse(size + size // 100 + (1 << 19)),
        persistence=Persistence.DISCARD,
    )


@contextmanager
def engines(count: int, namespace: Namespace, blocks: int) -> Iterator[list[CpuTier]]:
    """So many tiers that share room for so many blocks, each with its part of it."""
    folder = make_memory_folder("bench")
    settings = settings_in(folder, blocks, namespace)
    try:
        with ExitStack() as stack:
            tiers: list[CpuTier] = []
            for number in range(count):
                context = TierContext(namespace, f"engine-{number}")
                tiers.append(BACKEND.open_tier(settings, context))
                stack.callback(tiers[-1].close)
            for tier in itertools.chain.from_iterable([tiers] * _ROUNDS):
                if all(each.stats().free >= blocks * 4 // 5 // count for each in tiers):
                    break
                tier.prepare_store([])
                tier.refresh()
            yield tiers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(tier: CpuTier, keys: Sequence[BlockKey]) -> int:
    """What a request for these blocks does to a tier; how many of them it hits."""
    found = tier.lookup(keys)
    hits = next((at for at, each in enumerate(found) if each is not Presence.HIT), len(keys))
    tier.prepare_load(keys[:hits])
    tier.touch(keys)
    tier.complete_store(tier.prepare_store(keys[hits:]).keys)
    tier.complete_load(keys[:hits])
    return hits


def hold_once(report: Report) -> None:
    """All engines serve the same prompts one after the other, with room for all that they store."""
    blocks = SERVED // LARGE.payload_bytes
    keys = [block_key(f"{number}".encode()) for number in range(blocks)]
    prompts = [keys[at : at + 16] for at in range(0, blocks, 16)]
    with engines(ENGINES, LARGE, ENGINES * blocks + blocks) as tiers:
        for number, prompt in enumerate(prompts * ENGINES):
            tier = tiers[(number + number // len(prompts)) % ENGINES]
            serve(tier, prompt)
            for other in tiers:
                other.refresh()
        held = (
            sum(len(tier._own_among(list(tier._where.values()))) for tier in tiers)
            * LARGE.payload_bytes
        )
        hits = sum(tier.stats().neighbour_loads for tier in tiers)
    name = f"{ENGINES} engines that serve the same 1 GiB hold"
    report.at_most(name, held / SERVED, "GiB", HELD_MOST)
    report.add("blocks that they read from their neighbours", hits, "blocks")


def read_neighbour(report: Report, label: str, payload: int) -> None:
    """A prompt's blocks into KV tensors out of own slots, and out of a neighbour's, in turns."""
    namespace, count = namespace_of(payload), READ_BYTES // payload
    with engines(2, namespace, 4 * count) as tiers:
        spans: dict[str, tuple[list[BlockKey], Sequence[int]]] = {}
        for tier, whose in zip(tiers, ("a neighbour", "itself"), strict=True):
            keys = [block_key(f"{whose} {number}".encode()) for number in range(count)]
            slots = slots_of(tier.prepare_store(keys).spec)
            for key, slot in zip(keys, slots, strict=True):
                seal(tier.region.record(slot), Header(key, namespace.digest, payload))
            tier.complete_store(keys)
            tiers[1].refresh()
            spans[whose] = keys, slots_of(tiers[1].prepare_load(keys))
        assert tiers[1].stats().neighbour_loads == count
        pages = Pages(payload, count)
        region = Region.attach(tiers[1].region.path)
        begin, copier = pages.copier(region, namespace.digest)
        copies = {whose: partial(_copy, begin, *span) for whose, span in spans.items()}
        walls, _ = in_turns(copies, 40, 3)
        copier.close()
        region.close()
    ratio = median_ratio(walls["a neighbour"], walls["itself"])
    report.at_most(f"{label} x {count}: from a neighbour, of from itself", ratio, "x", READ_MOST)


def _copy(
    begin: Callable[[Sequence[BlockKey], Sequence[int]], Callable[[], None]],
    keys: Sequence[BlockKey],
    slots: Sequence[int],
) -> None:
    begin(keys, slots)()


OVERWRITER = """
import sys
from benchmarks.tiers.shared_memory import SMALL, settings_in
from kvtier.backends.cpu import BACKEND
from kvtier.interfaces.backend import TierContext
from kvtier.testing.subject import fill, make_keys
tier = BACKEND.open_tier(settings_in(sys.argv[1], int(sys.argv[2])), TierContext(SMALL, "writer"))
while not tier.has_room:
    tier.refresh()
print("ready", flush=True)
for start in range(0, 1 << 40, 16):
    taken = tier.prepare_store(make_keys(16, start=start))
    for key, slot in zip(taken.keys, taken.spec.slots):
        fill(tier.region.record(slot), key, SMALL)
    tier.complete_store(taken.keys)
    tier.tick()
"""


def read_while_overwritten(report: Report, seconds: float) -> None:
    """A neighbour in another process overwrites as fast as it can what is read here."""
    outcomes: Counter[Outcome] = Counter()
    with engines(1, SMALL, 500) as (tier,):
        folder = tier.region.path.parents[3]
        command = [sys.executable, "-c", OVERWRITER, str(folder), "500"]
        with Popen(command, stdout=PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            handler = BACKEND.open_handler(settings_in(folder, 500), TierContext(SMALL, "engine-0"))
            end, into = time.monotonic() + seconds, blank(SMALL)
            while time.monotonic() < end:
                tier.tick()
                theirs = [key for key, slot in tier._where.items() if not tier._owned(slot)]
                for key in theirs:
                    try:
                        spec = tier.prepare_load([key])
                    except NotResident:
                        continue
                    [outcome] = handler.load(spec, [key], [into])
                    outcome = prove(into, key, SMALL) if outcome.ok else outcome
                    outcomes[outcome] += 1
                    tier.complete_load([key], {} if outcome.ok else {key: outcome})
            writer.kill()
            handler.close()
    reads, lost = outcomes.total(), outcomes.total() - outcomes[Outcome.OK]
    report.add(f"reads in {seconds:g} s beside an overwriting owner", reads, "blocks")
    report.add("of which overwritten meanwhile", 100 * lost / reads, "%")
    wrong = outcomes[Outcome.CORRUPT]
    report.at_most("of which did not prove after their entry had not changed", wrong, "blocks", 0)


Route = Callable[[int, Request], int]
"""By the number of a request, that of the engine that is asked, modulo how many there are."""


def by_turns(number: int, request: Request) -> int:
    return number


def by_prefix() -> Route:
    """As a router does that knows which engine has served a prompt's beginning: where that is most
    of the prompt, the same engine is asked again, unless it is asked for more than others."""
    served: dict[int, int] = {}
    asked, then = [0.0] * ENGINES, 0.0

    def route(number: int, request: Request) -> int:
        nonlocal then
        blocks, left = request.blocks, 0.5 ** ((request.time - then) / BUSY_S)
        asked[:], then = [each * left for each in asked], request.time
        known = next((at for at in reversed(range(len(blocks))) if blocks[at] in served), -1)
        engine = min(range(ENGINES), key=asked.__getitem__)
        if 2 * (known + 1) >= len(blocks) > 0:
            near = served[blocks[known]]
            engine = near if asked[near] <= BUSIER * (sum(asked) / ENGINES + 1) else engine
        asked[engine] += len(blocks)
        served.update(dict.fromkeys(blocks, engine))
        return engine

    return route


def percent_hit(requests: Sequence[Request], count: int, route: Route = by_turns) -> float:
    """Hits in percent of the second half of a trace that goes to so many engines."""
    hits = asked = 0
    with engines(count, TRACED, BLOCKS) as tiers:
        now = [0.0]
        for tier in tiers:
            tier._clock = tier.retained._clock = lambda: now[0]
            tier._next_heard = math.inf  # here, and not by its keeper's thread
        for number, request in enumerate(requests):
            now[0] = request.time
            keys = [block_key(block.to_bytes(8, "big")) for block in request.blocks[:BLOCKS]]
            found = serve(tiers[route(number, request) % count], keys)
            if number >= len(requests) // 2:
                hits, asked = hits + found, asked + len(keys)
            for tier in tiers if count > 1 else ():
                tier._keeper.work()
                tier.hear()
    return 100.0 * hits / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--synthetic", choices=WORKLOADS, action="append")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    report = Report("CPU memory that engines share")
    hold_once(report)
    for label, payload in SIZES.items():
        read_neighbour(report, label, payload)
    read_while_overwritten(report, arguments.seconds)
    traces = {name: WORKLOADS[name](0) for name in arguments.synthetic or ["agents", "documents"]}
    if arguments.trace:
        traces = {arguments.trace.name: read_trace(arguments.trace)}
    for name, requests in traces.items():
        alone = percent_hit(requests, 1)
        report.add(f"{name}: one engine hits", alone, "%")
        for how, route in (("prefix", by_prefix()), ("turns", by_turns)):
            points = alone - percent_hit(requests, ENGINES, route)
            label = f"{name}: split over {ENGINES} by {how}, less by"
            report.at_most(label, points, "points", POINTS_MOST)
    report.finish()


if __name__ == "__main__":
    main()
