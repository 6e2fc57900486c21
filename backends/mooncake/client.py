"""One Mooncake client: the settings that name its pool, how it is opened, and what it answers."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvtier.errors import ExtraMissing, MediumError
from kvtier.settings import ByteSize, Count, Duration, Threads, TierSettings
from kvtier.system.calls import abandonable
from kvtier.types import Outcome

CONNECT_S = 0.5
AGAIN_S = 1.0
"""After an attempt to reach the master that failed, the next one waits so long."""
REOPEN_S = 20.0
"""The master notices within 10 s that a machine has died. A client of which every transfer fails
for longer remembers wrongly where others are, and does so for ever: a new one takes its place."""
_LOCAL_BUFFER = 16 << 20
"""What the client takes for values of its own making: descriptions of namespaces."""

_PREFIX = re.compile(r"[A-Za-z0-9_-]+")

# Of Mooncake's `ErrorCode`, those that a tier can tell apart.
_NO_ROOM = frozenset({-200, -800, -1700})
"""It is full; or the owner of the room that was given has died, which the master has not noticed
yet."""
_GONE = frozenset({-703, -704, -707, -800})
"""Not there, not there yet, evicted while it was read; or its owner has died."""
_NOT_MOVED = frozenset({-800})
_WRONG_SIZE = frozenset({-600})
_LIBRARIES = "apt-get install libibverbs1 librdmacm1 libnuma1"


class MooncakeSettings(TierSettings, frozen=True, kw_only=True, tag="mooncake"):
    """Blocks in the memory of other machines, in a pool of Mooncake Store that engines share.

    `capacity` is how much of the pool an engine keeps in mind: as much as the pool has, or more.
    How much there is, how often it is kept and what is evicted is the pool's affair.
    """

    master: str
    """Where the pool's mooncake_master listens, like 10.0.0.1:50051."""
    metrics: str = ""
    """Where the master answers over HTTP (its --metrics_port), like 10.0.0.1:9003: with it ls, du,
    verify, copy and clear see what the pool holds. Engines do without."""
    prefix: str = "kvtier"
    """What the names of its values begin with: tiers with another prefix share nothing."""
    metadata: str = "P2PHANDSHAKE"
    """The metadata server of its clients, if they have one, like http://10.0.0.1:8080/metadata."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How values move."""
    device: str = ""
    """For rdma: the devices to use, like mlx5_0,mlx5_1; all of them if empty."""
    host: str = ""
    """By what name or address other machines reach this one; by default the address from which
    the master is reached."""
    lends: ByteSize = ByteSize(0)
    """Memory that this engine's mover adds to the pool. What lies there goes when the engine ends;
    a mooncake_client beside it keeps it."""
    replicas: Count = 1
    """In how many places the pool is to keep a block."""
    threads: Threads = 4
    """How many calls of the pool are under way at once."""
    call_deadline: Duration = Duration(5.0)
    """A call that takes longer is left behind, and its blocks have failed. Mooncake itself waits
    some 4 s for a master that has gone, and 30 s for what stands still."""

    def __post_init__(self) -> None:
        split_address(self.master)
        if self.metrics:
            split_address(self.metrics)
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix {self.prefix!r} is not of letters, digits, - and _ alone")


def split_address(master: str) -> tuple[str, int]:
    """Host and port of a master; raises ValueError."""
    host, colon, port = master.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{master!r} is no address of a master; write it like 10.0.0.1:50051")
    return host.strip("[]"), int(port)


