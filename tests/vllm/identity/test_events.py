"""Events that describe themselves: who replays them knows what is where, in vLLM's own words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.adapter import make_adapter
from engines.engine import Engine, connector
from engines.world import World, prompt

PROMPT = prompt(21, 1100)
HIT = 1024
BLOCK = 32
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
importing = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
Place = tuple[str, str | None, str | None]
GPU: Place = ("GPU", None, None)
CPU: Place = ("CPU", None, None)
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


def options(stack: dict[str, Any]) -> dict[str, Any]:
    transfer = connector(stack)
    transfer["kv_connector_extra_config"]["self_describing_kv_events"] = True
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
            assert router.has(CPU) == router.has(NVME) == hits
            assert min(router.has(GPU)) >= HIT
            assert {each[2] for each in router.content.values()} == {"tuned" if adapted else None}
            salted = [each[3] for each in router.content.values() if each[3] == ["mine"]]
            assert len(salted) == len(asked) - 1, "the first block's hash alone has it"
            engine.clear(tier=0)
            router.listen(engine)
            assert (router.has(CPU), router.has(NVME)) == ([], hits)
            engine.forget_everything()
            engine.generate(prompts=[PROMPT[:9]])  # what happens beside steps is told in the next
            router.listen(engine)
            assert (router.has(CPU), router.has(NVME), engine.described()) == ([], [], 0)
    with world.engine(model("llama"), **options(world.stack()), **lora) as engine:
        engine.generate(prompts=[PROMPT], more=asked[:1])
        engine.settle()
        engine.kill()
    with world.engine(model("llama"), **options(world.stack()), **lora) as engine:
        engine.clear(tier=0)
        engine.record_events()
        router = Router()
        assert engine.generate(prompts=[PROMPT], more=asked[:1])[0]["cached"] == HIT
        engine.settle()
        router.listen(engine)
        assert (router.has(CPU), router.has(NVME)) == ([HIT], []), "it came by way of CPU memory"
        engine.clear(tier=0)
        router.listen(engine)
        assert (router.has(CPU), engine.described()) == ([], 0)
        assert engine.facts()["mistakes"] == 0


def test_blocks_of_windows_are_named_only(world: World, model: Callable[..., Path]) -> None:
    with world.engine(model("gemma3"), **options(world.stack())) as engine:
        engine.record_events()
        engine.generate(prompts=[PROMPT])
        engine.settle()
        told = [each for each in engine.events() if each.get("medium") in ("CPU", "STORAGE")]
        assert engine.facts()["mistakes"] == 0
    described = {"full_attention": set(), "sliding_window": set()}
    for each in told:
        described[each["kv_cache_spec_kind"]].add(each["block_size"] * len(each["block_hashes"]))
    (chunk,) = described["full_attention"]
    assert (chunk > 0, described["sliding_window"]) == (True, {0})


# -- the part that keeps what will be told --------------------------------------------------------


def chunk_of(number: int, window: int | None = None) -> tuple[Any, Any, int, bytes]:
    """A request, a cache group of it, its chunk 1, and the key of that."""
    hashes = [bytes([number, each]) * 16 for each in range(4)]
    request = SimpleNamespace(
        request_id="any",
        block_hashes=hashes,
        all_token_ids=list(range(number, number + 64)),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )
    group = SimpleNamespace(
        sliding_window_size_in_chunks=window,
        hashes_per_chunk=2,
        tokens_per_chunk=32,
        tokens_per_block=16,
    )
    return request, group, 1, hashes[-1] + bytes(4)


def told_of(keys: list[bytes], *, removed: bool = False, tier: str = "nvme") -> Any:
    from kvtier.types import BlockKey, EventKind, TierEvent
    from kvtier.vllm.events import events_of

    kind = EventKind.REMOVED if removed else EventKind.STORED
    (event,) = events_of([TierEvent(kind, tier, tuple(BlockKey(key) for key in keys))])
    return event


@pytest.fixture
def hashes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def events_with(room: int) -> Any:
    """Room for the content of so many chunks."""
    from kvtier.types import BlockKey
    from kvtier.vllm.events import DescribedEvents

    kinds = {0: ("full_attention", None)}
    events = DescribedEvents(lambda key, _: BlockKey(key), kinds, bytes_max=1000 * room)
    return events


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_what_is_forgotten_was_taken_back() -> None:
    events, chunks = events_with(2), [chunk_of(each) for each in range(3)]
    keys = [chunk[-1] for chunk in chunks]
    for chunk in chunks[:2]:
        events.record_store(*chunk)
    first, second = events.take_events([told_of(keys[:2])])
    assert first.block_hashes == chunks[0][0].block_hashes[2:]
    assert (first.parent_block_hash, first.ownership) == (chunks[0][0].block_hashes[1], "nvme")
    assert first.token_ids == list(range(32, 64))

    events.record_lookup(*chunks[0])
    events.record_store(*chunks[2])
    _, gone = events.take_events([told_of(keys[2:])])
    assert (gone.block_hashes, gone.ownership) == (second.block_hashes, "nvme"), "the oldest"
    (bare,) = events.take_events([told_of([keys[1]], removed=True)])
    assert bare.block_hashes == chunks[1][0].block_hashes[3:]
    (gone,) = events.take_events([told_of([keys[0]], removed=True)])
    assert (gone.block_hashes, len(events)) == (first.block_hashes, 1)


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_a_tier_below_tells_after_one_above() -> None:
    """And a block may come again, while it is told that it went."""
    events, chunk = events_with(2), chunk_of(5)
    events.record_store(*chunk)
    (key,) = chunk[-1:]
    come, gone = told_of([key], tier="cpu"), told_of([key], tier="cpu", removed=True)
    told = events.take_events([come, gone, told_of([key]), told_of([key], removed=True)])
    told += events.take_events([come])
    assert [len(each.block_hashes) for each in told] == [2] * 5


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_as_many_are_described_as_may_be_on_their_way() -> None:
    """Of two tiers of which each moves 4096 up: a dozen prompts of 100,000 tokens each."""
    events, (request, group, at, _) = events_with(10_000), chunk_of(5)
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(2 * 4096)]
    for key in keys:
        events.record_lookup(request, group, at, key)
    told = events.take_events([told_of(keys, tier="cpu")])
    assert {len(each.token_ids) for each in told} == {32}


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
def test_a_block_in_two_tiers_is_known_until_both_have_dropped_it() -> None:
    events, chunk = events_with(2), chunk_of(5)
    events.record_store(*chunk)
    for tier, near in (("nvme", "LOCAL"), ("nvme", "LOCAL"), ("object", "REMOTE"), ("cpu", None)):
        (told,) = events.take_events([told_of([chunk[-1]], tier=tier)])
        assert (len(told.token_ids), told.locality) == (32, near)
    for left, tier in enumerate(("nvme", "cpu", "object", "nvme")):
        assert len(events) == 1, left
        (told,) = events.take_events([told_of([chunk[-1]], removed=True, tier=tier)])
        assert len(told.block_hashes) == 2
    assert len(events) == 0


@importing
@pytest.mark.usefixtures("hashes_as_they_are")
@pytest.mark.parametrize("window", [None, 3])
def test_what_nobody_has_described_is_named(window: int | None) -> None:
    events, chunk = events_with(2), chunk_of(9, window)
    if window:
        events.record_store(*chunk)
    (told,) = events.take_events([told_of([chunk[-1]])])
    assert (told.block_hashes, told.block_size) == (chunk[0].block_hashes[3:], 0)
    assert (told.kv_cache_spec_kind, told.medium) == ("full_attention", "STORAGE")
    (told,) = events.take_events([told_of([chunk[-1]], removed=True)])
    assert told.block_hashes == chunk[0].block_hashes[3:]
