"""When a region is pinned, beside an engine whose steps and driver are scripted."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import pytest

from kvtier.device import pinned
from kvtier.device.pacing import SHARE, EngineSteps
from kvtier.device.pinned import PinnedMemory, PinPlan

SLOT, SLOTS, PIECE = 4096, 64, 4
STEP_S = 0.005


class Engine:
    """A clock, a driver that takes time for each slot, and steps that follow each other while it
    is busy."""

    def __init__(self, slot_s: float, busy: float = 0.0, refuse_at: int = -1) -> None:
        self.now = 0.0
        self.steps = EngineSteps(self.clock)
        self.slices: list[tuple[float, int, float]] = []
        """When each began, its first slot, and how long it took."""
        self.returned = 0
        self.busy_until = busy
        self._slot_s = slot_s
        self._refuse_at = refuse_at
        self._stepped = 0.0
        self.memory = mmap.mmap(-1, SLOTS * SLOT)
        self.base = 0
        self.said: list[int] = []

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self._stepped + STEP_S <= min(end, self.busy_until):
            self._stepped += STEP_S
            self.now = self._stepped
            self.steps.ended()
            self.steps.began()
        self.now = end
        if end > self.busy_until and self.steps.any:
            self.steps.ended()
            self.steps._ended = self.busy_until

    def register(self, address: int, size: int) -> str | None:
        if len(self.slices) == self._refuse_at:
            return "out of memory"
        self.base = self.base or address
        began, taken = self.now, size // SLOT * self._slot_s
        self.pass_time(taken)
        self.slices.append((began, (address - self.base) // SLOT, taken))
        return None

    def unregister(self, address: int) -> None:
        self.returned += 1
        self.now += 0.3

    def note(self, piece: range | None) -> None:
        """How many slots are pinned in whole pieces by now."""
        self.said.append(0 if piece is None else self.said[-1] + len(piece))

    def pinned(self, order: list[range] | None = None, least: int = 0) -> PinnedMemory:
        pieces = [range(at, at + PIECE) for at in range(0, SLOTS, PIECE)]
        return PinnedMemory(
            memoryview(self.memory),
            SLOT,
            self,
            PinPlan(self.steps, order or pieces, least, self.note),
            clock=self.clock,
        )


class Waiting(threading.Event):
    """Lets the engine's time pass, for so long at the most."""

    def __init__(self, engine: Engine, end: float = 1e6) -> None:
        super().__init__()
        self._engine, self._end = engine, end

    def wait(self, timeout: float | None = None) -> bool:
        self._engine.pass_time(timeout or 0.0)
        return self._engine.now >= self._end


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    pinned._left.clear()


def test_the_start_waits_for_two_seconds_and_the_rest_comes_in_slices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvtier")
    engine = Engine(slot_s=0.125)
    memory = engine.pinned()
    memory.pin_first(Waiting(engine))
    assert [begun for begun, _, _ in engine.slices] == [0.0, 0.5, 1.0, 1.5]
    assert "while the engine rests" in caplog.text
    assert memory.pin_rest(Waiting(engine))
    assert len(engine.slices) == 4 + SLOTS - 4 * PIECE, "one slot takes longer than a slice may"
    assert engine.said[:2] == [0, PIECE]
    assert engine.said[-1] == SLOTS
    assert "pinned 0.0 of 0.0 GiB" in caplog.text, "every few seconds"
    assert "all 0.0 GiB of CPU memory are pinned (8 s)" in caplog.text


def test_what_a_full_batch_needs_is_pinned_whatever_that_takes() -> None:
    engine = Engine(slot_s=0.2)
    engine.pinned(least=30).pin_first(Waiting(engine))
    assert engine.said[-1] == 32


def test_an_engine_that_has_begun_to_serve_is_not_held_up_by_the_first_part() -> None:
    engine = Engine(slot_s=0.1, busy=1.0)
    engine.pass_time(0.1)
    engine.pinned().pin_first(Waiting(engine))
    assert engine.said == [0]


@pytest.mark.parametrize("slot_s", [2e-5, 9e-5])
def test_no_step_is_longer_than_it_may_be(slot_s: float) -> None:
    engine = Engine(slot_s, busy=1e6)
    memory = engine.pinned(least=1)
    engine.slices.clear()
    memory._rate = slot_s / SLOT  # as the first part has found
    engine.pass_time(1.0)
    assert memory.pin_rest(Waiting(engine))
    ends = [begun + taken for begun, _, taken in engine.slices]
    begins = [begun for begun, _, _ in engine.slices[1:]]
    assert all(taken <= 1.01 * SHARE * STEP_S for _, _, taken in engine.slices)
    assert all(b - a >= STEP_S / 2 for a, b in zip(ends, begins, strict=False))
    assert engine.now < 10


