"""`kvtier prewarm`, `snapshot` and `restore`: blocks from place to place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.cli_world import command, every_kind, put, run, served
from support.processes.clocks import Clock

from kvtier import Stack
from kvtier.backends.nvme import NvmeHandler
from kvtier.backends.nvme.tier import NvmeTier
from kvtier.cli import sink as sinks
from kvtier.cli.console import Progress
from kvtier.cli.inspect import inspector_of
from kvtier.cli.sink import Choice, ChoiceReader, Copied, RateLimit, Sink, open_sink
from kvtier.config import load
from kvtier.inspect.filling import ROW
from kvtier.record.record import HEADER_BYTES, Buffer
from kvtier.slab import layout
from kvtier.testing.subject import GROUPED, NAMESPACE, fill, make_keys, payload
from kvtier.types import BlockKey, Namespace, Outcome

pytestmark = pytest.mark.slow

BLOCKS = 8


# Takes all the room of a stack's disk, says so, and holds it until told to go.
FULL = """
import sys
from pathlib import Path
from kvtier import Stack
from kvtier.testing.subject import NAMESPACE, make_keys, payload
with Stack.open(Path(sys.argv[1]), NAMESPACE) as stack:
    keys = make_keys(2000, start=1000)
    for at in range(0, len(keys), 100):
        stack.store({key: payload(key) for key in keys[at : at + 100]})
        assert stack.settle().done
        stack.chain.tiers[1].refresh()
    assert stack.chain.tiers[1].stats().evicted
    print("full", flush=True)
    sys.stdin.readline()
