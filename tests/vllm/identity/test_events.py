"""Events that describe themselves: who replays them knows what is where, in vLLM's own words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.adapter import make_adapter
from engines.engine import Engine, connector
from engines.world import World, prompt
from support.scheduler.told_events import (
    CPU_TIER,
    NVME_TIER,
    OBJECT_TIER,
    chunk_of,
    events_with,
    told_of,
)

PROMPT = prompt(21, 1100)
HIT = 1024
BLOCK = 32
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
importing = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
Place = tuple[str, str | None, str | None]
GPU: Place = ("GPU", None, None)
CPU: Place = ("CPU", None, None)
STORAGE: Place = ("STORAGE", None, None)
NVME: Place = ("STORAGE", "LOCAL", "nvme")


class Router:
    """What somebody knows who hears of all events of an engine."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        """Of each block: the one before, its tokens, and what else is in its hash."""
        self.held: dict[Place, Counter[str]] = defaultdict(Counter)
        self._heard = 0

    def listen(self, engine: Engine) -> None:
        events = engine.events()
        for event in events[self._heard :]:
            getattr(self, event["kind"])(event)
        self._heard = len(events)

    def BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert event["block_size"] == BLOCK
        assert len(tokens) == BLOCK * len(hashes)
        extra = event["extra_keys"] or [None] * len(hashes)
        for at, block in enumerate(hashes):
            before = hashes[at - 1] if at else event["parent_block_hash"]
            said = (before, tokens[at * BLOCK : (at + 1) * BLOCK], event["lora_name"], extra[at])
            assert self.content.setdefault(block, said) == said, "in all words alike"
        self._place(event).update(hashes)

    def BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        self._place(event).subtract(event["block_hashes"])

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:  # noqa: N802
        self.held[GPU].clear()

    def _place(self, event: dict[str, Any]) -> Counter[str]:
        return self.held[event["medium"], event["locality"], event["ownership"]]

    def has(self, place: Place) -> list[int]:
        """The tokens of all prompts' beginnings that are there: every block of them, once."""
        held = +self.held[place]
        assert set(held.values()) <= {1}
        assert not -self.held[place], "nothing is taken back that was not told"
        ends = held.keys() - {self.content[block][0] for block in held}
        return sorted(self._depth(block, held) for block in ends)

    def _depth(self, block: str, held: Counter[str]) -> int:
        depth = 0
        while block is not None:
            assert block in held, "a prompt's beginning, whole"
            block, depth = self.content[block][0], depth + BLOCK
        return depth


def options(stack: dict[str, Any], **more: Any) -> dict[str, Any]:
    transfer = connector(stack)
    transfer["kv_connector_extra_config"] |= more
    return {"transfer": transfer, "kv_events_config": EVENTS, "block_size": BLOCK}


