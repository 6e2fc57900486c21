"""Engines of a stack share their CPU memory: what one has is a hit for all, and room goes round."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put, served, settings
from support.tiers.nvme_rig import child, expect, open_files

from kvtier.backends.cpu import BACKEND, CpuTier
from kvtier.interfaces.backend import TierContext
from kvtier.slab.files import used_bytes
from kvtier.testing.subject import blank, make_keys, prove
from kvtier.types import BlockKey, Outcome, Presence

B = TierContext(CONTEXT.namespace, "b")
BLOCKS = 2000
"""Four slabs."""
WAIT_S = 20.0


def comes(true: Callable[[], bool], *tiers: CpuTier) -> bool:
    """Whether this becomes so, while engines take their steps."""
    end = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < end:
        for tier in tiers:
            tier.tick()
        time.sleep(0.01)
    return true()


def here(tier: CpuTier, keys: Sequence[BlockKey]) -> int:
    return sum(found is Presence.HIT for found in tier.lookup(keys))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[CpuTier, CpuTier]]:
    with opened(tmp_path, blocks=BLOCKS) as a, opened(tmp_path, B, BLOCKS) as b:
        assert comes(lambda: b.has_room, a, b)
        yield a, b


def share(tier: CpuTier) -> bool:
    """Whether it has its half of the room."""
    return tier._places.own_slots >= BLOCKS // 2 - 20


def test_what_one_computes_is_a_hit_for_the_other(pair: tuple[CpuTier, CpuTier]) -> None:
    a, b = pair
    keys = make_keys(100)
    put(a, keys)
    assert comes(lambda: here(b, keys) == 100, b)
    assert served(b, keys) == served(a, keys) == keys
    assert (b.stats().neighbour_loads, a.stats().neighbour_loads) == (100, 0)
    assert b.prepare_store(keys).keys == [], "it is not held twice"


def test_a_new_engine_gets_its_room_and_takes_no_memory_beside(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, blocks=BLOCKS) as a:
        keys = make_keys(BLOCKS)
        put(a, keys)
        before = here(a, keys)
        with opened(tmp_path, B, BLOCKS) as b:
            assert comes(lambda: b.has_room, b), "an idle engine gives it"
            capacity = settings(tmp_path, BLOCKS).capacity.resolve(0)
            assert used_bytes(tmp_path) <= capacity
            assert here(b, keys) + BLOCKS // 4 >= before, "what was in it is still there"
            fill = make_keys(BLOCKS // 2, start=10**6)
            assert comes(lambda: bool(put(b, fill) or share(b)), a, b)
            assert share(a), "each has its half"
            assert used_bytes(tmp_path) <= capacity
    assert used_bytes(tmp_path) <= capacity


def test_what_dies_with_an_engine_is_adopted(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=BLOCKS) as a:
        put(a, make_keys(10, start=500))
        with child(STORER, tmp_path, BLOCKS) as process:
            expect(process, "stored")
            assert comes(lambda: here(a, make_keys(20)) == 20, a)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert comes(lambda: a._places.alone, a)
        assert served(a, make_keys(20)) == make_keys(20)


def test_what_is_read_or_held_twice_while_it_is_adopted_is_served_on(tmp_path: Path) -> None:
    read, both = make_keys(10), make_keys(10, start=10)
    with opened(tmp_path, blocks=BLOCKS) as a:
        with child(STORER, tmp_path, BLOCKS) as process:
            expect(process, "stored")
            assert comes(lambda: here(a, read) == 10, a)
            a.prepare_load(read)
            a.forget(both)
            put(a, both)  # its own, while the neighbour has them, too
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert comes(lambda: a._places.alone, a)
        assert served(a, read + both) == read + both
        a.complete_load(read)
        assert served(a, read + both) == read + both
        stats = a.stats()
        assert (stats.blocks, stats.pinned) == (20, 0)
        assert stats.free == a._places.own_slots - 20, "the second copies are room again"


STORER = """
from support.tiers.cpu_regions import BACKEND, CONTEXT, put, settings
context = type(CONTEXT)(CONTEXT.namespace, "child")
tier = BACKEND.open_tier(settings(Path(sys.argv[1]), int(sys.argv[2])), context)
while not tier.has_room:
    tier.refresh()