"""


# The command line, but that it waits for room however long others take to make it.
PATIENT = (
    "from kvtier.cli import main; from kvtier.cli import sink; sink._ROOM_S = 300.0; main.main()"
)


def patiently(*args: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PATIENT, *map(str, args), "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def fill_up(engine: Stack) -> None:
    """Have an engine take all the room of its disk."""
    keys = make_keys(2000, start=1000)
    for at in range(0, len(keys), 100):
        engine.store({key: payload(key) for key in keys[at : at + 100]})
        assert engine.settle()
        engine.chain.tiers[1].refresh()
    assert engine.chain.tiers[1].stats().evicted


class TestPrewarm:
    @every_kind
    def test_from_another_stack(self, filled: Path, fresh: Path) -> None:
        (report,) = run("prewarm", "-c", fresh, "--from", filled)["namespaces"]
        assert (report["asked"], report["copied"]) == (BLOCKS, BLOCKS)
        assert served(fresh) == BLOCKS
        (report,) = run("prewarm", "-c", fresh, "--from", filled)["namespaces"]
        assert (report["copied"], report["already_there"]) == (0, BLOCKS)

    def test_from_the_store_of_the_stack_itself(self, stack_file: Path, tmp_path: Path) -> None:
        with stack_file.open("a") as file:
            file.write(f"  - {{kind: object, url: 'file://{tmp_path}/store', capacity: 64MiB}}\n")
        put(stack_file, make_keys(BLOCKS))
        run("clear", "-c", stack_file, "--tier", "cpu", "--yes")
        run("clear", "-c", stack_file, "--tier", "nvme", "--yes")
        (report,) = run("prewarm", "-c", stack_file)["namespaces"]
        assert report["copied"] == BLOCKS
        assert run("du", "-c", stack_file, "--tier", "nvme")[0]["blocks"] == BLOCKS

    def test_a_running_engine_finds_the_blocks(self, filled: Path, fresh: Path) -> None:
        with Stack.open(fresh, NAMESPACE) as engine:
            assert engine.load(make_keys(BLOCKS)) == {}
            run("prewarm", "-c", fresh, "--from", filled)
            engine.chain.tiers[1].refresh()
            assert len(engine.load(make_keys(BLOCKS))) == BLOCKS

    def test_beside_an_engine_that_holds_all_the_room(self, filled: Path, fresh: Path) -> None:
        with Stack.open(fresh, NAMESPACE) as engine:
            fill_up(engine)
            process = patiently("prewarm", "-c", fresh, "--from", filled)
            while process.poll() is None:
                engine.chain.poll()
            (report,) = json.loads(process.communicate()[0])["namespaces"]
            assert (process.returncode, report["copied"]) == (0, BLOCKS)
            engine.chain.tiers[1].refresh()
            assert len(engine.load(make_keys(BLOCKS))) == BLOCKS

    def test_beside_an_engine_that_is_idle(self, filled: Path, fresh: Path) -> None:
        with Stack.open(fresh, NAMESPACE) as engine:
            fill_up(engine)
            process = patiently("prewarm", "-c", fresh, "--from", filled)
            (report,) = json.loads(process.communicate()[0])["namespaces"]
        assert (process.returncode, report["copied"]) == (0, BLOCKS)

    def test_where_nothing_makes_room(self, filled: Path, fresh: Path) -> None:
        """An engine whose process is stopped cannot hand anything over."""
        engine = subprocess.Popen(
            [sys.executable, "-c", FULL, str(fresh)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdout is not None
        assert engine.stdout.readline() == "full\n"
        engine.send_signal(signal.SIGSTOP)
        os.waitpid(engine.pid, os.WUNTRACED)  # its threads stop one by one
        try:
            done = command("prewarm", "-c", fresh, "--from", filled)
        finally:
            engine.send_signal(signal.SIGCONT)
            engine.communicate("go\n")
        assert (engine.returncode, done.code) == (0, 1), done.out
        assert "stop the engine meanwhile" in done.err

    def test_into_host_memory_before_an_engine_starts(self, filled: Path, fresh: Path) -> None:
        run("prewarm", "-c", fresh, "--from", filled, "--into", "cpu")
        assert run("du", "-c", fresh, "--tier", "cpu")[0]["blocks"] == BLOCKS
        assert served(fresh) == BLOCKS

    def test_not_into_the_memory_of_a_running_one(self, filled: Path, fresh: Path) -> None:
        with Stack.open(fresh, NAMESPACE):
            done = command("prewarm", "-c", fresh, "--from", filled, "--into", "cpu")
        assert done.code == 1
        assert "stop its engine" in done.err
        assert len(list((fresh.parent / "host").glob("*~2"))) <= 1

    @every_kind
    def test_the_newest_until_a_size(self, filled: Path, fresh: Path) -> None:
        (report,) = run("prewarm", "-c", fresh, "--from", filled, "--size", "40KiB")["namespaces"]
        assert report["asked"] == report["copied"] == 3
        assert report["left"] == BLOCKS - 3
        done = command("prewarm", "-c", fresh, "--from", filled, "--size", "40KiB")
        assert f"{BLOCKS - 3} blocks are left out: beyond --size" in done.out

    def test_the_model_last_stored_first(self, stack_file: Path, fresh: Path) -> None:
        (key,) = make_keys(1)
        models = [Namespace(facts={"model": name}, group_bytes=(4096,)) for name in "ab"]
        models.sort(key=lambda model: model.id)  # so that the names do not say the same
        for number, model in enumerate(models):
            with Stack(load(stack_file), model, engine=f"of-{number}") as stack:
                stack.store({key: payload(key, model)})
                assert stack.settle()
        for number, model in enumerate(models):  # now that no engine would take them for idle
            for table in (stack_file.parent / "disk" / "blocks" / model.id).glob("*.table"):
                with table.open("r+b") as entries:
                    entries.seek(layout.TABLE_AT + 8)
                    entries.write((1000 + number).to_bytes(4, "little"))
        done = run("prewarm", "-c", fresh, "--from", stack_file, "--size", "12KiB")
        assert [each["namespace"] for each in done["namespaces"]] == [m.id for m in models[::-1]]
        assert [each["copied"] for each in done["namespaces"]] == [1, 0]

    def test_no_model_makes_room_for_the_next(self, stack_file: Path, fresh: Path) -> None:
        """The first takes three of four slabs, where half of the folder would be its share."""
        stack_file.write_text(stack_file.read_text().replace("16MiB", "64MiB"))
        facts = [{"model": f"other {number}"} for number in range(100)]
        others = [Namespace(facts=each, group_bytes=NAMESPACE.group_bytes) for each in facts]
        other = next(each for each in others if each.id > NAMESPACE.id)  # second in one second, too
        models = [(other, 200), (NAMESPACE, 1000)]
        for model, count in models:
            with Stack.open(stack_file, model) as stack:
                for start in range(0, count, 200):
                    keys = make_keys(200, start=start)
                    stack.store({key: payload(key, model) for key in keys})
                    assert stack.settle()
        done = run("prewarm", "-c", fresh, "--from", stack_file)
        assert [each["copied"] for each in done["namespaces"]] == [1000, 200]
        rows = run("du", "-c", fresh, "--tier", "nvme")[0]["namespaces"]
        assert {row["namespace"]: row["blocks"] for row in rows} == {
            model.id: count for model, count in models
        }

    def test_host_memory_takes_one_of_several_models(self, filled: Path, fresh: Path) -> None:
        """The second would be its end of the first."""
        (key,) = make_keys(1)
        other = Namespace(facts={"model": "other"}, group_bytes=(4096,))
        with Stack.open(filled, other, engine="other") as stack:
            stack.store({key: payload(key, other)})
            assert stack.settle()
        done = command("prewarm", "-c", fresh, "--from", filled, "--into", "cpu")
        assert (done.code, done.out) == (1, "")
        assert "host memory holds one: name it with --namespace" in done.err
        run("prewarm", "-c", fresh, "--from", filled, "--into", "cpu", "-n", NAMESPACE.id)
        assert served(fresh) == BLOCKS

    @every_kind
    def test_groups_and_parts(self, stack_file: Path, fresh: Path) -> None:
        wanted = {
            key: payload(key, GROUPED) for group in range(4) for key in make_keys(4, group=group)
        }
        with Stack.open(stack_file, GROUPED) as stack:
            stack.store(wanted)
            assert stack.settle()
        run("prewarm", "-c", fresh, "--from", stack_file)
        with Stack.open(fresh, GROUPED) as stack:
            assert stack.load(list(wanted)) == wanted

    def test_bad_blocks_are_not_copied(self, filled: Path, fresh: Path, tmp_path: Path) -> None:
        run("clear", "-c", filled, "--tier", "cpu", "--yes")
        for slab in (tmp_path / "disk").rglob("*.slab"):  # the second one is empty
            with slab.open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(b"other bytes")
        (report,) = run("prewarm", "-c", fresh, "--from", filled, code=1)["namespaces"]
        assert (report["copied"], report["bad"]) == (BLOCKS - 1, 1)
        assert served(fresh) == BLOCKS - 1

    @every_kind
    def test_no_more_than_there_is_room_for(self, filled: Path, fresh: Path) -> None:
        fresh.write_text(fresh.read_text().replace("16MiB", "88KiB"))
        (report,) = run("prewarm", "-c", fresh, "--from", filled)["namespaces"]
        assert 0 < report["asked"] == report["copied"] < BLOCKS

    @every_kind
    def test_what_is_there_does_not_make_room_for_the_rest(self, filled: Path, fresh: Path) -> None:
        """Some are there, in a full tier, and of all in it the longest unused."""
        fresh.write_text(fresh.read_text().replace("16MiB", "256KiB"))
        with Stack.open(fresh, NAMESPACE) as engine:
            engine.store({key: payload(key) for key in make_keys(2)})
            assert engine.settle()
            others = make_keys(engine.chain.tiers[1].stats().free, start=1000)
            engine.store({key: payload(key) for key in others})
            assert engine.settle()
        run("clear", "-c", fresh, "--tier", "cpu", "--yes")
        (report,) = run("prewarm", "-c", fresh, "--from", filled)["namespaces"]
        assert (report["already_there"], report["copied"]) == (2, BLOCKS - 2)
        assert served(fresh) == BLOCKS


class Made(ChoiceReader):
    """Reads what a test makes up."""

    concurrency = 4

    def __init__(self) -> None:
        super().__init__(Choice(NAMESPACE.id, np.zeros(0, ROW), []), NAMESPACE)

    def used_again(self, row: int, key: BlockKey) -> bool:
        return False


class Good(Made):
    def read(
        self, rows: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        for key, record in zip(keys, into, strict=True):
            fill(record, key)
        return [Outcome.OK] * len(keys)


def test_what_cannot_be_read_is_tried_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is room for some of a piece only, and the first of it have failed by then."""

    class Gone(Made):
        def read(
            self, rows: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
        ) -> list[Outcome]:
            return [Outcome.IO_ERROR] * len(keys)

    take = NvmeTier.prepare_store
    monkeypatch.setattr(
        NvmeTier, "prepare_store", lambda tier, keys, *, evict: take(tier, keys[:4], evict=evict)
    )
    result = Copied(NAMESPACE.id)
    with open_sink(
        inspector_of(load(fresh), 1).filling(), NAMESPACE, Gone(), RateLimit(None)
    ) as sink:
        sink.fill([(make_keys(100), list(range(100)))], result, Progress("", 0, ""))
    assert (result.unread, result.bad, result.copied, result.not_stored) == (100, 0, 0, 0)


