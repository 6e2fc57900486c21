"""What a keeper has found, and when its tier takes it in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine

from kvtier.backends.nvme.tier import NvmeTier
from kvtier.eviction import create_policy
from kvtier.slab import folder_tier as tier_module
from kvtier.slab.watch import SlabUpdate
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey, Presence


def test_news_for_an_idle_engine_is_bounded(tmp_path: Path) -> None:
    idle, busy = Engine(tmp_path / "kv", blocks=16), Engine(tmp_path / "kv", blocks=16)
    keys = make_keys(150)
    for key in keys:
        busy.put([key])
        idle.keeper.work()
    assert len(idle.keeper.updates) < 100
    assert idle.read(keys) == busy.read(keys) != []


def test_an_idle_engine_gives_slabs_away_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module.FolderTier, "idle_s", 0.0)
    idle = Engine(tmp_path / "kv", blocks=16)
    idle.put(make_keys(16))
    poor = Engine(tmp_path / "kv", blocks=16)
    new = make_keys(4, start=100)
    assert poor.put(new) == []
    for _ in range(6):
        idle.keeper.work(thorough=True)
        idle.keeper.when_idle()
        poor.tier.refresh()
    assert poor.put(new) == new


def test_what_a_class_overrides_is_run(tmp_path: Path) -> None:
    noted = []

    class Noting(NvmeTier):
        def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
            noted.append("touch")
            super().touch(keys, start)

        def victims(self, count: int) -> list[BlockKey]:
            noted.append("victims")
            return super().victims(count)

    tier = Noting(Engine(tmp_path / "kv").keeper, create_policy("lru"))
    tier.touch(make_keys(1))
    assert tier.victims(1) == []
    assert noted == ["touch", "victims"]


def test_a_tier_that_is_being_asked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.slab.folder_tier.FolderTier.idle_s", 600.0)
    engine = Engine(tmp_path / "kv", blocks=4)
    engine.keeper.updates.append(
        SlabUpdate(next(iter(engine.tier._places.by_slab.values())).slab, gone=True)
    )
    for _ in range(2):
        engine.keeper.when_idle()
    assert engine.keeper.updates, "it was asked a moment ago"
    engine.tier.turns._idle_since -= 1000
    keeper = threading.Thread(target=engine.keeper.when_idle)
    with engine.tier.turns.mutex:
        keeper.start()
        keeper.join()
    assert engine.keeper.updates, "it is being asked"
    engine.keeper.when_idle()
    assert not engine.keeper.updates


def test_much_news_is_taken_in_a_little_at_each_call_but_at_once_if_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_UPDATE_SLOTS", 1)
    keys = make_keys(12)
    heir, dying = Engine(tmp_path / "kv", blocks=24), Engine(tmp_path / "kv", blocks=24)
    assert dying.put(keys) == keys
    dying.close()
    heir.keeper.work(thorough=True)
    slabs = len(heir.keeper.updates)
    assert slabs >= 3
    heir.tier.tick()
    assert len(heir.keeper.updates) == slabs - 1
    monkeypatch.setattr(heir.tier.turns, "_idle_s", 0.0)
    for _ in range(2):
        heir.keeper.when_idle()
    assert not heir.keeper.updates
    assert heir.read(keys) == keys


def test_who_asks_while_the_keeper_takes_news_in_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    keys = make_keys(4)
    engine.put(keys)
    tier, take_in = engine.tier, engine.tier._take_in
    found: list[Presence] = []
    asking = threading.Thread(target=lambda: found.extend(tier.lookup(keys)))

    def slowly(news: SlabUpdate) -> int:
        asking.start()
        asking.join(0.05)
        assert asking.is_alive(), "what it finds is about to go"
        return take_in(news)

    monkeypatch.setattr(tier, "_take_in", slowly)
    engine.keeper.updates.append(
        SlabUpdate(next(iter(tier._places.by_slab.values())).slab, gone=True)
    )
    engine.keeper.when_idle()
    tier.turns._idle_since -= 10
    engine.keeper.when_idle()
    asking.join()
    assert found == [Presence.MISS] * 4


def test_nobody_tells_of_events_while_the_keeper_folds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came meanwhile would be lost."""
    engine = Engine(tmp_path / "kv", blocks=4)
    key, mutex = make_keys(1), engine.tier.turns.mutex
    free: list[bool] = []

    def another_calls() -> None:
        free.append(mutex.acquire(blocking=False))
        if free[-1]:
            mutex.release()

    def fold() -> None:
        calling = threading.Thread(target=another_calls)
        calling.start()
        calling.join()

    engine.put(key)
    engine.keeper.when_idle()
    engine.tier.turns._idle_since -= 10
    monkeypatch.setattr(engine.tier._events, "fold", fold)
    engine.keeper.when_idle()
    assert free == [False]


class Door:
    """A lock that says when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.waited_for = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.waited_for.set()
        return blocking and self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize(
    "call", [NvmeTier.tick, lambda tier: tier.complete_store([])], ids=["tick", "commit"]
)
def test_who_goes_on_while_the_keeper_takes_much_in_waits_for_a_little_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[NvmeTier], None]
) -> None:
    """Also who does not begin with a lookup, as after a long step."""
    monkeypatch.setattr(tier_module, "_UPDATE_SLOTS", 1)
    engine = Engine(tmp_path / "kv", blocks=4)
    tier, news, door = engine.tier, engine.keeper.updates, Door()
    tier.turns.mutex = door  # type: ignore[assignment]
    going_on = threading.Thread(target=call, args=[tier])
    take_in = tier._take_in

    def meanwhile(each: SlabUpdate) -> int:
        if not door.waited_for.is_set():
            going_on.start()
            door.waited_for.wait()
        return take_in(each)

    monkeypatch.setattr(tier, "_take_in", meanwhile)
    slab = next(iter(tier._places.by_slab.values())).slab
    news.extend([SlabUpdate(slab, gone=True)] * 50)
    engine.keeper.when_idle()
    tier.turns._idle_since -= 10
    engine.keeper.when_idle()
    going_on.join()
    assert len(news) > 40
