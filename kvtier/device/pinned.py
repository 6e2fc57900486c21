"""Host memory that a device can reach directly: registered in pieces, as many as it gets.

While the driver pins, what else wants its locks waits, the engine's own calls and those of other
ranks too: some milliseconds for a piece. So as much as can be is pinned before an engine serves, at
full speed, and the rest where there is room for it beside the engine.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from kvtier.device.pacing import EngineSteps, Gaps
from kvtier.record.record import Buffer
from kvtier.slab.layout import pieces_of
from kvtier.system.memory import GIB, SAY_EVERY_S, Populating, address_of, system_takes

logger = logging.getLogger(__name__)

_FIRST_S = 2.0
_FIRST_BYTES_A_S = 8 * GIB
"""An engine's start waits for pinning for two seconds, or one for so many bytes, if that is more:
what is not pinned then is slower for a long time if the engine never rests."""
_LOOK_S = 0.02
_UNPIN_S = 1.0
"""An engine's end waits no longer; what is left is the process's end to give back."""

_left: list[Buffer] = []
"""Memory that stays mapped because it is still pinned: what came to its addresses otherwise could
not be pinned, and would seem to be."""


class Registrar(Protocol):
    """The driver's two calls."""

    def register(self, address: int, size: int) -> str | None:
        """Pin a range; the reason if the driver refuses."""

    def unregister(self, address: int) -> None:
        """Give it back."""


Watch = Callable[[Callable[[Sequence[range]], None], Callable[[range], None]], object]


class PinPlan(msgspec.Struct):
    """What of a region a rank pins, and beside what."""

    steps: EngineSteps = msgspec.field(default_factory=EngineSteps)
    order: Sequence[range] = ()
    """Its slots in pieces; one behind the other if none are named."""
    least_slots: int = 0
    """So many are pinned before the engine serves, however long that takes."""
    note: Callable[[range | None], object] = lambda piece: None
    """Told of each piece that is pinned; of None when it begins."""
    watch: Watch = lambda mapped, unmapped: None
    """Tells of pieces that are mapped later, and of slots that are about to be unmapped."""