@pytest.mark.parametrize("adapted", [False, True], ids=["plain and salted", "adapted"])
def test_a_router_knows_what_each_tier_has(
    world: World, model: Callable[..., Path], adapted: bool
) -> None:
    """With a salt and with an adapter, too, after resets and after a restart; and nothing of that
    piles up. (On a CPU an engine with adapters keeps nothing of requests without one.)"""
    adapter = world.folder / "adapter"
    make_adapter(adapter, 1)
    named = {"adapter": ["tuned", 1, str(adapter)]}
    lora = {"enable_lora": True, "max_lora_rank": 8} if adapted else {}
    asked: list[dict[str, Any]] = [named] if adapted else [{}, {"cache_salt": "mine"}]
    hits = [HIT] * len(asked)
    with world.engine(model("llama"), **options(world.stack()), **lora) as engine:
        engine.record_events()
        router = Router()
        for _ in range(2):
            for more in asked:
                engine.generate(prompts=[PROMPT], more=[more])
            engine.settle()
            router.listen(engine)
            assert router.has(CPU) == router.has(STORAGE) == hits
            assert min(router.has(GPU)) >= HIT
            assert {each[2] for each in router.content.values()} == {"tuned" if adapted else None}
            salted = [each[3] for each in router.content.values() if each[3] == ["mine"]]
            assert len(salted) == len(asked) - 1, "the first block's hash alone has it"
            engine.clear(tier=0)
            router.listen(engine)
            assert (router.has(CPU), router.has(STORAGE)) == ([], hits)
            engine.forget_everything()
            engine.look_around()  # the disk has room again
            engine.generate(prompts=[PROMPT[:9]])  # what happens beside steps is told in the next
            router.listen(engine)
            assert (router.has(CPU), router.has(STORAGE), engine.described()) == ([], [], 0)
    with world.engine(model("llama"), **options(world.stack()), **lora) as engine:
        engine.generate(prompts=[PROMPT], more=asked[:1])
        engine.settle()
        engine.kill()
    by_tier = options(world.stack(), kv_events_by_tier=True)
    with world.engine(model("llama"), **by_tier, **lora) as engine:
        engine.clear(tier=0)
        engine.record_events()
        router = Router()
        router.listen(engine)
        assert (router.has(CPU), router.has(NVME)) == ([], []), "nobody has said what that is"
        assert engine.generate(prompts=[PROMPT], more=asked[:1])[0]["cached"] == HIT
        engine.settle()
        router.listen(engine)
        assert (router.has(CPU), router.has(NVME)) == ([HIT], [HIT])
        engine.clear(tier=0)
        router.listen(engine)
        assert (router.has(CPU), router.has(NVME)) == ([], [HIT])
        assert engine.facts()["mistakes"] == 0


def test_what_the_tiers_have_is_told_again_when_the_engine_forgets(
    world: World, model: Callable[..., Path]
) -> None:
    """Routers take the emptying of vLLM's own cache for that of all tiers."""
    with world.engine(model("llama"), **options(world.stack())) as engine:
        engine.record_events()
        engine.generate(prompts=[PROMPT])
        engine.settle()
        before = len(engine.events())
        engine.forget_engine_cache()
        engine.generate(prompts=[PROMPT[:9]])
        told = engine.events()[before:]
        cleared = [each["kind"] for each in told].index("AllBlocksCleared")
        again = [each for each in told[cleared:] if each["kind"] == "BlockStored"]
        for medium in ("CPU", "STORAGE"):
            tokens = [each["token_ids"] for each in again if each["medium"] == medium]
            assert sum(map(len, tokens)) == HIT
        assert engine.facts()["mistakes"] == 0


def test_blocks_of_windows_are_not_announced(world: World, model: Callable[..., Path]) -> None:
    """By them nobody can tell how much of a prompt is there."""
    with world.engine(model("gemma3"), **options(world.stack())) as engine:
        engine.record_events()
        engine.generate(prompts=[PROMPT])
        engine.settle()
        told = [each for each in engine.events() if each.get("medium") in ("CPU", "STORAGE")]
        assert engine.facts()["mistakes"] == 0
    assert {each["kv_cache_spec_kind"] for each in told} == {"full_attention"}


# -- the part that keeps what will be told --------------------------------------------------------