@pytest.mark.parametrize("outage_s", [30.0, 0.0])
def test_a_store_that_is_away_for_a_moment_gets_all_the_same(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    outage_s: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A snapshot gave up, with all of its blocks not stored, over an outage of three seconds."""
    failures, write = iter(range(12)), NvmeHandler.store

    def store(self: NvmeHandler, spec: Any, keys: Any, records: Any) -> list[Outcome]:
        if next(failures, None) is not None:
            return [Outcome.IO_ERROR] * len(keys)
        return write(self, spec, keys, records)

    monkeypatch.setattr(NvmeHandler, "store", store)
    monkeypatch.setattr(sinks, "OUTAGE_S", outage_s)
    monkeypatch.setattr(sinks, "AGAIN_S", 0.0)
    keys, result = make_keys(40), Copied(NAMESPACE.id, asked=40)
    with open_sink(
        inspector_of(load(fresh), 1).filling(), NAMESPACE, Good(), RateLimit(None)
    ) as sink:
        pieces = [(keys[at : at + 8], list(range(at, at + 8))) for at in range(0, 40, 8)]
        sink.fill(pieces, result, Progress("", 0, ""))
    assert result.copied + result.not_stored == 40
    assert (result.not_stored == 0) == (outage_s > 0)
    assert capsys.readouterr().err.count("cannot be written: trying again, for") == 1


def test_what_is_lost_again_before_the_end_is_not_called_stored(fresh: Path) -> None:
    """As where others share the tier, and need the room."""

    keys, result, bar = make_keys(8), Copied(NAMESPACE.id, asked=8), Progress("", 0, "")

    def pieces(sink: Sink) -> Iterator[tuple[list[BlockKey], list[int]]]:
        yield keys, list(range(8))
        while len(sink.stored) < 8:
            sink._settle(result, bar)
        sink._tier.forget(keys[:3])

    with open_sink(
        inspector_of(load(fresh), 1).filling(), NAMESPACE, Good(), RateLimit(None)
    ) as sink:
        sink.fill(pieces(sink), result, bar)
    assert (result.copied, result.not_stored) == (5, 3)
    assert result.bytes == sum(len(payload(key)) for key in keys[3:])


@pytest.mark.parametrize("trouble", ["bad", "unread", "not_stored", "untold"])
def test_a_copy_with_a_trouble_is_not_whole(trouble: str) -> None:
    result = Copied(NAMESPACE.id, asked=2, copied=1, gone=1)
    assert result.whole
    setattr(result, trouble, 1)
    assert not result.whole


class TestPace:
    def test_so_many_bytes_a_second(self) -> None:
        clock = Clock(100.0)
        pace = RateLimit(1000, clock.sleep, clock)
        for _ in range(4):
            pace.spend(500)
        assert clock.now == pytest.approx(102)
        clock.now += 60  # what was not used meanwhile is not made up for
        for _ in range(4):
            pace.spend(500)
        assert clock.now == pytest.approx(164)

    def test_as_fast_as_it_goes(self) -> None:
        pace = RateLimit(None, lambda seconds: pytest.fail("nobody asked to wait"))
        pace.spend(1 << 40)

    @pytest.mark.parametrize("rate", [100_000, 1_000_000, 10_000_000])
    def test_no_byte_is_read_before_its_time(self, fresh: Path, rate: int) -> None:
        """At every moment, what was read is within what the time so far allows."""
        clock = Clock(100.0)
        begin = clock.now
        size = NAMESPACE.payload_bytes
        count = 300
        keys = make_keys(count)

        class Source(Made):
            done = 0
            lock = threading.Lock()

            def read(self, rows: Any, keys: Any, into: Any) -> list[Outcome]:
                for key, record in zip(keys, into, strict=True):
                    fill(record, key)
                with self.lock:
                    self.done += len(keys) * size
                    assert self.done <= rate * (clock.now - begin) + 1
                return [Outcome.OK] * len(keys)

        result = Copied("")
        pace = RateLimit(rate, clock.sleep, clock)
        with open_sink(inspector_of(load(fresh), 1).filling(), NAMESPACE, Source(), pace) as sink:
            pieces = [
                (keys[at : at + sink.piece], list(range(at, min(count, at + sink.piece))))
                for at in range(0, count, sink.piece)
            ]
            sink.fill(pieces, result, Progress("", 0, ""))
        assert result.copied == count
        assert clock.now - begin == pytest.approx(count * size / rate)


class TestSnapshots:
    @every_kind
    def test_out_and_back(self, filled: Path, fresh: Path, tmp_path: Path) -> None:
        store = f"file://{tmp_path}/snapshot"
        (report,) = run("snapshot", "-c", filled, "--to", store)["namespaces"]
        assert report["copied"] == BLOCKS
        (report,) = run("snapshot", "-c", filled, "--to", store)["namespaces"]
        assert report["already_there"] == BLOCKS
        (report,) = run("copy", store, fresh)["namespaces"]
        assert report["copied"] == BLOCKS
        assert served(fresh) == BLOCKS

    def test_without_a_store(self, filled: Path) -> None:
        assert "name a url" in command("snapshot", "-c", filled).err
        assert command("snapshot", "-c", filled, "--to", "ftp://x").code == 2
        done = command("snapshot", "-c", filled, "--to", "file:///no/such/folder")
        assert done.code == 2
        assert "kvtier: file:///no/such/folder: /no/such is not a folder" in done.err

    def test_a_description_that_is_lost_is_no_empty_store(
        self, filled: Path, fresh: Path, tmp_path: Path
    ) -> None:
        store = f"file://{tmp_path}/snapshot"
        run("snapshot", "-c", filled, "--to", store)
        (description,) = (tmp_path / "snapshot").rglob("namespace.json")
        description.write_text("{}")
        done = command("copy", store, fresh)
        assert (done.code, done.out) == (1, "")
        assert f"says what the namespace {NAMESPACE.id} means" in done.err

    def test_from_a_store_that_is_down(self, fresh: Path, monkeypatch: Any) -> None:
        fresh.write_text(
            fresh.read_text()
            + "  - {kind: object, url: 's3://bucket/p', endpoint: 'http://127.0.0.1:9', "
            + "capacity: 1GiB}\n"
        )
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        done = command("copy", fresh, fresh, "--tier", "object")
        assert done.code == 1
        assert "see that the store is running" in done.err