class PinnedMemory:
    """A region's slots, to be pinned in an order, until this is closed.

    If a piece is refused, copies from and to the rest go through the driver's own buffers, which
    works and is slower. Those before are kept: copies use them by now, and must not lose memory on
    their way.
    """

    def __init__(
        self,
        data: Buffer,
        slot_bytes: int,
        registrar: Registrar,
        plan: PinPlan,
        *,
        cores: Collection[int] = (),
        page_bytes: int = mmap.PAGESIZE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registrar = registrar
        self._plan = plan
        self._data = data[:]
        self._addresses: dict[int, int] = {}
        """What is pinned: where each range begins, and its size."""
        self._changing = threading.Lock()
        self._running = False
        self._stopping: threading.Event | None = None
        self._more: threading.Thread | None = None
        self._base = address_of(data)
        self._slot_bytes = slot_bytes
        self._page_bytes = page_bytes
        pieces = plan.order or list(pieces_of(len(data) // slot_bytes, slot_bytes, self._base))
        self._left = deque((piece, piece) for piece in pieces)
        """The pieces that are not pinned, and what is left of each."""
        self._size = sum(map(len, pieces)) * slot_bytes
        self._gaps = Gaps(plan.steps, clock)
        self._cores = cores
        self._clock = clock
        self._pinned = 0
        self._rate = 0.0
        """Seconds that a byte takes."""
        self._refused = False
        self._began = self._said = clock()
        plan.note(None)
        plan.watch(self.extend, self.drop)

    # -- before the engine serves ----------------------------------------------------------

    def pin_first(self, stopping: threading.Event) -> None:
        """Pin as much as the engine's start is to wait for, or all. None if it has begun to work:
        then it waits for nothing."""
        end = self._began + max(_FIRST_S, self._size / _FIRST_BYTES_A_S)
        self._said = self._clock()
        populating: Populating | None = None
        ahead = [self._range(piece) for piece, _ in self._left]
        for index in range(len(ahead)):
            piece = self._next()
            late = (
                self._clock() >= end and self._pinned >= self._plan.least_slots * self._slot_bytes
            )
            if late or self._plan.steps.any or piece is None or stopping.is_set():
                break
            if populating is None:
                logger.info("pinning %.1f GiB of CPU memory", self._size / GIB)
                populating = Populating(ahead, self._cores)
            populating.wait(index)
            self._pin(piece)
            self._say_how_far()
        if populating is not None:
            populating.stop()
        self._say_where()

    # -- beside it -------------------------------------------------------------------------

    def pin_rest(self, stopping: threading.Event) -> bool:
        """Pin what is left where the engine leaves room; whether the device reaches all of it
        directly now. Ends early if it is to stop."""
        with self._changing:
            self._stopping, self._running = stopping, True
        try:
            return self._pin_left(stopping)
        except BaseException:
            self._running = False
            raise

    def _next(self) -> range | None:
        """What is to be pinned next; None if nothing is, or can be: whoever pins goes no further.
        Both at once, since what comes later has to find somebody who pins it."""
        with self._changing:
            if self._left and not self._refused:
                return self._left[0][1]
            self._running = False
            return None

    def _pin_left(self, stopping: threading.Event) -> bool:
        behind = self._pinned < self._size
        while (rest := self._next()) is not None:
            room = self._gaps.room(self._slot_bytes * self._rate)
            if not room:
                if stopping.wait(_LOOK_S):
                    return False
                continue
            if stopping.is_set():
                return False
            took = self._slice(rest, room)
            system_takes(*self._range(took))  # else the driver maps it, and holds its locks
            self._gaps.took(self._pin(took))
            self._say_how_far()
        if behind and not self._refused:
            seconds = self._clock() - self._began
            logger.info("all %.1f GiB of CPU memory are pinned (%.0f s)", self._size / GIB, seconds)
        return not self._refused

    # -- slabs that come and go ------------------------------------------------------------

    def extend(self, pieces: Sequence[range]) -> None:
        """There are more slots to pin, beside the engine."""
        with self._changing:
            self._left.extend((piece, piece) for piece in pieces)
            self._size += sum(map(len, pieces)) * self._slot_bytes
            # Else whoever pins goes on with these.
            stopping = None if self._running else self._stopping
            self._running |= stopping is not None
        if stopping is None:
            return
        thread = threading.Thread(
            target=self.pin_rest, args=[stopping], name="kvtier-pin", daemon=True
        )
        try:
            thread.start()
            self._more = thread
        except RuntimeError as error:  # the system gives no more threads
            self._running = False
            logger.debug("%s: new CPU memory stays pageable until more of it comes", error)

    def drop(self, slots: range) -> None:
        """These slots are about to be unmapped; nothing copies there any more."""
        begin, size = self._range(slots)
        with self._changing:
            for address in [at for at in self._addresses if begin <= at < begin + size]:
                self._registrar.unregister(address)
                self._pinned -= self._addresses[address]
                self._size -= self._addresses.pop(address)
            kept = [each for each in self._left if each[0].start not in slots]
            self._size -= sum(len(rest) for _, rest in self._left) * self._slot_bytes
            self._size += sum(len(rest) for _, rest in kept) * self._slot_bytes
            self._left = deque(kept)

    def _slice(self, piece: range, seconds: float) -> range:
        """As many of a piece's slots as can be pinned meanwhile, and one at the least; one where it
        is not known how long that takes."""
        slots = int(seconds / (self._rate * self._slot_bytes)) if self._rate else 1
        end = min(piece.start + max(slots, 1), piece.stop)
        while end < piece.stop and (self._base + end * self._slot_bytes) % self._page_bytes:
            end += 1
        return range(piece.start, end)

    # -- both ------------------------------------------------------------------------------

    def _range(self, piece: range) -> tuple[int, int]:
        return self._base + piece.start * self._slot_bytes, len(piece) * self._slot_bytes

    def _pin(self, slots: range) -> float:
        """Pin some slots of the next piece; how long the driver took."""
        with self._changing:
            if not self._left or self._left[0][1].start != slots.start:  # it was unmapped meanwhile
                return 0.0
            address, size = self._range(slots)
            before = self._clock()
            reason = self._registrar.register(address, size)
            taken = self._clock() - before
            if reason is not None:
                self._refuse(reason)
                return taken
            self._addresses[address] = size
            self._pinned += size
            self._rate = taken / size
            piece, rest = self._left.popleft()
            if len(rest) > len(slots):
                self._left.appendleft((piece, rest[len(slots) :]))
                return taken
        self._plan.note(piece)
        return taken

    def _refuse(self, reason: str) -> None:
        self._refused = True
        logger.warning(
            "%d of the CPU tier's %d bytes stay pageable, so that their copies are "
            "slower: pinning more was refused (%s). Raise the memlock limit (ulimit -l), "
            "or make the cpu tier's capacity smaller",
            self._size - self._pinned,
            self._size,
            reason,
        )

    def _say_how_far(self) -> None:
        if self._clock() - self._said >= SAY_EVERY_S and self._pinned < self._size:
            self._said = self._clock()
            logger.info("pinned %.1f of %.1f GiB", self._pinned / GIB, self._size / GIB)

    def _say_where(self) -> None:
        seconds = self._clock() - self._began
        if self._pinned == self._size:
            what = "all"
        elif self._refused:
            return
        else:
            what = "the rest follows while the engine rests"
        logger.info(
            "%.1f of %.1f GiB of CPU memory are pinned after %.1f s: %s",
            self._pinned / GIB,
            self._size / GIB,
            seconds,
            what,
        )

    def close(self) -> None:
        """Give all pieces back, the last one first, or leave them to the process's end if that
        takes long; nothing may be copying any more."""
        if self._more is not None:
            self._more.join()
        end = self._clock() + _UNPIN_S
        while self._addresses and self._clock() < end:
            self._registrar.unregister(self._addresses.popitem()[0])
        if self._addresses:
            _left.append(self._data)
            self._addresses.clear()
            self._data = memoryview(b"")
            logger.debug("pinned memory is left to the end of the process")
        self._data.release()
