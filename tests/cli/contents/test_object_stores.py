"""The command line with an object store: a folder, a real server, one that is down."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.object import object_servers
from support.processes.cli_world import Hold, command, fill, put, run, with_store

from kvtier import Stack
from kvtier.backends.object.inspection.store_access import new_bench, new_probe
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.settings import open_for
from kvtier.cli import app
from kvtier.config import load
from kvtier.inspect.inspector import BENCH_MARK, holding
from kvtier.system.disk import Disk
from kvtier.testing.subject import GROUPED, NAMESPACE, make_keys, payload
from kvtier.types import Namespace

pytestmark = pytest.mark.slow

BLOCKS = 8


@pytest.fixture
def in_a_folder(stack_file: Path, tmp_path: Path) -> Path:
    return with_store(stack_file, tmp_path / "store")


@pytest.fixture
def on_a_server(stack_file: Path, server: object_servers.ServerProcess) -> Path:
    return with_store(stack_file, f'url: "s3://bucket/kv", endpoint: "{server.endpoint}"')


@pytest.fixture(params=["in_a_folder", "on_a_server"])
def stack(request: pytest.FixtureRequest) -> Path:
    """A stack with blocks in all three tiers."""
    path: Path = request.getfixturevalue(request.param)
    put(path, make_keys(BLOCKS))
    return path


def objects(stack: Path) -> list[str]:
    settings: Any = load(stack).tiers[2]
    with contextlib.closing(open_for(settings)) as store:
        listed = [info.name for info in store.list()]
    return [name for name in listed if not name.startswith("caretaker/")]


def test_all_is_seen(stack: Path) -> None:
    rows = run("ls", "-c", stack)["namespaces"]
    assert [(row["kind"], row["blocks"]) for row in rows] == [
        ("cpu", BLOCKS),
        ("nvme", BLOCKS),
        ("object", BLOCKS),
    ]
    assert all(row["facts"] == NAMESPACE.facts for row in rows)
    assert len(run("ls", NAMESPACE.id, "-c", stack)["blocks"]) == 3 * BLOCKS
    assert run("du", "-c", stack)[2]["blocks"] == BLOCKS
    key = make_keys(1)[0]
    assert [row["record"] for row in run("ls", key.hex(), "-c", stack)["copies"]] == ["good"] * 3


def test_how_full_a_folder_is_that_may_take_a_share_of_its_disk(in_a_folder: Path) -> None:
    """An engine's metrics say it, too."""
    text = in_a_folder.read_text()
    in_a_folder.write_text(
        text.replace("kind: object, capacity: 64MiB", "kind: object, capacity: 50%")
    )
    with Stack.open(in_a_folder, NAMESPACE) as stack:
        allowed = stack.chain.tiers[2].stats().bytes_capacity
    place = run("du", "-c", in_a_folder)[2]
    assert place["capacity"] == allowed
    assert 0 == place["used"] < place["allocated"] < allowed
    assert place["free"] > 0
    said = command("du", "-c", in_a_folder, "--tier", "object").out
    assert all(word in said for word in ("capacity", "allocated", "free there"))


def test_a_store_is_not_said_to_be_out_of_use(in_a_folder: Path, hold: Hold) -> None:
    """Which servers have it open, nobody sees from outside."""
    hold(in_a_folder)
    rows = run("ls", "-c", in_a_folder)["namespaces"]
    assert [row["in_use"] for row in rows] == [True, True, None]
    shown = command("ls", "-c", in_a_folder).out
    assert [line.split()[-1] for line in shown.splitlines()[-3:]] == ["yes", "yes", "-"]


def test_a_namespace_is_cleared(stack: Path) -> None:
    run("clear", NAMESPACE.id, "-c", stack, "--tier", "object", "--yes")
    assert objects(stack) == []
    assert run("du", "-c", stack, "--tier", "object")[0]["used"] == 0
    assert [row["kind"] for row in run("ls", "-c", stack)["namespaces"]] == ["cpu", "nvme"]


