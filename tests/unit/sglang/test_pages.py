"""Pages of host memory go to the tiers of a stack and come back, whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.world import flip

from kvtier import Namespace, Stack, block_key
from kvtier.errors import ConfigError
from kvtier.sglang import pages as pages_module
from kvtier.sglang.pages import HostPages, PageKeys, PageStore, restorable
from kvtier.testing.subject import make_memory_folder

TOKENS, PAGES, LAYERS, WIDTH = 4, 32, 3, 512
KEYS = [(block_key(bytes([number]) * 32),) for number in range(PAGES)]
NEW = [(block_key(bytes([PAGES + number]) * 32),) for number in range(4)]


class Pool:
    """A host pool, as SGLang lays it out."""

    page_size, page_num = TOKENS, PAGES

    def __init__(self, layout: str) -> None:
        self.layout = layout
        first = layout == "layer_first"
        shape = (LAYERS, TOKENS * PAGES) if first else (TOKENS * PAGES, LAYERS)
        self.kv_buffer = np.zeros((2, *shape, WIDTH), np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        starts = []
        for token in indices.tolist()[::TOKENS]:
            for half in self.kv_buffer:
                rows = half if self.layout == "layer_first" else [half]
                starts += [row[token:].ctypes.data for row in rows]
        pieces = 2 * LAYERS if self.layout == "layer_first" else 2
        return starts, [2 * LAYERS * TOKENS * WIDTH // pieces] * len(starts)

    def page(self, number: int) -> Any:
        span = slice(number * TOKENS, (number + 1) * TOKENS)
        return (
            self.kv_buffer[:, :, span] if self.layout == "layer_first" else self.kv_buffer[:, span]
        )

    def fill(self) -> None:
        """Every page as its number says."""
        for number in range(PAGES):
            self.page(number)[:] = content(number).reshape(self.page(number).shape)

    def right(self, key: int, number: int) -> bool:
        """Whether a page has what belongs to a key."""
        return bool((self.page(number).ravel() == content(key)).all())


class States:
    """A host pool of states, much larger than pages, and fewer."""

    page_size, page_num = 1, 7

    def __init__(self) -> None:
        self.kv_buffer = [np.zeros((7, 40_000), np.uint8), np.zeros((7, 1_000), np.uint8)]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        starts = [each[at:].ctypes.data for at in indices for each in self.kv_buffer]
        return starts, [40_000, 1_000] * len(indices)

    def fill(self, number: int) -> None:
        for each in self.kv_buffer:
            each[number] = content(number, each.shape[1])

    def right(self, key: int, number: int) -> bool:
        return all((each[number] == content(key, each.shape[1])).all() for each in self.kv_buffer)


def content(number: int, size: int = 2 * LAYERS * TOKENS * WIDTH) -> Any:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = make_memory_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def opened(tmp_path: Path, memory: Path) -> Iterator[Callable[..., PageStore]]:
    """Opens a store over a pool's pages, in the same two folders each time."""
    stores: list[PageStore] = []

    def open_store(
        pool: Pool,
        cpu: str = "4MiB",
        *,
        states: States | None = None,
        serving: bool = False,
        engine: str | None = None,
    ) -> PageStore:
        tiers = [
            {"kind": "cpu", "path": str(memory), "capacity": cpu},
            {"kind": "nvme", "path": str(tmp_path), "capacity": "64MiB", "free_floor": 0},
        ]
        host = HostPages.of_pools({"kv": pool} | ({"states": states} if states else {}))
        facts = {"model": "pages", "layout": pool.layout}
        namespace = Namespace(facts=facts, group_bytes=host.layout.group_bytes)
        config = {"version": 1, "name": "pages", "tiers": tiers}
        stack = Stack.open(config, namespace, serving=serving, engine=engine)
        stores.append(PageStore(stack, host))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def leading(store: PageStore, pages: list[PageKeys]) -> int:
    """How many pages are found before the first that is not."""
    (found,) = store.find(pages)
    return found.index(False) if False in found else len(found)


def settle(store: PageStore) -> None:
    """Until the lower tier has everything."""
    while True:
        with store._lock:  # in the middle of a poll what moves may be in no list
            if store._chain.settled:
                return
        store._stack.mover.wait(0.01)


