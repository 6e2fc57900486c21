"""Looking at and clearing a store of more blocks than anybody wants to hold in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes.cli_world import with_store

from kvtier.backends.object.inspection import inspector, proofs, store_access
from kvtier.backends.object.inspection.store_access import empty_store, remove_namespace
from kvtier.backends.object.object_names import block_name, description_name
from kvtier.backends.object.settings import ObjectSettings
from kvtier.backends.object.stores.errors import AccessDenied, StoreError, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.cli import app
from kvtier.cli.inspect import ConsoleReporter, look
from kvtier.config import load
from kvtier.errors import MediumError
from kvtier.inspect import Depth
from kvtier.testing.subject import GROUPED, NAMESPACE, make_keys

BLOCKS = 2500
WATCH = ConsoleReporter()
AT_ONCE = 100


class Counting(FileStore):
    """Knows how many names were listed, and the most that were and not deleted yet."""

    deletes_at_once = AT_ONCE
    by_number = False
    lost_after = math.inf
    protected = ""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.waiting = self.most = self.listed = 0

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        position = 0
        while True:
            found = list(super().list(prefix, **more))
            if not self.by_number:
                page, rest = found, []
            else:  # a page is what stands there now, behind as many as were listed before
                page, rest = found[position : position + AT_ONCE], found[position + AT_ONCE :]
            for info in page:
                if self.listed >= self.lost_after:
                    raise Unavailable("it is away")
                self.listed += 1
                self.waiting += 1
                self.most = max(self.most, self.waiting)
                yield info
            position += AT_ONCE
            if not rest:
                return

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        self.waiting -= len(names)
        kept = [name for name in names if name == self.protected]
        super().delete([name for name in names if name not in kept])
        return {name: AccessDenied("it is protected") for name in kept}


@pytest.fixture
def settings(stack_file: Path, tmp_path: Path) -> ObjectSettings:
    with_store(stack_file, tmp_path / "store")
    for key in make_keys(BLOCKS):
        path = tmp_path / "store" / block_name(NAMESPACE.id, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = load(stack_file).tiers[2]
    assert isinstance(found, ObjectSettings)
    return found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    store = Counting(tmp_path / "store")
    for module in (inspector, proofs, store_access):
        monkeypatch.setattr(module, "open_for", lambda settings: store)
    return store


def files(root: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(root))


def test_no_more_names_are_held_than_are_deleted_at_once(
    settings: ObjectSettings, store: Counting
) -> None:
    remove_namespace(settings, NAMESPACE.id, WATCH)
    assert files(store.root) == 0
    assert store.most <= AT_ONCE


@pytest.mark.slow
def test_a_store_that_goes_on_by_number_is_emptied_too(
    settings: ObjectSettings, store: Counting
) -> None:
    store.by_number = True
    remove_namespace(settings, NAMESPACE.id, WATCH)
    assert files(store.root) == 0


def test_what_is_protected_stays_and_is_said(settings: ObjectSettings, store: Counting) -> None:
    store.protected = block_name(NAMESPACE.id, make_keys(1)[0])
    with pytest.raises(
        MediumError, match=f"kept some .* {NAMESPACE.id}: it is protected; see kvtier"
    ):
        remove_namespace(settings, NAMESPACE.id, WATCH)
    assert files(store.root) == 1


@pytest.mark.slow
def test_somebody_who_goes_on_writing_is_not_waited_for(
    settings: ObjectSettings, store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = block_name(NAMESPACE.id, make_keys(1)[0])

    def delete(names: Sequence[str], *, deadline: float | None = None) -> dict[str, StoreError]:
        FileStore.delete(store, names)
        store.put(name, [memoryview(b"again")])
        return {}

    monkeypatch.setattr(store, "delete", delete)
    empty_store(settings, WATCH)
    assert files(store.root) == 1


def test_blocks_are_counted_and_not_kept(
    settings: ObjectSettings, store: Counting, stack_file: Path
) -> None:
    place = look(load(stack_file), 2)[0]
    assert [part.blocks for part in place.contents.parts] == [BLOCKS]
    counted = store.listed
    assert next(place.blocks()).key in make_keys(BLOCKS)
    assert store.listed == counted + 1


@pytest.mark.parametrize(("words", "times"), [([], 1), (["--idle", "30d"], 2)])
def test_gc_lists_a_store_once_unless_it_looks_for_what_is_idle(
    words: list[str],
    times: int,
    settings: ObjectSettings,
    store: Counting,
    stack_file: Path,
) -> None:
    assert app.run(["gc", "--dry-run", "--config", str(stack_file), *words]) == 0
    assert times * BLOCKS <= store.listed < times * BLOCKS + 20


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls", NAMESPACE.id, "--limit", "5"], 0),
        (["ls", make_keys(1)[0].hex()[:12]], 1),  # it is empty, and so bad
        (["ls", "f" * 300], 1),
    ],
)
def test_nothing_is_listed_that_is_not_asked_for(
    words: list[str], code: int, settings: ObjectSettings, store: Counting, stack_file: Path
) -> None:
    assert app.run([*words, "--config", str(stack_file)]) == code
    assert store.listed < 20


def test_a_store_that_is_lost_while_it_is_looked_through_is_said(
    settings: ObjectSettings, store: Counting, stack_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.lost_after = 2 * BLOCKS - 1  # it is listed to count, and to check
    assert app.run(["verify", "--config", str(stack_file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["bad"] == BLOCKS - 1
    assert "it is away" in found["troubles"][0]


@pytest.mark.parametrize("depth", [Depth.COUNTED, Depth.NAMES])
def test_what_tells_of_one_namespace_and_cannot_be_read_hides_not_what_tells_of_another(
    depth: Depth,
    settings: ObjectSettings,
    store: Counting,
    stack_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, other = sorted([NAMESPACE, GROUPED], key=lambda namespace: namespace.id)
    for namespace in (closed, other):
        store.put(description_name(namespace.id), [memoryview(namespace.to_json())])
        store.put(block_name(namespace.id, make_keys(1)[0]), [memoryview(b"x")])
    read = store.get

    def get(name: str, *words: Any, **named: Any) -> int | None:
        if name == description_name(closed.id):
            raise Unavailable("it is away")
        return read(name, *words, **named)

    monkeypatch.setattr(store, "get", get)
    (place,) = look(load(stack_file), 2, depth)
    assert {part.namespace for part in place.contents.parts} == {closed.id, other.id}
    assert place.contents.namespaces == {other.id: other}
    assert "it is away" in place.contents.troubles[0]


def test_gc_says_what_to_do_about_a_store_that_is_lost_meanwhile(
    settings: ObjectSettings, store: Counting, stack_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.lost_after = 5
    assert app.run(["gc", "--config", str(stack_file)]) == 1
    said = "kvtier: it is away; see that the store is running, and kvtier doctor\n"
    assert capsys.readouterr().err == said


def test_what_is_not_kvtiers_stays_and_what_is_a_newer_ones_with_its_description(
    settings: ObjectSettings, store: Counting, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = [f"{NAMESPACE.id}/manifest/{1:016x}-{0:010d}", f"{NAMESPACE.id}/uses/{1:016x}-{0:010d}"]
    description = f"{NAMESPACE.id}/namespace.json"
    others = [f"{NAMESPACE.id}/my-notes.txt", f"{NAMESPACE.id}/sketches/{1:016x}.v2"]
    for name in (description, *ours, *others):
        store.put(name, [memoryview(b"x")])
    remove_namespace(settings, NAMESPACE.id, WATCH)
    assert [info.name for info in store.list()] == sorted([description, *others])
    assert "2 objects below" in capsys.readouterr().err
    store.delete(others)
    remove_namespace(settings, NAMESPACE.id, WATCH)
    assert files(store.root) == 0
    assert capsys.readouterr().err == ""