def test_what_says_that_an_engine_runs_stays(stack: Path) -> None:
    with Stack.open(stack, NAMESPACE):
        run("clear", "-c", stack, "--tier", "object", "--yes")
        assert [name.partition("/")[0] for name in objects(stack)] == ["servers"]


def test_what_says_that_an_engine_runs_stays_with_what_cannot_be_removed(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_keys(1)[0]
    with Stack.open(in_a_folder, NAMESPACE) as opened:
        opened.store({key: payload(key)})
        assert opened.settle()
    unlink = Disk.unlink

    def protect(disk: Disk, path: Path) -> None:
        if "/blocks/" in f"{Path(path).parent.resolve()}/":
            raise PermissionError(errno.EPERM, "protected")
        unlink(disk, path)

    monkeypatch.setattr(Disk, "unlink", protect)
    assert app.run(["clear", "-c", str(in_a_folder), "--tier", "object", "--yes"]) == 1
    assert NAMESPACE.id in {name.partition("/")[0] for name in objects(in_a_folder)}


def test_idle_namespaces_go(stack: Path) -> None:
    found = run("gc", "-c", stack, "--tier", "object", "--idle", "0s")["found"]
    assert len(found) == 1
    assert objects(stack) == []
    assert run("du", "-c", stack, "--tier", "object")[0]["used"] == 0


@pytest.mark.parametrize("idle", [[], ["--idle", "0s"]])
def test_what_a_store_does_not_delete_is_not_called_in_use(
    in_a_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    idle: list[str],
) -> None:
    put(in_a_folder, make_keys(BLOCKS))
    in_a_folder.write_text(in_a_folder.read_text().replace("64MiB", f"{4096 + 8192}"))
    unlink = Disk.unlink

    def protect(disk: Disk, path: Any) -> None:
        if "/blocks/" in f"{Path(path).parent.resolve()}/":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(disk, path)

    monkeypatch.setattr(Disk, "unlink", protect)
    assert app.run(["gc", "-c", str(in_a_folder), "--tier", "object", *idle]) == 1
    said = capsys.readouterr().err
    assert "the store kept" in said
    assert "in use" not in said


def test_what_is_idle_is_not_also_over_the_budget(in_a_folder: Path, tmp_path: Path) -> None:
    """A dry run says the same as the run."""
    other = Namespace(facts={"model": "other"}, group_bytes=(8192,))
    for namespace in (NAMESPACE, other):
        put(in_a_folder, make_keys(BLOCKS), namespace)
    for path in (tmp_path / "store").rglob("*"):
        if NAMESPACE.id in str(path):
            os.utime(path, (time.time() - 7200,) * 2)
    # There is room for the blocks of one of them.
    in_a_folder.write_text(in_a_folder.read_text().replace("64MiB", f"{BLOCKS * (4096 + 8192)}"))
    args = ("gc", "-c", in_a_folder, "--tier", "object", "--idle", "1h")
    (would,) = run(*args, "--dry-run")["found"]
    (row,) = run(*args)["found"]
    assert row == would | {"removed": True}
    assert row["what"] == "namespace that nobody used for so long"
    assert run("du", "-c", in_a_folder, "--tier", "object")[0]["used"] > 0


def test_a_measurement_of_a_folder_that_was_killed_goes(in_a_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "blocks").mkdir()
    for name, number in (("disk", 1), (".", 2)):  # beside the nvme tier's, and the store's
        bench = tmp_path / name / f"{BENCH_MARK}{number}"
        bench.mkdir()
        os.utime(bench, (0, 0))
    assert len(run("gc", "-c", in_a_folder, "--dry-run")["found"]) == 2
    with holding(bench):
        assert len(run("gc", "-c", in_a_folder)["found"]) == 1
    assert bench.exists()
    assert len(run("gc", "-c", in_a_folder)["found"]) == 1
    assert not bench.exists()


def test_what_was_only_written_to_try_a_store_goes(stack: Path, tmp_path: Path) -> None:
    """A bench or a doctor was killed. Nobody holds anything in a bucket: it goes by its age."""
    over, measuring, probe = new_bench(), new_bench(), new_probe()
    blocks = sorted(block_name(NAMESPACE.id, key) for key in make_keys(3))
    settings: Any = load(stack).tiers[2]
    before = objects(stack)
    with contextlib.closing(open_for(settings)) as store:
        placed = [*(f"{over}/{block}" for block in blocks), probe]
        placed += [f"{measuring}/{block}" for block in (blocks[0], blocks[2])]
        for name in placed:
            store.put(name, [memoryview(b"12345")])
        args = ("gc", "-c", stack, "--tier", "object")
        assert run(*args)["found"] == []
        for path in tmp_path.rglob("*"):
            if path.is_file() and ("/kvtier-bench-" in str(path) or "/kvtier-doctor/" in str(path)):
                os.utime(path, (time.time() - 3 * 3600,) * 2)
        store.put(f"{measuring}/{blocks[1]}", [memoryview(b"12345")])
    for dry, removed in (["--dry-run"], False), ([], True):
        found = run(*args, *dry)["found"]
        assert [row["where"].partition("/kvtier-")[2] for row in found] == [
            over.removeprefix("kvtier-"),
            probe.removeprefix("kvtier-"),
        ]
        assert [(row["bytes"], row["removed"]) for row in found] == [(15, removed), (5, removed)]
    left = [f"{measuring}/{block}" for block in blocks]
    assert sorted(objects(stack)) == sorted([*before, *left])


def test_a_namespace_that_is_only_read_is_not_idle(in_a_folder: Path, tmp_path: Path) -> None:
    """All prompts hit: nothing is stored any more, and what is there is in use."""
    keys = make_keys(BLOCKS)
    args = ("-c", in_a_folder, "--tier", "object", "--idle", "1h", "--dry-run")
    put(in_a_folder, keys)
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (time.time() - 7200,) * 2)
    assert len(run("gc", *args)["found"]) == 1
    with Stack.open(in_a_folder, NAMESPACE) as opened:
        assert opened.settle()
        assert run("gc", *args)["found"] == [], "a server runs"
        assert len(opened.load(keys)) == BLOCKS
    assert run("gc", *args)["found"] == [], "and has used it"


