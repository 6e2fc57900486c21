"""Moves records between host memory and the pool, with deadlines that Mooncake does not have.

A call that is late is left behind with its thread, and may go on writing to the memory that it was
given. But a mover promises that nothing touches a slot any more when its result is there. So calls
have memory of their own, and records are copied between it and the slots.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.backends.mooncake.client import MooncakeSettings, Pool
from kvtier.backends.mooncake.tier import MooncakeSpec
from kvtier.interfaces.handler import Handler, own_spec
from kvtier.record.record import HEADER_BYTES, Buffer, record_bytes
from kvtier.system.calls import AbandonableCalls, abandonable
from kvtier.system.memory import address_of
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome

BATCH_BLOCKS = 4
FIND_S = 0.8
"""Less than the chain waits for an answer (`kvtier.chain.queries`)."""
DESCRIPTION = "namespace.json"
DESCRIBE_S = 600.0
LEFT_BEHIND_MAX = 8
"""So many calls may be late at a time; further ones fail until one of them has ended."""


class _Landing:
    """The memory of one call. Both the call and who waits for it, or has left it behind, let go of
    it: then another call may have it."""

    def __init__(self, size: int, free: list[_Landing]) -> None:
        self.data = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.data)
        self._free = free
        self._lock = threading.Lock()
        self.users = 0

    def let_go(self) -> None:
        with self._lock:
            self.users -= 1
            unused = not self.users
        if unused:
            self._free.append(self)


class MooncakeHandler(Handler):
    """A value is the record's header and its payload, without the padding of a slot."""

    batch_blocks = BATCH_BLOCKS

    def __init__(self, settings: MooncakeSettings, namespace: Namespace) -> None:
        self.concurrency = settings.threads
        self._seconds = settings.call_deadline.seconds
        self.call_seconds = 2 * self._seconds  # a store may take a call for what it replaces
        self._namespace = namespace
        self._prefix = f"{settings.prefix}/{namespace.id}"
        self._slot = record_bytes(namespace.payload_bytes)
        self._pool = Pool(settings)
        self._unused: list[_Landing] = []
        self._describe_at = 0.0
        most = settings.threads + LEFT_BEHIND_MAX
        self._calls = AbandonableCalls("kvtier-mooncake", most)
        # Else the first request would wait for it.
        abandonable(self._pool.open, "kvtier-mooncake-open")

    def find(self, spec: LoadStoreSpec, keys: Sequence[BlockKey]) -> list[Outcome]:
        names = [self._name(key) for key in keys]
        try:
            return self._calls.run(lambda: self._pool.exist(names), FIND_S)
        except (TimeoutError, RuntimeError):  # late, or so are too many others
            return [Outcome.TIMEOUT] * len(keys)

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        own_spec(spec, MooncakeSpec)
        if not keys:
            return []
        once = list(dict.fromkeys(keys))  # of one that is named twice Mooncake fills but one buffer
        names, sizes = [self._name(key) for key in once], self._sizes(once)

        def get(addresses: Sequence[int]) -> list[Outcome]:
            return self._pool.get(names, addresses, sizes)

        def arrived(pieces: Sequence[Buffer], outcomes: Sequence[Outcome]) -> None:
            came = dict(zip(once, zip(pieces, outcomes, strict=True), strict=True))
            for key, record in zip(keys, into, strict=True):
                piece, outcome = came[key]
                if outcome.ok:
                    _copy(piece, record[: len(piece)])

        outcomes = dict(zip(once, self._transfer(sizes, get, then=arrived), strict=True))
        return [outcomes[key] for key in keys]

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        replace = own_spec(spec, MooncakeSpec).replace
        outcomes = [Outcome.OK] * len(keys)
        for again in (False, True):
            mine = [at for at, each in enumerate(replace) if each is again]
            if mine:
                some = self._put([keys[at] for at in mine], [records[at] for at in mine], again)
                for at, outcome in zip(mine, some, strict=True):
                    outcomes[at] = outcome
        if Outcome.OK in outcomes and time.monotonic() >= self._describe_at:
            self._describe()
        return outcomes

    def _describe(self) -> None:
        """Say what namespace the values are of, for commands; now and then, as values may go."""
        self._describe_at = time.monotonic() + DESCRIBE_S
        name, text = f"{self._prefix}/{DESCRIPTION}", self._namespace.to_json()
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._calls.run(lambda: self._pool.write(name, text), self._seconds)

    def _put(
        self, keys: Sequence[BlockKey], records: Sequence[Buffer], replace: bool
    ) -> list[Outcome]:
        names, sizes = [self._name(key) for key in keys], self._sizes(keys)

        def put(addresses: Sequence[int]) -> list[Outcome]:
            return self._pool.put(names, addresses, sizes, replace=replace)

        def fill(pieces: Sequence[Buffer]) -> None:
            for piece, record in zip(pieces, records, strict=True):
                _copy(record[: len(piece)], piece)

        return self._transfer(sizes, put, first=fill)

    def _transfer(
        self,
        sizes: Sequence[int],
        call: Callable[[Sequence[int]], list[Outcome]],
        *,
        first: Callable[[Sequence[Buffer]], None] | None = None,
        then: Callable[[Sequence[Buffer], Sequence[Outcome]], None] | None = None,
    ) -> list[Outcome]:
        """Let a call have memory for values of these sizes, and look at that before it or after."""
        landing = self._take_landing()
        starts = [at * self._slot for at in range(len(sizes))]
        pieces = [landing.data[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        began = False

        def work() -> list[Outcome]:
            nonlocal began
            began = True
            try:
                self._pool.register(landing.address, len(landing.data))
                return call([landing.address + at for at in starts])
            finally:
                landing.let_go()

        try:
            if first is not None:
                first(pieces)
            outcomes = self._calls.run(work, self._seconds)
            if then is not None:
                then(pieces, outcomes)
            return outcomes
        except TimeoutError:
            return [Outcome.TIMEOUT] * len(sizes)
        except RuntimeError:  # too many others are late
            if not began:
                landing.let_go()
            return [Outcome.TIMEOUT] * len(sizes)
        finally:
            landing.let_go()

    def _take_landing(self) -> _Landing:
        try:
            landing = self._unused.pop()
        except IndexError:
            landing = _Landing(BATCH_BLOCKS * self._slot, self._unused)
        landing.users = 2
        return landing

    def _name(self, key: BlockKey) -> str:
        return f"{self._prefix}/{key.hex()}"

    def _sizes(self, keys: Sequence[BlockKey]) -> list[int]:
        return [HEADER_BYTES + self._namespace.payload_of(key) for key in keys]

    def close(self) -> None:
        self._calls.close()
        self._pool.close()


def _copy(source: Buffer, target: Buffer) -> None:
    """Not as slices: NumPy lets go of the GIL meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