def lose_memory(store: PageStore, memory: Path) -> None:
    """As after a restart of the machine."""
    settle(store)
    store.close()
    shutil.rmtree(memory)
    memory.mkdir()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_from_every_tier(
    layout: str, opened: Callable[..., PageStore], memory: Path
) -> None:
    pool = Pool(layout)
    pool.fill()
    store = opened(pool)
    places = list(range(PAGES))
    assert store.store(KEYS, places) == [True] * PAGES
    assert leading(store, KEYS) == PAGES
    pool.kv_buffer[:] = 0
    assert store.load(KEYS, places[::-1]) == PAGES
    assert all(pool.right(key, PAGES - 1 - key) for key in places)
    lose_memory(store, memory)
    pool.kv_buffer[:] = 0
    again = opened(pool)
    assert leading(again, [*KEYS[:5], (block_key(b"other"),), *KEYS[5:]]) == 5
    assert again.load(KEYS, places) == PAGES
    assert all(pool.right(key, key) for key in places)
    again.clear()
    assert leading(again, KEYS) == 0


def test_a_state_comes_back_as_several_records(
    opened: Callable[..., PageStore], memory: Path
) -> None:
    pool, states = Pool("layer_first"), States()
    host = HostPages.of_pools({"kv": pool, "states": states})
    assert host.layout.group_bytes == (12_288, 13_696, 13_696, 13_608)
    keys = host.keys("states", [bytes([number]) * 32 for number in range(states.page_num)])
    pool.fill()
    for number in range(states.page_num):
        states.fill(number)
    store = opened(pool, states=states)
    store.store(KEYS, list(range(PAGES)))
    assert store.store(keys[4:], [4, 5, 6]) == [True] * 3
    assert store.store([keys[0][1:]], [0]) == [True]
    lose_memory(store, memory)
    pool.kv_buffer[:] = 0
    for each in states.kv_buffer:
        each[:] = 0
    again = opened(pool, states=states)
    found = again.find(KEYS, keys, KEYS[3:5])
    assert found == [[True] * PAGES, [False] * 4 + [True] * 3, [True] * 2], "one is not whole"
    assert again.load(keys[:1], [0]) == 0
    assert again.load(keys[4:], [2, 1, 0]) == 3
    assert all(states.right(6 - number, number) for number in range(3))
    assert again.load(KEYS, list(range(PAGES))[::-1]) == PAGES
    assert all(pool.right(key, PAGES - 1 - key) for key in range(PAGES))


def test_the_order_of_pools_means_nothing() -> None:
    pool, one, other = Pool("page_first"), States(), States()
    found = HostPages.of_pools({"kv": pool, "one": one, "other": other})
    again = HostPages.of_pools({"kv": pool, "other": other, "one": one})
    assert (
        found.groups == again.groups == {"kv": range(1), "one": range(1, 4), "other": range(4, 7)}
    )
    assert found.layout == again.layout