def store_module() -> Any:
    """Mooncake's Python package, whichever wheel brings it; raises ExtraMissing or MediumError."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ExtraMissing("a tier of kind mooncake", "mooncake") from error
    except ImportError as error:  # of a library of the system's
        raise MediumError(f"Mooncake cannot be loaded ({error}): {_LIBRARIES}") from error


def address_towards(master: str) -> str:
    """The address of this machine from which it reaches the master; raises OSError."""
    with socket.create_connection(split_address(master), CONNECT_S) as link:
        host: str = link.getsockname()[0]
        return host


class Pool:
    """A client of the pool, which is there as soon as the master can be reached.

    For many threads. Its calls block for up to 30 s when a part of the pool stands still; the
    caller gives them threads that it can leave behind.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._module = store_module()
        self._opening = threading.Lock()
        self._store: Any = None
        self._again_at = 0.0
        self._closed = False
        self._registered: set[int] = set()
        self._moves_fail: float | None = None
        """Since when no transfer has succeeded."""
        self._copies = self._module.ReplicateConfig()
        self._copies.replica_num = settings.replicas

    def exist(self, names: Sequence[str]) -> list[Outcome]:
        """Whether the pool has values of these names."""
        codes = self._ask(lambda store: store.batch_is_exist(list(names)), len(names))
        return [
            Outcome.OK if code == 1 else Outcome.GONE if code == 0 else Outcome.IO_ERROR
            for code in codes
        ]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Outcome]:
        """Read values of exactly these sizes."""
        places = list(names), list(addresses), list(sizes)
        codes = self._ask(lambda store: store.batch_get_into(*places), len(names))
        self._note_moves(codes)
        return [_got(code, size) for code, size in zip(codes, sizes, strict=True)]

    def put(
        self,
        names: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        replace: bool,
    ) -> list[Outcome]:
        """Write values; one that is there stays, unless it is to be replaced."""
        places = list(names), list(addresses), list(sizes), self._copies

        def write(store: Any) -> list[int]:
            codes: list[int] = (store.batch_upsert_from if replace else store.batch_put_from)(
                *places
            )
            return codes

        codes = self._ask(write, len(names))
        self._note_moves(codes)
        return [
            Outcome.OK if code == 0 else Outcome.NO_SPACE if code in _NO_ROOM else Outcome.IO_ERROR
            for code in codes
        ]

    def remove_all(self, begins: str = "") -> None:
        """Remove all values whose names begin with the prefix of the settings, and then so."""
        pattern = f"^{self._settings.prefix}/{re.escape(begins)}"
        self._ask(lambda store: [store.remove_by_regex(pattern, True)], 1)

    def write(self, name: str, text: bytes) -> None:
        """Write a small value, if there is room."""
        self._ask(lambda store: [store.upsert(name, text, self._copies)], 1)

    def read(self, name: str) -> bytes:
        """A small value; empty if there is none."""
        store = self.open()
        found: bytes = store.get(name) if store is not None else b""
        return found

    def register(self, address: int, size: int) -> None:
        """Tell the client, once, of memory that values are read into and written from. Over tcp it
        does without: what cannot be registered shows when it is used."""
        if address not in self._registered:
            store = self.open()
            if store is not None and store.register_buffer(address, size) == 0:
                self._registered.add(address)

    def _note_moves(self, codes: Sequence[int]) -> None:
        """After a transfer: begin anew with another client if this one is of no use any more."""
        if not _NOT_MOVED.issuperset(codes):
            if any(code >= 0 for code in codes):
                self._moves_fail = None
            return
        now = time.monotonic()
        if self._moves_fail is None:
            self._moves_fail = now
        elif now - self._moves_fail > REOPEN_S:
            with self._opening:
                self._moves_fail = None
                useless, self._store = [self._store], None
                self._registered.clear()
            # It ends with the last call that has it, which may take as long as any of them.
            abandonable(useless.clear, "kvtier-mooncake-end")

    def _ask(self, call: Callable[[Any], list[int]], count: int) -> list[int]:
        store = self.open()
        return [-900] * count if store is None else call(store)

    def open(self) -> Any:
        """The client; None while there is none. Only this is locked: one thread opens it."""
        if self._store is not None:
            return self._store
        with self._opening:
            if self._store is None and not self._closed and time.monotonic() >= self._again_at:
                with contextlib.suppress(OSError):  # nobody listens there
                    self._store = self._connect()
                self._again_at = time.monotonic() + AGAIN_S
            return self._store

    def _connect(self) -> Any:
        settings = self._settings
        # Else the attempt would hold the interpreter for seconds.
        host = address_towards(settings.master)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        store = self._module.MooncakeDistributedStore()
        code = store.setup(
            f"{settings.host or host}:{port}",
            settings.metadata,
            settings.lends.bytes,
            _LOCAL_BUFFER,
            settings.protocol,
            settings.device,
            settings.master,
        )
        return store if code == 0 else None

    def close(self) -> None:
        """Leave the pool; what the client has lent to it is gone."""
        with self._opening:
            self._closed, store = True, self._store
            self._store = None
        if store is not None:
            store.close()


def _got(code: int, size: int) -> Outcome:
    if code == size:
        return Outcome.OK
    if code >= 0 or code in _WRONG_SIZE:
        return Outcome.CORRUPT
    if code in _GONE:
        return Outcome.GONE
    return Outcome.IO_ERROR