def test_what_told_of_blocks_that_went_goes(in_a_folder: Path, tmp_path: Path) -> None:
    put(in_a_folder, make_keys(BLOCKS))
    other = Namespace(facts={"model": "served"}, group_bytes=(4096,))
    args = ("-c", in_a_folder, "--tier", "object")
    with Stack.open(in_a_folder, other, engine="other") as opened:
        assert opened.store({make_keys(1)[0]: bytes(4096)})
        assert opened.settle()
        for path in (tmp_path / "store").rglob("*"):
            if "/blocks/" in str(path) and NAMESPACE.id in str(path) and path.is_file():
                path.unlink()
        assert run("gc", *args)["found"] == [], "somebody may be about to come back"
        for path in (tmp_path / "store").rglob("*"):
            if path.is_file() and NAMESPACE.id in str(path):
                os.utime(path, (time.time() - 3 * 3600,) * 2)
        for dry, removed in (["--dry-run"], False), ([], True):
            [row] = run("gc", *args, *dry)["found"]
            assert row["what"] == "what told of a namespace without blocks"
            assert row["where"] == f"file://{tmp_path}/store/{NAMESPACE.id}"
            assert row["removed"] is removed
            assert row["bytes"] > 0
        assert not any(NAMESPACE.id in name for name in objects(in_a_folder))
        assert run("gc", *args)["found"] == []
        assert run("ls", *args)["namespaces"][0]["namespace"] == other.id


