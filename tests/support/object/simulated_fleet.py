"""Requests that servers on one bucket make, counted in time that only pretends to pass.

    python tests/support/object/simulated_fleet.py --servers 50 --minutes 20 --blocks-a-second 1

Keepers and tiers are real, one after the other in one thread; the store is a dict that counts as a
bill does: a thousand names a LIST, a thousand a bulk DELETE. Blocks are counted apart: a PUT each,
and a GET each time one is loaded.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier.backends.object.caretaker import Limits
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.object_names import block_name, described_namespace, parse_block
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store
from kvtier.backends.object.tier import ObjectTier
from kvtier.eviction import create_policy
from kvtier.record.record import HEADER_BYTES
from kvtier.types import BlockKey, Namespace

NAMESPACE = Namespace(facts={"model": "fleet"}, group_bytes=(8192,))
BLOCK_BYTES = HEADER_BYTES + NAMESPACE.payload_bytes
_STEP_S = 0.5
_PAGE = 1000
_SINGLE_DELETES = 4


class CountingStore(Store):
    """Objects in memory, by a clock that others move."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.now = 1.7e9
        self.block_bytes = self.there = 0
        """Of each block, and of all that lie there."""
        self.block_bytes = block_bytes
        self.requests: Counter[str] = Counter()
        """By kind of request, and what it is for."""
        self.bytes_read = 0
        self._objects: dict[str, tuple[bytes, int, float]] = {}
        self._names: list[str] = []

    def clock(self) -> float:
        return self.now

    def put(
        self, name: str, buffers: Sequence[Buffer], *, if_absent: bool = False, **_: Any
    ) -> PutOutcome:
        self._count("PUT", name)
        if if_absent and name in self._objects:
            return PutOutcome.ALREADY_THERE
        data = b"".join(bytes(view) for view in buffers)
        is_block = parse_block(name) is not None
        if name not in self._objects:
            bisect.insort(self._names, name)
            self.there += is_block * self.block_bytes
        size = self.block_bytes if is_block else len(data)
        self._objects[name] = (data, size, self.now)
        return PutOutcome.STORED

    def get(self, name: str, into: Buffer, *, offset: int | None = None, **_: Any) -> int | None:
        self._count("GET", name)
        if name not in self._objects:
            return None
        data = memoryview(self._objects[name][0])[offset or 0 :]
        wanted = min(len(data), len(into))
        into[:wanted] = data[:wanted]
        self.bytes_read += wanted
        return wanted

    def head(self, name: str, **_: Any) -> ObjectInfo | None:
        self._count("HEAD", name)
        return self._info(name) if name in self._objects else None

    def list(self, prefix: str = "", *, after: str = "", **_: Any) -> Iterator[ObjectInfo]:
        start = bisect.bisect_left(self._names, prefix)
        end = bisect.bisect_left(self._names, prefix + "\x7f")
        found = [self._info(name) for name in self._names[start:end] if name > after]
        self._count("LIST", prefix, max(1, -(-len(found) // _PAGE)))
        return iter(found)

    def delete(self, names: Sequence[str], **_: Any) -> Mapping[str, StoreError]:
        few = len(names) <= _SINGLE_DELETES
        self._count("DELETE", "", len(names) if few else -(-len(names) // _PAGE))
        for name in names:
            if self._objects.pop(name, None) is not None:
                del self._names[bisect.bisect_left(self._names, name)]
                self.there -= (parse_block(name) is not None) * self.block_bytes
        return {}

    def _info(self, name: str) -> ObjectInfo:
        _, size, at = self._objects[name]
        return ObjectInfo(name, size, at)

    def _count(self, request: str, name: str, times: int = 1) -> None:
        kinds = ("servers", "caretaker", "manifest", "uses", "retained", "blocks")
        what = next((kind for kind in kinds if kind in name), "everything")
        self.requests[f"{request} {what}"] += times


class Fleet:
    """Servers of one model on one store; each stores so many blocks a second. Their clocks are
    wrong by as many seconds as `skews` says, in turn."""

    def __init__(
        self,
        store: CountingStore,
        servers: int,
        *,
        blocks_a_second: float = 0.0,
        capacity_blocks: int = 10_000_000,
        skews: Sequence[float] = (0.0,),
        seed: int = 1,
        namespace: Namespace = NAMESPACE,
    ) -> None:
        self.store = store
        self.stored = self.dropped = 0
        self.rate = blocks_a_second
        self._rng = random.Random(seed)
        self._capacity = capacity_blocks * store.block_bytes
        self._namespace = namespace
        self._asleep: dict[int, float] = {}
        """Servers that are stopped, and until when."""
        self._number = 0
        self.servers: list[tuple[Keeper, ObjectTier]] = []
        self._owed: list[float] = []
        for number in range(servers):
            self.join(skew_s=skews[number % len(skews)])
            self.run(5.0 / servers)

    def join(
        self,
        namespace: Namespace | None = None,
        *,
        capacity: int | None = None,
        skew_s: float = 0.0,
    ) -> None:
        """One more server, of another model or with another capacity (in bytes) if you like."""

        def clock() -> float:
            return self.store.now + skew_s

        limits = Limits(capacity or self._capacity, refresh_s=5.0, audit_s=600.0)
        keeper = Keeper(
            self.store,
            namespace or self._namespace,
            limits,
            clock=clock,
            steady=self.store.clock,
        )
        tier = ObjectTier(keeper, create_policy(), clock)
        keeper.open(tier.offered)
        tier.start()
        self.servers.append((keeper, tier))
        self._owed.append(self._rng.random())

    def run(self, seconds: float) -> int:
        """The most bytes that lay there at the end of a step."""
        end, most = self.store.now + seconds, self.store.there
        while self.store.now < end:
            self.store.now += _STEP_S
            for at in self._rng.sample(range(len(self.servers)), len(self.servers)):
                if self._asleep.get(at, 0.0) > self.store.now:
                    continue
                keeper, tier = self.servers[at]
                self._owed[at] += self.rate * _STEP_S
                count = int(self._owed[at])
                self._owed[at] -= count
                self.fill(tier, count)
                tier.tick()
                keeper.run_once()
                most = max(most, self.store.there)
        return most

    def stop(self, at: int, seconds: float = 1e9) -> None:
        """A server does nothing for so long; by default it is dead."""
        self._asleep[at] = self.store.now + seconds

    def caretaker(self) -> int:
        """Which server is the caretaker."""
        [found] = [
            at
            for at, (keeper, _) in enumerate(self.servers)
            if keeper.caretaker is not None and self._asleep.get(at, 0.0) <= self.store.now
        ]
        return found

    def fill(self, tier: ObjectTier, count: int) -> None:
        if not count:
            return
        numbers = range(self._number, self._number + count)
        self._number += count
        hashes = [hashlib.sha256(str(number).encode()).digest() for number in numbers]
        reserved = tier.prepare_store([BlockKey(found + bytes(4)) for found in hashes])
        spec = reserved.spec
        for names in getattr(spec, "delete_first", []):
            self.store.delete(names)
        for key, generation in zip(reserved.keys, getattr(spec, "generations", []), strict=True):
            self.store.put(block_name(tier._namespace.id, key, generation), [])
        tier.complete_store(reserved.keys)
        self.stored += len(reserved.keys)
        self.dropped += count - len(reserved.keys)

    def blocks(self) -> set[tuple[BlockKey, int]]:
        """Those that lie there."""
        listed = (parse_block(info.name) for info in CountingStore.list(self.store))
        return {parsed[1:] for parsed in listed if parsed is not None}

    def objects(self) -> int:
        """How many lie there that are no blocks."""
        return sum(
            described_namespace(info.name) is not None for info in CountingStore.list(self.store)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--blocks-a-second", type=float, default=0.0)
    chosen = parser.parse_args()
    store = CountingStore()
    fleet = Fleet(store, chosen.servers, blocks_a_second=chosen.blocks_a_second)
    fleet.run(300.0)
    store.requests.clear()
    store.bytes_read = fleet.stored = fleet.dropped = 0
    fleet.run(chosen.minutes * 60.0)
    factor = 60.0 / chosen.minutes / chosen.servers
    figures = {what: float(count) for what, count in sorted(store.requests.items())}
    figures |= {"MB read": store.bytes_read / 1e6, "blocks stored": fleet.stored}
    figures["blocks dropped"] = fleet.dropped
    for what, count in figures.items():
        print(f"{what:20} {count * factor:10.1f} an hour and server")
    print(f"{fleet.objects()} objects beside blocks")


if __name__ == "__main__":
    main()