put(tier, make_keys(20))
print("stored", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""

OVERWRITER = """
from support.tiers.cpu_regions import BACKEND, CONTEXT, put, settings
context = type(CONTEXT)(CONTEXT.namespace, "child")
tier = BACKEND.open_tier(settings(Path(sys.argv[1]), int(sys.argv[2])), context)
while not tier.has_room:
    tier.refresh()
print("ready", flush=True)
start = 0
while True:
    put(tier, make_keys(16, start=start))
    tier.tick()
    start += 16
"""


def test_who_reads_what_its_owner_uses_again_gets_right_bytes_or_none(tmp_path: Path) -> None:
    """The owner overwrites as fast as it can, takes no lock and waits for nobody."""
    outcomes: list[Outcome] = []
    with opened(tmp_path, blocks=BLOCKS) as a, child(OVERWRITER, tmp_path, BLOCKS) as process:
        expect(process, "ready")
        handler = BACKEND.open_handler(settings(tmp_path), CONTEXT)
        end = time.monotonic() + 3 * WAIT_S
        while outcomes.count(Outcome.OK) < 200 and time.monotonic() < end:
            a.tick()
            latest = [key for key, slot in a._where.items() if not a._owned(slot)][-64:]
            found = zip(latest, a.lookup(latest), strict=True)
            for key in [key for key, now in found if now is Presence.HIT]:
                into = blank()
                [outcome] = handler.load(a.prepare_load([key]), [key], [into])
                if outcome.ok:
                    assert prove(into, key).ok, "never wrong bytes"
                outcomes.append(outcome)
                a.complete_load([key], {} if outcome.ok else {key: outcome})
        handler.close()
        assert a.stats().corrupt == 0
    assert set(outcomes) <= {Outcome.OK, Outcome.GONE}
    assert outcomes.count(Outcome.OK) >= 200


def test_a_reset_is_felt_by_nobody_else(pair: tuple[CpuTier, CpuTier]) -> None:
    """Where the weights change, keys do: here is what memory does by itself."""
    a, b = pair
    of_a, of_b = make_keys(20), make_keys(20, start=500)
    put(a, of_a)
    put(b, of_b)
    assert comes(lambda: here(a, of_b) == here(b, of_a) == 20, a, b)
    a.clear()
    assert here(a, of_a + of_b) == 0, "nothing from before, whoever has it"
    assert comes(lambda: here(b, of_a) == 0, b), "what was A's is gone"
    assert here(b, of_b) == 20, "what was B's is not"


def test_of_what_both_hold_one_copy_goes_first(pair: tuple[CpuTier, CpuTier]) -> None:
    a, b = pair
    both = make_keys(10)
    reserved = a.prepare_store(both)
    put(b, both)
    put_reserved(a, reserved.keys, reserved.spec.slots)  # type: ignore[attr-defined]
    own = make_keys(20, start=100)
    put(a, own)
    a.touch(both)
    assert comes(lambda: len(a._copies.slot_of) == 10, a, b)
    with contextlib.suppress(AssertionError):
        put(a, make_keys(a.stats().free, start=10**6))
    evicted = a.prepare_store(make_keys(5, start=10**7)).evicted
    assert set(evicted) <= set(both), "though they were used last"
    assert here(a, both) == 10, "they are served from the neighbour's"


def test_what_a_neighbour_uses_goes_later(pair: tuple[CpuTier, CpuTier]) -> None:
    a, b = pair
    first = make_keys(20)
    put(a, first)
    put(a, make_keys(a.stats().free, start=10**6))
    assert set(a.victims(20)) == set(first), "they have not been used for longest"
    assert comes(lambda: here(b, first) == 20, b)

    def used_here() -> bool:
        b.touch(first)
        return set(a.victims(20)).isdisjoint(first)

    assert comes(used_here, a, b)


def put_reserved(tier: CpuTier, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
    from kvtier.testing.subject import fill

    for key, slot in zip(keys, slots, strict=True):
        fill(tier.region.record(slot), key)
    tier.complete_store(keys)


@contextlib.contextmanager
def learning(folder: Path, context: TierContext = CONTEXT) -> Iterator[CpuTier]:
    adaptive = msgspec.structs.replace(settings(folder, BLOCKS), eviction="adaptive")
    tier = BACKEND.open_tier(adaptive, context)
    try:
        yield tier
    finally:
        tier.close()


def uses_watched(tier: CpuTier) -> int:
    watched: int = tier._policy._policy._history._watched[0]  # type: ignore[attr-defined]
    return watched


def test_they_learn_together_and_from_the_dead(tmp_path: Path) -> None:
    files = open_files()
    with learning(tmp_path) as a, learning(tmp_path, B) as b:
        assert comes(lambda: b.has_room, a, b)
        put(a, make_keys(400))
        put(b, make_keys(400, start=1000))
        before = uses_watched(a)
        assert uses_watched(b) == before > 150
    (path,) = tmp_path.rglob("owners/learned")
    assert path.stat().st_mode & 0o777 == 0o600
    with learning(tmp_path) as a:
        assert uses_watched(a) == before
    assert open_files() == files


@pytest.mark.parametrize("kind", ["cut short", "a folder", "a link", "a pipe"])
def test_an_engine_starts_whatever_lies_where_it_would_learn(tmp_path: Path, kind: str) -> None:
    with learning(tmp_path) as a:
        put(a, make_keys(100))
    (path,) = tmp_path.rglob("owners/learned")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    if kind == "cut short":
        os.truncate(path, 100)
    else:
        path.unlink()
        make = {"a folder": path.mkdir, "a link": lambda: path.symlink_to(secret)}
        make.get(kind, lambda: os.mkfifo(path))()
    with learning(tmp_path) as a:
        assert served(a, make_keys(100)) == make_keys(100)
        put(a, make_keys(2 * BLOCKS, start=1000))
        assert uses_watched(a) > 0
    assert path.is_file() != (kind == "a folder")
    assert secret.read_bytes() == b"secret"