def test_clear_says_what_it_has_emptied_though_it_did_not_ask(
    in_a_folder: Path, tmp_path: Path
) -> None:
    fill(in_a_folder)
    done = command("clear", "-c", in_a_folder, "--yes", columns=1000)
    store = f"2 object (file://{tmp_path}/store, which other servers may share)"
    assert done.out.endswith(f" were removed from 0 cpu, 1 nvme, {store}\n")


def test_blocks_are_chosen_by_the_room_they_will_take(in_a_folder: Path, tmp_path: Path) -> None:
    """Not by what they take where they are: a small group's are small in a store, and have a whole
    slot each on a disk."""
    small = make_keys(40, group=2)
    put(in_a_folder, small, GROUPED)
    snapshot = f"file://{tmp_path}/snapshot"
    object_bytes, slot_bytes = 4096 + 12, 4096 + 20480
    (out,) = run("snapshot", "-c", in_a_folder, "--to", snapshot, "--size", "40KiB")["namespaces"]
    assert out["asked"] == out["copied"] == (40 << 10) // object_bytes
    run("snapshot", "-c", in_a_folder, "--to", snapshot)
    run("clear", "-c", in_a_folder, "--yes")
    in_a_folder.write_text(in_a_folder.read_text().replace("16MiB", "640KiB"))
    (back,) = run("copy", snapshot, in_a_folder)["namespaces"]
    assert back["asked"] == back["copied"] == int(0.95 * (640 << 10)) // slot_bytes


def test_bench_leaves_the_store_as_it_was(stack: Path) -> None:
    before = run("du", "-c", stack, "--tier", "object")[0]["used"]
    report = run("bench", "-c", stack, "--chunk=8KiB", "--blocks=4", "--rounds=1")
    assert [tier["hits"] for tier in report["tiers"]] == [8, 4, 4]
    assert run("du", "-c", stack, "--tier", "object")[0]["used"] == before


def test_the_doctor_tries_every_right(stack: Path) -> None:
    report = run("doctor", "-c", stack, "--no-measure")
    found = [each["what"] for each in report["findings"] if each["area"] == "2 object"]
    for right in ("listed", "written", "read", "deleted"):
        assert any(right in what for what in found)
    assert run("verify", "-c", stack)["counts"]["good"] == 3 * BLOCKS


def test_what_processes_keep_to_themselves_is_unknown(stack_file: Path) -> None:
    stack_file.write_text(f"{stack_file.read_text()}  - {{kind: memory, capacity: 4MiB}}\n")
    place = run("du", "-c", stack_file)[2]
    assert (place["kind"], place["blocks"], place["troubles"]) == ("memory", None, [])
    assert command("gc", "-c", stack_file).out == "there is nothing to remove\n"


