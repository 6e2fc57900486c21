"""Small media for tests of movers, which a mover's process opens like any backend's."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import select
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvtier.interfaces.backend import Backend, TierContext
from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import Buffer, record_bytes
from kvtier.settings import TierSettings
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, SlotSpec

SLOTS_MAX = 1024
_ROWS = 4  # fault, held, told, busiest
_OUTCOMES = list(Outcome)


class Fault(enum.IntEnum):
    """What a slot does when a handler comes to it."""

    NONE = 0
    GONE = 1
    RAISE = 2
    """A bug in the handler: an exception that no handler may raise."""
    PANIC = 3
    """One in a library of its, which raises what is no Exception."""


class Panic(BaseException):
    """As Rust code raises it by way of pyo3."""


class HostSpec(SlotSpec):
    """Slots of the medium that is host memory."""


class FileSpec(SlotSpec):
    """Slots of the medium that is not."""


class MediumSettings(TierSettings, frozen=True, kw_only=True):
    """Where the medium lies; the medium itself is created by `Medium`."""

    path: str


class HostSettings(MediumSettings, tag="test-host", frozen=True, kw_only=True):
    """The medium that is host memory."""


class FileSettings(MediumSettings, tag="test-file", frozen=True, kw_only=True):
    """The medium that is not, and how its handler wants to be called."""

    concurrency: int = 2
    batch_blocks: int = 4


class Medium:
    """One side's view of a medium: the test's, or that of a handler in whatever process."""

    def __init__(self, path: Path, record: int, *, create: bool = False) -> None:
        self.path = path
        self.record_bytes = record
        if create:
            for file, size in ((path, record), (self._beside("board"), _ROWS)):
                file.touch(mode=0o600)
                os.truncate(file, SLOTS_MAX * size)
            self._beside("gate").touch(mode=0o600)
            os.mkfifo(self._beside("calls"), 0o600)
        self.records = _map(path)
        self._board = _map(self._beside("board"))
        # Opened for both, so that neither side ever waits for the other to open it.
        self._calls = os.open(self._beside("calls"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gate: int | None = None

    def close(self) -> None:
        """Release what this side holds, the gate included."""
        self.release()
        os.close(self._calls)
        self._calls = -1

    def record(self, slot: int) -> Buffer:
        """One slot's bytes, in place."""
        if not 0 <= slot < SLOTS_MAX:
            raise IndexError(f"slot {slot} of {SLOTS_MAX}")
        return self.records[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    # ---- the test's side

    def hold(self, slots: Iterable[int]) -> None:
        """Handlers that come to these slots wait until `release`."""
        if self._gate is None:
            self._gate = os.open(self._beside("gate"), os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._gate, fcntl.LOCK_EX)
        for slot in slots:
            self._row(1)[slot] = 1

    def release(self) -> None:
        """Let everybody go on."""
        self._row(1)[:] = bytes(SLOTS_MAX)
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None

    def break_(self, slot: int, fault: Fault) -> None:
        """From now on this slot has a fault."""
        self._row(0)[slot] = fault

    def next_call(self, seconds: float = 120.0) -> tuple[str, list[int]]:
        """The next call that a handler began: "load" or "store", and the slots."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._calls], [], [], seconds)[0]:
                raise TimeoutError(f"no handler of {self.path.name} was called")
            line += os.read(self._calls, 1)
        operation, _, slots = line.decode().rstrip().partition(":")
        return operation, [int(slot) for slot in slots.split(",")]

    def reported(self, slot: int) -> Outcome | None:
        """The outcome that `landed` reported of this slot; None as long as there is none."""
        code = self._row(2)[slot]
        return _OUTCOMES[code - 1] if code else None

    @property
    def busiest(self) -> int:
        """The most calls that were ever inside a handler at once."""
        return self._row(3)[0]

    # ---- the handler's side

    @contextlib.contextmanager
    def call(self, operation: str, slots: Sequence[int], active: int) -> Iterator[None]:
        """Write a call down and go through what the test has prepared for these slots."""
        self._row(3)[0] = max(self._row(3)[0], active)
        line = f"{operation}:{','.join(map(str, slots))}\n".encode()
        with contextlib.suppress(BlockingIOError):  # a test that does not read misses calls
            os.write(self._calls, line)
        if any(self._row(1)[slot] for slot in slots):
            gate = os.open(self._beside("gate"), os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(gate, fcntl.LOCK_SH)
            os.close(gate)
        if any(self._row(0)[slot] == Fault.RAISE for slot in slots):
            raise RuntimeError("a fault that the test asked for")
        if any(self._row(0)[slot] == Fault.PANIC for slot in slots):
            raise Panic("a fault that the test asked for")
        yield

    def gone(self, slot: int) -> bool:
        """Whether the test took this slot's block away."""
        return self._row(0)[slot] == Fault.GONE

    def tell(self, slot: int, outcome: Outcome) -> None:
        """Write down what `landed` said."""
        self._row(2)[slot] = _OUTCOMES.index(outcome) + 1

    def _row(self, row: int) -> Buffer:
        return self._board[row * SLOTS_MAX : (row + 1) * SLOTS_MAX]

    def _beside(self, name: str) -> Path:
        return self.path.with_suffix(f".{name}")


class FileHandler(Handler):
    """Copies records between slots and host memory."""

    call_seconds = 0.0
    store_seconds = 3600.0

    def __init__(self, medium: Medium, concurrency: int, batch_blocks: int) -> None:
        self.concurrency = concurrency
        self.batch_blocks = batch_blocks
        self._medium = medium
        self._lock = threading.Lock()
        self._active = 0

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._copy("load", spec, into)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._copy("store", spec, records)

    def close(self) -> None:
        self._medium.close()

    def _copy(self, op: str, spec: LoadStoreSpec, buffers: Sequence[Buffer]) -> list[Outcome]:
        assert isinstance(spec, SlotSpec)
        outcomes = []
        with self._entered() as active, self._medium.call(op, spec.slots, active):
            for slot, buffer in zip(spec.slots, buffers, strict=True):
                if self._medium.gone(slot):
                    outcomes.append(Outcome.GONE)
                    continue
                record = self._medium.record(slot)
                if op == "load":
                    buffer[:] = record
                else:
                    record[:] = buffer
                outcomes.append(Outcome.OK)
        return outcomes

    @contextlib.contextmanager
    def _entered(self) -> Iterator[int]:
        with self._lock:
            self._active += 1
            active = self._active
        try:
            yield active
        finally:
            with self._lock:
                self._active -= 1


class MappedHandler(FileHandler, HostHandler):
    """The same slots as host memory."""

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        assert isinstance(spec, SlotSpec)
        return [self._medium.record(slot) for slot in spec.slots]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        assert isinstance(spec, SlotSpec)
        self._medium.tell(spec.slots[index], outcome)


class MediumBackend(Backend[MediumSettings]):
    """Opens the handlers of media that a test has created; there is no catalogue."""

    def __init__(
        self, kind: str, settings: type[MediumSettings], spec: type[SlotSpec], *, host: bool
    ) -> None:
        self.kind = kind
        self.settings = settings
        self.spec = spec
        self.host = host

    def check(self, settings: MediumSettings, record_bytes: int | None) -> None:
        pass

    def open_tier(self, settings: MediumSettings, context: TierContext) -> Tier:
        raise TypeError("these media have no catalogue")

    def open_handler(self, settings: MediumSettings, context: TierContext) -> Handler:
        medium = Medium(Path(settings.path), record_bytes(context.namespace.payload_bytes))
        if isinstance(settings, FileSettings):
            return FileHandler(medium, settings.concurrency, settings.batch_blocks)
        return MappedHandler(medium, 1, 8)


HOST = MediumBackend("test-host", HostSettings, HostSpec, host=True)
FILE = MediumBackend("test-file", FileSettings, FileSpec, host=False)


def _map(path: Path) -> Buffer:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


def install(folder: Path) -> None:
    """Write the entry points of these backends, so that a process with `folder` on its path (and
    this one, if it is) finds them as it would find anybody's."""
    info = folder / "kvtier_test_media-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvtier-test-media\nVersion: 1\n"
    )
    info.joinpath("entry_points.txt").write_text(
        "[kvtier.backends]\n"
        "test-host = support.movers.media:HOST\n"
        "test-file = support.movers.media:FILE\n"
    )
