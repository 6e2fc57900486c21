"""Which blocks a copy takes, in which order, and what it makes of those that change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import Stack
from kvtier.backends.object import BACKEND, ObjectSettings
from kvtier.backends.object.inspection.inspector import ObjectInspector
from kvtier.backends.object.manifests import ADDED, pack_entries
from kvtier.cli.inspect import look
from kvtier.cli.sink import Choice, ChoiceReader, Numbers, choose
from kvtier.config import StackConfig, load
from kvtier.inspect import InspectorContext
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.slab.inspect import Slab, SlabSource
from kvtier.testing.subject import NAMESPACE, blank, make_keys, payload
from kvtier.types import BlockKey, Outcome, group_of

NAME = NAMESPACE.id
KEYS = make_keys(12) + make_keys(6, group=2) + [BlockKey(key + b"\0") for key in make_keys(4)]

rows = st.lists(
    st.tuples(st.integers(0, len(KEYS) - 1), st.integers(0, 9), st.integers(1, 99)), max_size=25
)
"""Key, when it was stored, and its bytes."""


class Store(ObjectInspector):
    """Its manifests say this."""

    def __init__(self, found: list[tuple[int, int, int]]) -> None:
        settings = ObjectSettings(url="s3://bucket/kv", capacity=Capacity(ByteSize(1 << 30)))
        super().__init__(BACKEND, settings, InspectorContext(tier=1))
        keys = [KEYS[index] for index, _, _ in found]
        times = [at * 1_000_000 for _, at, _ in found]
        sizes = [size for _, _, size in found]
        entries = pack_entries(ADDED, keys, list(range(len(found))), sizes, times)
        self._survey.manifests[NAME] = entries
        uses = np.array(sizes, np.uint32) % 7, np.array(sizes, np.uint32)
        self._survey.uses[NAME] = uses


@given(rows, rows)
def test_each_block_once_and_the_newest_first(
    near: list[tuple[int, int, int]], far: list[tuple[int, int, int]]
) -> None:
    places = [Store(near), Store(far)]
    best: dict[BlockKey, tuple[int, int]] = {}
    for number, found in enumerate((near, far)):
        for index, at, _ in found:
            mine = best.get(KEYS[index])
            if mine is None or (mine[0] == number and at > mine[1]):
                best[KEYS[index]] = (number, at)
    choice = choose(places, NAME)
    keys = choice.keys(0, len(choice))
    assert sorted(keys) == sorted(best)
    assert [best[key][1] for key in keys] == sorted((at for _, at in best.values()), reverse=True)
    assert [choice.places([row])[0] for row in range(len(keys))] == [[best[key][0]] for key in keys]


@given(rows)
def test_the_most_used_of_a_store_first(found: list[tuple[int, int, int]]) -> None:
    choice = choose([Store(found)], NAME, hottest=True)
    rows = choice._rows
    order = [(-int(row["uses"]), -float(row["stored_at"])) for row in rows]
    assert order == sorted(order)


@given(
    rows,
    st.integers(0, 400),
    st.lists(st.integers(1, 99), min_size=1, max_size=4),
    st.sets(st.sampled_from(KEYS)),
)
def test_a_part_of_them(
    found: list[tuple[int, int, int]], most: int, sizes: list[int], wanted: set[BlockKey]
) -> None:
    """As much as there is room for, by what each takes where it goes."""
    choice = choose([Store(found)], NAME)
    keys = choice.keys(0, len(choice))
    room = [sizes[min(group_of(key), len(sizes) - 1)] for key in keys]
    assert choice.room(sizes).tolist() == room
    cut = choice.cut(most, sizes)
    assert sum(room[: len(cut)]) <= most
    assert len(cut) == len(choice) or sum(room[: len(cut) + 1]) > most
    kept = choice.only(wanted)
    assert kept.keys(0, len(kept)) == [key for key in keys if key in wanted]


def test_nothing() -> None:
    choice = choose([], NAME)
    assert len(choice) == len(choice.only(set())) == len(choice.cut(9, [1, 2])) == 0
    assert list(choice.pieces(5)) == []


def stack_of(folder: Path) -> StackConfig:
    (folder / "host").mkdir()
    path = folder / "stack.yaml"
    path.write_text(
        "version: 1\nname: choice\ntiers:\n"
        f"  - {{kind: cpu, path: {folder}/host, capacity: 1MiB}}\n"
        f"  - {{kind: nvme, path: {folder}/blocks, capacity: 16MiB, free_floor: 0}}\n"
    )
    return load(path)


def slab_of(choice: Choice) -> Slab:
    """The slab in which all of these blocks are."""
    (number,) = set(choice.places(range(len(choice)))[0])
    source = choice.sources[number]
    assert isinstance(source, SlabSource)
    return source.slab


def test_the_most_used_first(tmp_path: Path) -> None:
    config = stack_of(tmp_path)
    keys = make_keys(6)
    with Stack(config, NAMESPACE) as stack:
        stack.store({key: payload(key) for key in keys})
        assert stack.settle()
    (place,) = look(config, 1)
    uses = [3, 0, 7, 7, 1, 0]
    slab = slab_of(choose([place], NAME))
    with slab.table.open("r+b") as file:
        for slot, key in enumerate(choose([place], NAME).keys(0, 6)):
            file.seek(4096 + 64 * slot + 20)
            file.write(uses[keys.index(key)].to_bytes(4, "little"))
    choice = choose([place], NAME, hottest=True)
    found = [uses[keys.index(key)] for key in choice.keys(0, 6)]
    assert found == sorted(uses, reverse=True)


def test_what_changes_meanwhile_is_gone_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    config = stack_of(tmp_path)
    keys = make_keys(3)
    with Stack(config, NAMESPACE) as stack:
        stack.store({key: payload(key) for key in keys})
        assert stack.settle()
        (place,) = look(config, 1)
        choice = choose([place], NAME)
        reader = ChoiceReader(choice, NAMESPACE)
        row = choice.keys(0, 3).index(keys[0])
        assert not reader.used_again(row, keys[0])
        assert reader.used_again(row, keys[1])
        stack.chain.forget([keys[0]])
        stack.chain.tiers[1].flush()
        assert reader.used_again(row, keys[0])
        room = [blank() for _ in keys]
        spec = Numbers([0, 1, 2])
        assert reader.load(spec, choice.keys(0, 3), room) == [Outcome.OK] * 3
        slab = slab_of(choice)
        slab.data.unlink()
        assert reader.load(spec, choice.keys(0, 3), room) == [Outcome.GONE] * 3
        slab.table.unlink()
        assert reader.used_again(row, keys[1])
        reader.close()


def test_what_is_no_slab_of_this_size_any_more_is_damaged(tmp_path: Path) -> None:
    config = stack_of(tmp_path)
    key = make_keys(1)[0]
    with Stack(config, NAMESPACE) as stack:
        stack.store({key: payload(key)})
        assert stack.settle()
    (place,) = look(config, 1)
    choice = choose([place], NAME)
    slab = slab_of(choice)
    reader = ChoiceReader(choice, NAMESPACE)
    spec = Numbers([0])
    assert reader.load(spec, [key], [blank()[:-4096]]) == [Outcome.CORRUPT]
    assert not reader.used_again(0, key)
    with slab.table.open("r+b") as table:
        table.seek(layout.entry_at(choice.places([0])[1][0]))
        table.write(bytes([layout.RESERVED]))
    assert reader.used_again(0, key)
    slab.data.unlink()
    os.mkfifo(slab.data)
    assert reader.load(spec, [key], [blank()]) == [Outcome.CORRUPT]
    reader.close()
    assert reader.unread == 0


def test_of_very_many_blocks_the_most_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cli.sink.USED_MAX", 3)
    found = [(number, 0, size) for number, size in enumerate((5, 7, 12, 1, 6))]
    told = choose([Store(found)], NAME).used()
    assert told == {KEYS[0]: (5, 5.0), KEYS[2]: (5, 12.0), KEYS[4]: (6, 6.0)}