def test_a_restore_from_where_nothing_is(
    in_a_folder: Path, server: object_servers.ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A url with a typo in it, most likely. A stack's own store may still be empty."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    done = command("copy", "s3://bucket/typo", in_a_folder, "--json")
    assert (done.code, done.out) == (1, "")
    assert "there are no blocks in s3://bucket/typo: see that it is the right" in done.err
    assert command("copy", in_a_folder, in_a_folder, "--tier", "object").code == 0


class TestAStoreThatIsDown:
    @pytest.fixture
    def down(self, on_a_server: Path, server: object_servers.ServerProcess) -> Path:
        server.kill()
        return on_a_server

    def test_nobody_is_told_that_it_is_empty(self, down: Path) -> None:
        *others, store = run("du", "-c", down, code=1)
        assert (store["capacity"], store["used"], store["blocks"]) == (64 << 20, None, None)
        assert all(place["blocks"] == 0 for place in others)
        done = command("du", "--tier", "object", "-c", down)
        assert (done.code, done.out.count("unknown"), " 0" in done.out) == (1, 2, False)
        assert "nothing to remove in what can be seen" in command("gc", "-c", down).out

    @pytest.mark.parametrize("words", ["ls {}", "verify -n {}", "clear --yes {}", "prewarm -n {}"])
    def test_what_nothing_else_has_may_be_in_it(self, words: str, down: Path) -> None:
        done = command(*words.format(NAMESPACE.id).split(), "-c", down)
        assert (done.code, done.out) == (1, "")
        assert "see that the store is running" in done.err
        assert "in what can be seen begins with" in done.err

    def test_what_stays_elsewhere_does_not_hide_it(self, down: Path, hold: Hold) -> None:
        """Who clears all must hear that the store's blocks are there still."""
        two = down.with_name("two.yaml")  # an engine that does not wait for the store
        two.write_text(down.read_text().partition("  - {kind: object")[0])
        hold(two)
        done = command("clear", "-c", down, "--yes")
        assert done.code == 1
        assert "stop its engine" in done.err
        assert "see that the store is running" in done.err

    def test_a_wrong_secret_is_no_store_that_is_down(
        self, on_a_server: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        report = run("doctor", "-c", on_a_server, "--no-measure", code=1)
        (bad,) = [each for each in report["findings"] if each["level"] == "bad"]
        assert "the access key or its secret is wrong" in bad["what"]
        assert "running" not in bad["remedy"]
        done = command("ls", "-c", on_a_server)
        assert done.code == 1
        assert "running" not in done.err

    def test_bench_measures_the_rest(self, down: Path) -> None:
        report = run("bench", "-c", down, "--chunk=8KiB", "--blocks=2", "--rounds=1", code=1)
        assert [tier["good"] for tier in report["tiers"]] == [True, True, False]


@pytest.mark.parametrize("words", [["snapshot"], ["prewarm", "--into", "object", "--from"]])
def test_a_target_that_is_down_is_called_that(
    words: list[str], in_a_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a tier without room, after a while of waiting for some."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody")
    fill(in_a_folder)
    down = 'url: "s3://bucket/kv", region: none, endpoint: "http://127.0.0.1:9"'
    text = in_a_folder.read_text()
    if words[0] == "prewarm":
        words = [*words, str(in_a_folder)]
        target = tmp_path / "down.yaml"
    else:
        target = in_a_folder
    target.write_text(text.replace(f'url: "file://{tmp_path}/store"', down))
    done = command(*words, "-c", target, "--json")
    assert (done.code, done.out) == (1, "")
    assert done.err == ("kvtier: nothing listens at http://127.0.0.1:9: it is down, or elsewhere\n")


def test_what_host_memory_holds_is_described_by_another_tier(
    in_a_folder: Path, tmp_path: Path
) -> None:
    fill(in_a_folder)
    words = ["copy", in_a_folder, f"file://{tmp_path}/cpu", "--tier", "cpu"]
    assert run(*words)["namespaces"][0]["copied"] == BLOCKS
    lines = in_a_folder.read_text().splitlines(keepends=True)
    in_a_folder.write_text("".join(line for line in lines if "nvme" not in line))
    words = ["snapshot", "--to", f"file://{tmp_path}/another", "-c", in_a_folder]
    assert run(*words)["namespaces"][0]["copied"] == BLOCKS
    lines = in_a_folder.read_text().splitlines(keepends=True)
    in_a_folder.write_text("".join(line for line in lines if "object" not in line))
    next((tmp_path / "host").rglob("namespace.json")).unlink()
    done = command("snapshot", "--to", f"file://{tmp_path}/third", "-c", in_a_folder)
    assert done.code == 1
    assert "has no namespace.json" in done.err


def test_a_web_server_is_no_store(
    in_a_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody")
    fill(in_a_folder)
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = f'url: "s3://bucket/kv", endpoint: "http://127.0.0.1:{server.server_port}"'
        text = in_a_folder.read_text()
        in_a_folder.write_text(text.replace(f'url: "file://{tmp_path}/store"', web))
        for words in (["ls"], ["snapshot"], ["doctor", "--no-measure"]):
            done = command(*words, "-c", in_a_folder)
            assert done.code == 1
            assert "check the endpoint" in done.said
        server.shutdown()
