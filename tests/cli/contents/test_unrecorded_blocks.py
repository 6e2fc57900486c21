"""Blocks in a store that could not be written down there: it is said, and they are found again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.cli_world import served

from kvtier.backends.object.inspection.copies import ManifestCopyAudit
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import AccessDenied
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.cli import app
from kvtier.cli.console import Progress
from kvtier.cli.inspect import inspector_of, look
from kvtier.cli.sink import ChoiceReader, Copied, RateLimit, choose, open_sink
from kvtier.config import load
from kvtier.inspect import Depth, Reporter
from kvtier.testing.subject import NAMESPACE, make_keys

pytestmark = pytest.mark.slow

BLOCKS = 8
Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: its exit code, its answer and what it says beside it."""

    def run(*args: object) -> tuple[int, Any, str]:
        code = app.run([*map(str, args), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "snapshot")


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether stores take no manifests."""
    put = FileStore.put

    def refuse(store: FileStore, name: str, *args: Any, **more: Any) -> Any:
        if "/manifest/" in name:
            raise AccessDenied("the store takes no manifest")
        return put(store, name, *args, **more)

    def switch(on: bool) -> None:
        monkeypatch.setattr(FileStore, "put", refuse if on else put)

    return switch


def recorded(store: FileStore) -> set[bytes]:
    entries = Journal(store, NAMESPACE.id).read_all()
    rows = entries[entries["kind"] == ADDED]
    return {row["key"].tobytes()[: row["key_bytes"]] for row in rows}


def test_a_copy_that_is_not_written_down_is_no_success(
    filled: Path, fresh: Path, store: FileStore, run: Run, forgetful: Callable[[bool], None]
) -> None:
    url = store.root.as_uri()
    forgetful(True)
    code, answer, said = run("snapshot", "-c", filled, "--to", url)
    (report,) = answer["namespaces"]
    assert (code, answer["ok"], report["copied"], report["untold"]) == (1, False, BLOCKS, BLOCKS)
    assert "run it again once the store is well" in said
    code, answer, said = run("snapshot", "-c", filled, "--to", url)  # a listing has found them
    assert (code, answer) == (1, None)
    assert "the store takes no manifest" in said
    forgetful(False)
    code, answer, said = run("snapshot", "-c", filled, "--to", url)
    assert (code, answer["namespaces"][0]["already_there"], said) == (0, BLOCKS, "")
    assert recorded(store) == set(make_keys(BLOCKS))


def test_nor_is_that_hidden_by_what_could_not_be_read(
    filled: Path, tmp_path: Path, store: FileStore, run: Run, forgetful: Callable[[bool], None]
) -> None:
    (tmp_path / "disk" / "blocks" / ("ff" * 16)).mkdir()
    forgetful(True)
    code, answer, said = run("snapshot", "-c", filled, "--to", store.root.as_uri())
    assert (code, len(answer["troubles"])) == (1, 1)
    assert "has no namespace.json" in said
    assert "run it again once the store is well" in said


def test_what_the_store_tells_cannot_be_read(
    filled: Path, store: FileStore, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> Any:
        raise AccessDenied("no GET here")

    monkeypatch.setattr("kvtier.backends.object.inspection.copies.Journal", away)
    code, answer, said = run("snapshot", "-c", filled, "--to", store.root.as_uri())
    assert (code, answer["namespaces"][0]["untold"]) == (1, BLOCKS)
    assert "cannot be read: no GET here" in said


@pytest.mark.parametrize("known", [0, 3])
def test_a_restore_finds_what_nothing_tells_of(
    filled: Path,
    fresh: Path,
    store: FileStore,
    run: Run,
    known: int,
) -> None:
    """As after the `kill -9` of a snapshot."""
    url = store.root.as_uri()
    if known:
        assert run("snapshot", "-c", filled, "--to", url, "--size", "40KiB")[0] == 0
    written = {each: each.read_bytes() for each in store.root.rglob("manifest/*")}
    assert len(recorded(store)) == known
    assert run("snapshot", "-c", filled, "--to", url)[0] == 0
    for manifest in store.root.rglob("manifest/*"):
        manifest.unlink()
    for manifest, data in written.items():
        manifest.write_bytes(data)
    assert len(recorded(store)) == known
    code, answer, said = run("copy", url, fresh, "-n", NAMESPACE.id[:6])
    (report,) = answer["namespaces"]
    assert (code, report["asked"], report["copied"]) == (0, BLOCKS, BLOCKS)
    assert f"{BLOCKS - known} blocks of the namespace {NAMESPACE.id[:12]} are in" in said
    assert served(fresh) == BLOCKS


def test_what_was_removed_is_not_found_again(
    filled: Path, fresh: Path, store: FileStore, run: Run
) -> None:
    """A tier has dropped it, and its deletion failed. What was stored again since counts."""
    url = store.root.as_uri()
    assert run("snapshot", "-c", filled, "--to", url)[0] == 0
    head = [store.head(block_name(NAMESPACE.id, key)) for key in make_keys(2)]
    stored = [info.modified_s for info in head if info]
    times_us = [int(stored[0] * 1e6) + 60_000_000, int(stored[1] * 1e6) - 1]
    for manifest in store.root.rglob("manifest/*"):
        manifest.unlink()
    keys = make_keys(2)
    Journal(store, NAMESPACE.id).append(pack_entries(REMOVED, keys, [0, 0], [0, 0], times_us))
    code, answer, said = run("copy", url, fresh)
    assert (code, answer["namespaces"][0]["copied"]) == (0, BLOCKS - 1)
    assert f"{BLOCKS - 1} blocks of the namespace" in said


def test_nothing_is_listed_where_what_is_told_of_fills_the_room(
    filled: Path, fresh: Path, store: FileStore, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.root.as_uri()
    assert run("snapshot", "-c", filled, "--to", url)[0] == 0
    listed: list[str] = []
    find = FileStore.list

    def reporter(store: FileStore, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        listed.append(prefix)
        return find(store, prefix, **more)

    monkeypatch.setattr(FileStore, "list", reporter)
    code, answer, _ = run("copy", url, fresh, "--size", "40KiB")
    assert (code, answer["namespaces"][0]["copied"]) == (0, 3)
    assert f"{NAMESPACE.id}/blocks/" not in listed
    assert run("copy", url, fresh)[0] == 0
    assert f"{NAMESPACE.id}/blocks/" in listed


def test_what_made_room_need_not_be_told_of(store: FileStore, tmp_path: Path, filled: Path) -> None:
    filled.write_text(
        f"{filled.read_text()}  - {{kind: object, url: {store.root.as_uri()}, capacity: 1GiB}}\n"
    )
    keys = make_keys(3)
    settings: Any = load(filled).tiers[2]
    expected = ManifestCopyAudit(settings, NAMESPACE, Reporter())
    expected.add(keys)
    assert expected.missing() == 3
    expected.drop(keys[:2])
    assert expected.missing() == 1
    entries = pack_entries(ADDED, keys, [0, 0, 7], [1, 1, 1], [1, 1, 1])
    Journal(store, NAMESPACE.id).append(entries)
    assert expected.missing() == 0


def test_who_is_told_to_end_waits_for_no_listing(
    filled: Path, fresh: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was stored is written down all the same."""
    listing, ended = threading.Event(), threading.Event()
    find = FileStore.list

    def endless(self: FileStore, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        if prefix:
            yield from find(self, prefix, **more)
            return
        for number in range(2000):
            listing.set()
            yield ObjectInfo(f"somebody/{number}", 1, 1.0)
            time.sleep(0.01)  # as long as an answer takes
        ended.set()

    fresh.write_text(
        f"{fresh.read_text()}  - {{kind: object, url: {store.root.as_uri()}, capacity: 1GiB}}\n"
    )
    source, target = load(filled), load(fresh)
    choice = choose(look(source, depth=Depth.RECORDED), NAMESPACE.id)
    result = Copied(NAMESPACE.id)

    def copy() -> None:
        reader = ChoiceReader(choice, NAMESPACE)
        with open_sink(
            inspector_of(target, 2).filling(), NAMESPACE, reader, RateLimit(None)
        ) as sink:
            sink.fill(choice.pieces(sink.piece), result, Progress("", 0, ""))
            monkeypatch.setattr(FileStore, "list", endless)
            threading.Thread(target=sink._tier.refresh, daemon=True).start()
            assert listing.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy()
    assert not ended.is_set()
    assert result.copied == BLOCKS
    assert recorded(store) == {bytes(key) for key in make_keys(BLOCKS)}