def test_slots_that_take_too_long_wait_until_the_engine_rests() -> None:
    engine = Engine(slot_s=0.004, busy=30.0)
    memory = engine.pinned()
    memory._rate = 0.004 / SLOT
    engine.pass_time(1.0)
    assert memory.pin_rest(Waiting(engine))
    assert engine.slices[0][0] >= 30.0
    assert engine.now < 31


def test_an_engine_that_never_rests_gets_them_after_a_minute_and_loses_its_share_at_most() -> None:
    engine = Engine(slot_s=0.004, busy=1e6)
    memory = engine.pinned()
    memory._rate = 0.004 / SLOT
    engine.pass_time(1.0)
    assert memory.pin_rest(Waiting(engine))
    begins = [begun for begun, _, _ in engine.slices]
    assert begins[0] >= 60.0
    assert engine.said[-1] == SLOTS
    assert sum(taken for _, _, taken in engine.slices) <= 1.1 * SHARE * (begins[-1] - begins[0])


def test_pieces_are_pinned_in_the_order_that_is_asked_for() -> None:
    engine = Engine(slot_s=0.3)
    order = [range(at, at + PIECE) for at in (40, 8, *range(0, 8, 4), *range(12, 40, 4))]
    order += [range(at, at + PIECE) for at in range(44, SLOTS, 4)]
    memory = engine.pinned(order)
    memory.pin_first(Waiting(engine))
    memory.pin_rest(Waiting(engine))
    firsts = [slot for _, slot, _ in engine.slices]
    assert [firsts[0], firsts[1] + 32] == [0, 0], "the second lies before the first"
    assert engine.slices[2][1] + 40 == 0
    assert engine.said[-1] == SLOTS


def test_a_refusal_amid_the_rest_keeps_what_is_pinned(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(slot_s=0.6, refuse_at=3)
    memory = engine.pinned()
    memory.pin_first(Waiting(engine))
    assert not memory.pin_rest(Waiting(engine))
    assert engine.returned == 0
    left = int(caplog.text.split(" of the CPU tier")[0].split()[-1])
    assert left == (SLOTS - PIECE - 2) * SLOT, "a piece, and two slots of the next"


def test_closing_leaves_what_takes_long_to_the_end_of_the_process() -> None:
    """Still mapped: what came to its addresses could not be pinned again."""
    engine = Engine(slot_s=0.01)
    memory = engine.pinned()
    memory.pin_first(Waiting(engine))
    memory.close()
    memory.close()
    assert engine.returned == 4
    with pytest.raises(BufferError):
        engine.memory.close()


def test_a_slab_that_comes_when_all_others_have_just_been_pinned_is_pinned_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(slot_s=1e-5)
    memory, coming = engine.pinned([range(4)]), [range(4, 8)]
    following = memory._next

    def ending() -> range | None:
        piece = following()
        if piece is None and coming:
            memory.extend([coming.pop()])
        return piece

    monkeypatch.setattr(memory, "_next", ending)
    assert memory.pin_rest(Waiting(engine))
    assert memory._more is not None
    memory._more.join()
    assert engine.said[-1] == 8


def test_where_no_thread_can_be_had_a_slab_is_pinned_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no reason to fail the job that has found it."""

    def limited(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = Engine(slot_s=1e-5)
    memory = engine.pinned([range(4)])
    assert memory.pin_rest(Waiting(engine))
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", limited)
        memory.extend([range(4, 8)])
    memory.extend([range(8, 12)])
    assert memory._more is not None
    memory._more.join()
    assert engine.said[-1] == 12
    memory.close()


def test_slabs_that_come_are_pinned_and_those_that_go_are_not_any_more() -> None:
    engine = Engine(slot_s=1e-5)
    memory = engine.pinned([range(4), range(4, 8)])
    memory.pin_first(Waiting(engine))
    assert memory.pin_rest(Waiting(engine))
    memory.extend([range(8, 12), range(12, 16)])
    assert memory._more is not None
    memory._more.join()
    assert engine.said[-1] == 16
    memory.drop(range(4, 12))
    assert engine.returned == len([at for _, at, _ in engine.slices if 4 <= at < 12])
    memory.close()
    assert engine.returned == len(engine.slices)