@pytest.fixture
def hashes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_what_is_forgotten_was_taken_back() -> None:
    events, chunks = events_with(2), [chunk_of(each) for each in range(3)]
    keys = [chunk[-1] for chunk in chunks]
    for chunk in chunks[:2]:
        events.record_store(*chunk)
    first, second = events.take_events([told_of(keys[:2])])
    assert first.block_hashes == chunks[0][0].block_hashes[2:]
    assert first.parent_block_hash == chunks[0][0].block_hashes[1]
    assert first.token_ids == list(range(32, 64))

    events.record_lookup(*chunks[0])
    events.record_store(*chunks[2])
    _, gone = events.take_events([told_of(keys[2:])])
    assert gone.block_hashes == second.block_hashes, "the oldest"
    assert events.take_events([told_of([keys[1]], removed=True)]) == []
    (gone,) = events.take_events([told_of([keys[0]], removed=True)])
    assert (gone.block_hashes, len(events)) == (first.block_hashes, 1)


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_a_tier_below_tells_after_one_above() -> None:
    """And a block may come again, while it is told that it went."""
    events, chunk = events_with(2), chunk_of(5)
    events.record_store(*chunk)
    (key,) = chunk[-1:]
    come, gone = told_of([key], tier=CPU_TIER), told_of([key], tier=CPU_TIER, removed=True)
    told = events.take_events([come, gone, told_of([key]), told_of([key], removed=True)])
    told += events.take_events([come])
    assert [len(each.block_hashes) for each in told] == [2] * 5


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_as_many_are_described_as_may_be_on_their_way() -> None:
    """Of two tiers of which each moves 4096 up: a dozen prompts of 100,000 tokens each."""
    events, (request, group, at, _) = events_with(20_000), chunk_of(5)
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(2 * 4096)]
    for key in keys:
        events.record_lookup(request, group, at, key)
    events.take_events([told_of(keys, tier=CPU_TIER)])
    assert len(events) == len(keys)


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
@pytest.mark.parametrize("by_tier", [False, True])
def test_a_block_in_two_tiers_is_there_until_both_have_dropped_it(by_tier: bool) -> None:
    """Routers read the medium: what disk and bucket have is announced once, unless each tier is."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    events, chunk = events_with(2, by_tier=by_tier), chunk_of(5)
    events.record_store(*chunk)
    tiers = (NVME_TIER, NVME_TIER, OBJECT_TIER, CPU_TIER)
    told = events.take_events([told_of([chunk[-1]], tier=tier) for tier in tiers])
    assert {type(each) for each in told} == {BlockStored}
    disk, bucket = ("STORAGE", "LOCAL", "nvme"), ("STORAGE", "REMOTE", "object")
    places = [disk, bucket, CPU] if by_tier else [STORAGE, CPU]
    assert [(each.medium, each.locality, each.ownership) for each in told] == places
    for left, tier in enumerate((NVME_TIER, CPU_TIER, OBJECT_TIER)):
        assert len(events) == 1
        told = events.take_events([told_of([chunk[-1]], removed=True, tier=tier)])
        assert [type(each) for each in told] == [BlockRemoved] * (by_tier or left > 0)
    assert len(events) == 0


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_blocks_that_chunks_share_go_with_the_last_of_these() -> None:
    """Where prompts part within a chunk. Some routers count announcements, and others do not."""
    events, (request, group, at, _) = events_with(9), chunk_of(5)
    shared = request.block_hashes[2]
    ends = [bytes([end]) * 32 for end in (101, 102)]
    for end in ends:
        request.block_hashes = [*request.block_hashes[:3], end]
        events.record_store(request, group, at, end + bytes(4))
    first, second = events.take_events([told_of([end + bytes(4) for end in ends])])
    assert (first.block_hashes, second.block_hashes) == ([shared, ends[0]], [ends[1]])
    assert (second.parent_block_hash, second.token_ids) == (shared, list(range(53, 69)))
    gone = [told_of([end + bytes(4)], removed=True) for end in ends]
    told = events.take_events(gone)
    assert [each.block_hashes for each in told] == [[ends[0]], [shared, ends[1]]]


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_what_tiers_had_before_is_told_when_a_request_finds_it() -> None:
    """Once, some in a step; and not what has no description, or has gone again."""
    held = {chunk_of(each)[-1]: [CPU_TIER, NVME_TIER] for each in range(100)}
    events = events_with(900, holders=lambda key: held.get(key, []))
    assert events.take_events([told_of([chunk_of(7, window=3)[-1]])]) == []
    for each in range(100):
        events.record_lookup(*chunk_of(each))
    del held[chunk_of(3)[-1]]
    told = []
    while some := events.take_events([]):
        assert len(some) <= 128
        told += some
    assert len(told) == 2 * 99
    assert events.take_events([told_of(list(held))]) == [], "of a tier's own event nothing is new"
    held.clear()
    events.announce_again()
    gone = events.take_events([told_of([chunk_of(9)[-1]], removed=True)])
    assert [len(each.block_hashes) for each in gone] == [2 * 99] * 2
    assert (events.take_events([]), len(events)) == ([], 0)