def test_no_record_is_needlessly_small_or_large() -> None:
    pool = Pool("page_first")
    for sizes in ([5], [16_384], [16_385], [64] * 600, [10_000_000, 7], [40_000_003, 64, 200_000]):
        at = 1 << 30
        pieces = [pages_module.Piece(at + (n << 26), size, size) for n, size in enumerate(sizes)]
        parts = pages_module._cut(pieces, 16_384)
        walked = [each for part in parts for each in part]
        assert sum(each.size for each in walked) == sum(sizes)
        ends = {(each.base + each.size) for each in walked} - {each.base for each in walked}
        assert ends == {each.base + each.size for each in pieces}, "without a gap"
        of_parts = [sum(each.size for each in part) for part in parts]
        assert len(parts) == -(-sum(sizes) // 16_384)
        assert max(of_parts) <= 16_384
        assert all(each == of_parts[0] for each in of_parts[:-1])
    assert HostPages.of_pools({"kv": pool}).layout.group_bytes == (12_288,), "never cut"


@pytest.mark.parametrize("needed", [1, 2, 3, 9])
def test_a_prefix_is_restorable_if_its_last_pages_are_there(needed: int) -> None:
    for bits in range(1 << 6):
        there = [bool(bits >> at & 1) for at in range(6)]
        right = [length for length in range(1, 7) if all(there[max(0, length - needed) : length])]
        assert restorable(there, needed) == right


def test_a_first_tier_smaller_than_a_prompt(opened: Callable[..., PageStore], memory: Path) -> None:
    pool = Pool("layer_first")
    pool.fill()
    store = opened(pool, cpu="128KiB")
    assert store._stack.chain.tiers[0].stats().bytes_capacity < PAGES * content(0).nbytes
    places = list(range(PAGES))
    while not all(store.store(KEYS, places)):
        settle(store)
    settle(store)
    pool.kv_buffer[:] = 0
    assert store.load(KEYS, places) == PAGES
    assert all(pool.right(key, key) for key in places)


def test_a_damaged_page_is_a_miss_and_is_stored_again(
    opened: Callable[..., PageStore], memory: Path, tmp_path: Path
) -> None:
    pool = Pool("layer_first")
    pool.fill()
    store = opened(pool)
    places = list(range(PAGES))
    store.store(KEYS, places)
    lose_memory(store, memory)
    for slab in tmp_path.rglob("*.slab"):
        flip(slab, 6144)
    again = opened(pool)
    pool.kv_buffer[:] = 0
    assert again.load(KEYS, places) == 0
    pool.fill()
    assert all(again.store(KEYS, places))
    pool.kv_buffer[:] = 0
    assert again.load(KEYS[:1], [3]) == 1
    assert pool.right(0, 3)


def test_a_mover_that_hangs_or_dies_is_waited_for_in_vain(
    opened: Callable[..., PageStore], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "LOAD_S", 0.3)
    pool = Pool("layer_first")
    pool.fill()
    store = opened(pool)
    places = list(range(PAGES))
    store.store(KEYS, places)
    lose_memory(store, memory)
    again = opened(pool, serving=True)
    mover = again._stack.mover.pid
    os.kill(mover, signal.SIGSTOP)
    assert again.load(KEYS, places) == 0
    os.kill(mover, signal.SIGKILL)
    assert again.load(KEYS, places) == 0
    monkeypatch.setattr(pages_module, "STORE_S", 60.0)
    again._load_s = 60.0
    assert again.store(NEW, places[:4]) == [True] * 4
    assert again.load(NEW, places[4:8]) == 4
    assert all(pool.right(key, 4 + key) for key in range(4))


def test_threads_take_turns(opened: Callable[..., PageStore]) -> None:
    pool = Pool("page_first")
    pool.fill()
    store = opened(pool, cpu="256KiB")
    half = PAGES // 2
    wrong: list[int] = []

    def work(first: int) -> None:
        mine = list(range(first, half, 4))
        for _ in range(20):
            store.store([KEYS[at] for at in mine], mine)
            places = [half + at for at in mine]
            loaded = store.load([KEYS[at] for at in mine], places)
            wrong.extend(at for at in mine[:loaded] if not pool.right(at, half + at))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_pools_whose_pages_cannot_be_reached_are_refused(
    opened: Callable[..., PageStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scattered(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            starts, sizes = super().get_page_buffer_meta(indices)
            return [*starts[:-1], starts[-1] + 64], sizes

    class Silent(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError("Unsupported layout: page_unified")

    for kind, reason in ((Scattered, "equally far apart"), (Silent, "page_unified")):
        with pytest.raises(ConfigError, match=reason):
            HostPages.of_pools({"kv": kind("layer_first")})


def test_a_first_tier_of_another_kind_is_refused() -> None:
    pool = Pool("layer_first")
    host = HostPages.of_pools({"kv": pool})
    namespace = Namespace(facts={"model": "pages"}, group_bytes=host.layout.group_bytes)
    config = {"version": 1, "name": "pages", "tiers": [{"kind": "memory", "capacity": "4MiB"}]}
    with (
        Stack.open(config, namespace) as stack,
        pytest.raises(ConfigError, match="put a tier of kind cpu first"),
    ):
        PageStore(stack, host)


def test_equal_keys_of_one_call_are_one_page(opened: Callable[..., PageStore]) -> None:
    pool = Pool("layer_first")
    pool.fill()
    store = opened(pool)
    twice: list[PageKeys] = [KEYS[0], KEYS[0]]
    assert store.store(twice, [0, 0]) == [True, True]
    assert store.load(twice, [0, 1]) == 0, "only one of the places would be filled"


def test_host_memory_grows_when_a_neighbour_ends(
    opened: Callable[..., PageStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "STORE_S", 60.0)
    other = opened(Pool("layer_first"), "16MiB", serving=True, engine="other")
    while other._chain.tiers[0].stats().bytes_capacity < 15 << 20:  # it makes its memory
        other._stack.mover.wait(0.01)
    pool = Pool("page_first")
    pool.fill()
    store = opened(pool, "16MiB", serving=True, engine="own")
    numbers, places = count(1000), list(range(PAGES))
    host = store._chain.tiers[0]
    had = host.stats().bytes_capacity
    other.close()
    grown = 0
    while grown < 8:  # batches, so that some go there
        keys = [(block_key(next(numbers).to_bytes(32)),) for _ in places]
        assert store.store(keys, places) == [True] * PAGES
        grown += host.stats().bytes_capacity > had
    pool.kv_buffer[:] = 0
    assert store.load(keys, places[::-1]) == PAGES
    assert all(pool.right(key, PAGES - 1 - key) for key in places)
