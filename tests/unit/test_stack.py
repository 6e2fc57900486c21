"""A stack from configuration to bytes: embedded, without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes.cli_world import flip
from support.tiers.nvme_rig import open_files

from kvtier import Stack, block_key, load_config
from kvtier.amounts import size
from kvtier.backends.nvme.tier import NvmeTier
from kvtier.errors import ConfigError, ConfigErrors, KVTierError, NotOpen
from kvtier.move.process import ProcessMover
from kvtier.move.threads import ThreadMover
from kvtier.record.record import record_bytes
from kvtier.stack import Settled
from kvtier.system.calls import joined
from kvtier.testing.memory import MemoryHandler, MemoryTier
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Namespace, Outcome

SLOT = record_bytes(NAMESPACE.payload_bytes)


def config(folder: Path, *, blocks: int = 8, mode: str = "threads") -> dict[str, Any]:
    host = folder / "host"
    host.mkdir(exist_ok=True)
    return {
        "version": 1,
        "name": "unit",
        "mover": {"mode": mode},
        "tiers": [
            {"kind": "cpu", "path": str(host), "capacity": blocks * (SLOT + 64) + 12288},
            {"kind": "nvme", "path": str(folder / "nvme"), "capacity": "4MiB", "free_floor": 0},
        ],
    }


def blocks(count: int, start: int = 0) -> dict[Any, bytes]:
    return {key: payload(key) for key in make_keys(count, start=start)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "process"])
def test_what_host_memory_cannot_hold_comes_back_from_below(tmp_path: Path, mode: str) -> None:
    with Stack.open(config(tmp_path, mode=mode), NAMESPACE) as stack:
        wanted = blocks(24)
        for start in range(0, 24, 4):
            assert len(stack.store(blocks(4, start))) == 4
            assert stack.settle()
        assert stack.load(list(wanted)) == wanted
        assert stack.chain.chain_stats().hits[1] >= 16
    with Stack.open(config(tmp_path, mode=mode), NAMESPACE) as stack:
        assert stack.load(list(wanted)) == wanted, "after a restart too"


@pytest.mark.parametrize("policy", ["through", "on_evict"])
@pytest.mark.parametrize("at_once", [1, 200])
def test_a_store_waits_rather_than_evict_what_is_not_written_down(
    tmp_path: Path, policy: str, at_once: int
) -> None:
    """1000 blocks of 1 MiB, stored into 64 MiB over a disk, were taken, and 775 could be loaded."""
    tiers, wanted = config(tmp_path), blocks(200)
    tiers["tiers"][1] |= {"write": policy, "capacity": "64MiB"}  # slabs for all, from the start
    with Stack.open(tiers, NAMESPACE) as stack:
        taken = []
        for start in range(0, 200, at_once):
            taken += stack.store(blocks(at_once, start))
        assert taken == list(wanted)
        assert stack.settle() == Settled(True, [])
        assert stack.load(list(wanted)) == wanted, "nor does a load evict what is only there"


def test_a_store_takes_only_what_it_has_room_for_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(type(stack.mover), "down", True)
            assert stack.store(blocks(20), seconds=0.0) == make_keys(8)
            assert stack.store(blocks(4, start=8), seconds=0.0) == []
            assert not stack.settle(0.0).done
        assert stack.store(blocks(4, start=8)) == make_keys(4, start=8)
        assert stack.settle()
        assert stack.load(make_keys(12)) == blocks(12)


def test_settle_says_what_was_lost(tmp_path: Path) -> None:
    """Memory alone evicts for want of room, and says so once."""
    tiers = config(tmp_path)
    del tiers["tiers"][1]
    with Stack.open(tiers, NAMESPACE) as stack:
        assert len(stack.store(blocks(12))) == 8, "of what it has taken it names what it holds"
        stack.settle()
        stack.store(blocks(8, start=20))
        stack.store(blocks(8, start=40))
        assert stack.settle() == Settled(True, make_keys(8, start=20))
        assert stack.settle(), "it is said once"


def test_a_stack_answers_like_a_mapping(tmp_path: Path) -> None:
    one, two, three = make_keys(3)
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(2))
        stack.settle()
        stack.chain.tiers[0].forget([two])
        assert stack.lookup([three, two, one]) == {one: "cpu", two: "nvme"}
        assert (one in stack, two in stack, three in stack) == (True, True, False)
        stack.delete([one, three])
        assert stack.lookup([one, two]) == {two: "nvme"}
        assert [tier.blocks for tier in stack.stats().tiers] == [0, 1]
        assert stack.settle(), "what was deleted is not lost"
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        assert stack.load([one, two]) == {two: payload(two)}


def test_a_write_budget_bounds_what_reaches_the_disk_and_is_kept(tmp_path: Path) -> None:
    """Of little there is not enough for one block at first; of much there is at once."""
    little, much = config(tmp_path), config(tmp_path)
    little["tiers"][1]["writes"] = "512KiB/day"
    much["tiers"][1]["writes"] = "900TiB/h"
    with Stack.open(little, NAMESPACE) as stack:
        stack.store(blocks(4))
        assert stack.settle()
        assert stack.chain.chain_stats().links[0].drops == {"budget": 4}
    for start in (4, 8):
        with Stack.open(much, NAMESPACE) as stack:
            stack.chain.tiers[1].refresh()
            stack.store(blocks(4, start))
            assert stack.settle()
    with Stack.open(much, NAMESPACE) as stack:
        budget = stack.chain.chain_stats().budgets[1]
        assert budget is not None
        held = stack.chain.tiers[1].stats().blocks
        assert held >= 8
        # What the restarts found in host memory came down, too.
        assert held * SLOT <= budget.written <= 12 * (SLOT + 128)


def test_what_a_restart_has_found_is_said(tmp_path: Path) -> None:
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        kept = size(4 * SLOT)
        room = [size(tier.stats().bytes_capacity) for tier in stack.chain.tiers]
        assert (
            stack.summary() == f"cpu 0 blocks (0 B of {room[0]}), nvme 0 blocks (0 B of {room[1]})"
        )
        stack.store(blocks(4))
        stack.settle()
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        assert stack.summary() == (
            f"cpu 4 blocks ({kept} of {room[0]}), nvme 4 blocks ({kept} of {room[1]})"
        )


def test_a_name_in_use_is_said_once_with_what_it_means(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Stack.open(config(tmp_path), NAMESPACE),
        Stack.open(config(tmp_path), NAMESPACE, engine="x"),
    ):
        assert "is in use" not in caplog.text, "names of their own are nothing to speak of"
        with Stack.open(config(tmp_path), NAMESPACE) as second:
            assert second.context.engine == "unit~2"
    (record,) = [each for each in caplog.records if "is in use" in each.getMessage()]
    assert record.levelname == "WARNING"
    for words in ("'unit' is in use", "goes on as 'unit~2'", "restart", "KVTIER_NAME"):
        assert words in record.getMessage()


def test_the_movers_death_costs_time_only(tmp_path: Path) -> None:
    wanted = blocks(6)
    with Stack.open(config(tmp_path, mode="process"), NAMESPACE) as stack:
        assert isinstance(stack.mover, ProcessMover)
        stack.store(wanted)
        pid = stack.mover.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert stack.settle()
        assert stack.load(list(wanted)) == wanted


def test_what_waits_for_a_mover_that_is_down_is_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = blocks(4)
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(type(stack.mover), "down", True)
            stack.store(wanted)
            assert not stack.settle(0.0)
            meanwhile.setattr(type(stack.mover), "lost", True)
            assert not stack.chain.has_pending_work, "an engine need not step for it"
            assert not stack.chain.settled
        assert stack.settle()
        assert stack.chain.tiers[1].stats().blocks == 4


def test_a_stack_that_is_closed_twice_closes_nobody_elses_files(tmp_path: Path) -> None:
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.close()
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    for fd in others:
        os.close(fd)


@pytest.mark.parametrize(
    ("half", "method"),
    [(MemoryTier, "stats"), (MemoryTier, "close"), (MemoryHandler, "close")],
    ids=["asked first", "closed", "handler closed"],
)
def test_a_tier_that_raises_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: type[Any], method: str
) -> None:
    """As one whose server went away may do."""
    tiers = config(tmp_path)
    tiers["tiers"].insert(1, {"kind": "memory", "capacity": 8 * SLOT})
    stack = None
    if method == "close":
        stack = Stack.open(tiers, NAMESPACE)
        stack.store(blocks(4))
        stack.settle()

    def away(self: object) -> None:
        raise ConnectionError("the server is gone")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(half, method, away)
        with pytest.raises(ConnectionError):
            stack.close() if stack else Stack.open(tiers, NAMESPACE)
    assert [each.name for each in threading.enumerate() if each.name.startswith("kvtier")] == []
    with Stack.open(tiers, NAMESPACE) as again:
        assert again.context.engine == "unit", "nobody holds its memory"
        assert again.load(list(blocks(4))) == (blocks(4) if stack else {})


@pytest.mark.parametrize("mode", ["threads", "process"])
def test_a_stack_that_gets_too_few_threads_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It is refused, whichever thread is the first that is not to be had; who lives on can open it
    when there are more."""
    tiers = config(tmp_path, mode=mode)
    store = {"kind": "object", "url": f"file://{tmp_path}/store", "capacity": "4MiB", "threads": 2}
    tiers["tiers"][1]["threads"] = 2
    tiers["tiers"].append(store)
    with Stack.open(tiers, NAMESPACE) as stack:  # what is loaded once stays open
        stack.store(blocks(4))
        stack.settle()
    start, left = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    refused = 0
    for refused in range(100):
        left, before = refused, open_files()
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(threading.Thread, "start", limited)
            try:
                Stack.open(tiers, NAMESPACE).close()
            except (RuntimeError, KVTierError):
                ours = [each for each in threading.enumerate() if each.name.startswith("kvtier")]
                assert joined(ours, 60), "those that end by themselves have ended"
                assert open_files() == before
            else:
                break
    assert refused >= 3, "of each tier's keeper at least"
    with Stack.open(tiers, NAMESPACE) as again:
        assert again.context.engine == "unit", "nobody holds its memory"
        assert again.load(list(blocks(4))) == blocks(4)


def test_a_stack_that_is_closed_says_so(tmp_path: Path) -> None:
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(4))
    with pytest.raises(NotOpen, match="closed: open it again"):
        stack.store(blocks(1, start=10))
    with pytest.raises(NotOpen, match="closed"):
        stack.load(make_keys(4))
    with pytest.raises(NotOpen, match="closed"):
        stack.settle()


FORKED = """
import os, signal, sys
from pathlib import Path
from kvtier import Stack
from kvtier.errors import NotOpen
from kvtier.testing.subject import NAMESPACE, make_keys, payload

folder, mode = Path(sys.argv[1]), sys.argv[2]
tiers = {
    "version": 1,
    "name": "forking",
    "mover": {"mode": mode},
    "tiers": [
        {"kind": "cpu", "path": str(folder), "capacity": "64KiB", "persistence": "discard"},
        {"kind": "nvme", "path": str(folder / "nvme"), "capacity": "4MiB", "free_floor": 0},
    ],
}
wanted = {key: payload(key) for key in make_keys(8)}

def fill(stack):
    for key in wanted:
        stack.store({key: wanted[key]})
        stack.settle()

with Stack.open(tiers, NAMESPACE) as stack:
    child = os.fork()
    if child == 0:
        try:
            stack.load(make_keys(1))
        except NotOpen:
            sys.exit(7)  # and so out of the block, as whatever a child does that ends like this
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(folder.glob("*-forking/*/*.slab")), "the slabs are the parent's"
    with Stack.open(tiers, NAMESPACE) as second:
        assert second.context.engine == "forking~2", "the lock is still the parent's"
    fill(stack)
    assert stack.load(list(wanted)) == wanted
    assert stack.chain.chain_stats().mover.restarts == 0, "and so is the mover"

tiers["tiers"][0]["persistence"] = "keep"
with Stack.open(tiers, NAMESPACE) as stack:
    fill(stack)
    child = os.fork()
    if child == 0:
        signal.pause()  # as one that works on for long
try:
    with Stack.open(tiers, NAMESPACE) as again:
        assert again.context.engine == "forking", "a child keeps nothing that its parent has closed"
        assert again.load(list(wanted)) == wanted
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "process"])
def test_a_child_that_is_forked_off_leaves_the_stack_to_its_parent(
    tmp_path: Path, mode: str
) -> None:
    command = [sys.executable, "-c", FORKED, tmp_path, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_load_that_is_interrupted_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in a notebook, say, whose next cell goes on with the stack."""

    def wait(self: ThreadMover, seconds: float) -> bool:
        raise KeyboardInterrupt

    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(8))
        stack.settle()
        stack.chain.tiers[0].forget(make_keys(4))
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(ThreadMover, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                stack.load(make_keys(8))
        assert stack.settle()
        assert stack.chain.tiers[0].stats().pinned == 0
        assert len(stack.store(blocks(8, start=20))) == 8
        assert stack.load(make_keys(8)) == blocks(8)


@pytest.mark.parametrize("deed", ["load", "store"])
def test_a_handler_of_signals_may_close_what_it_interrupts_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    """As one of SIGTERM does."""
    stack = Stack.open(config(tmp_path), NAMESPACE)
    stack.store(blocks(8))
    stack.settle()
    stack.chain.tiers[0].forget(make_keys(8))

    def end(*_: object) -> None:
        stack.close()
        raise SystemExit

    monkeypatch.setattr(ThreadMover, "wait", end)
    monkeypatch.setattr(stack.host, "views", end)
    with pytest.raises(SystemExit):
        stack.load(make_keys(8)) if deed == "load" else stack.store(blocks(4, start=20))
    monkeypatch.undo()
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        assert stack.load(make_keys(8)) == blocks(8)


def test_threads_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an application that answers several requests at once."""
    deeds: list[str] = []
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(8))
        stack.settle()
        stack.chain.tiers[0].forget(make_keys(8))
        other = threading.Thread(target=lambda: deeds.append(f"stored {len(stack.store(more))}"))
        more, wait = blocks(4, start=20), ThreadMover.wait

        def wait_while_another_thread_comes(mover: ThreadMover, seconds: float) -> bool:
            if not deeds:
                deeds.append("loading")
                other.start()
                other.join(0.2)  # it must not get on, however long that takes
            return wait(mover, seconds)

        monkeypatch.setattr(ThreadMover, "wait", wait_while_another_thread_comes)
        found = stack.load(make_keys(8))
        other.join()
        assert found == blocks(8)
        assert deeds == ["loading", "stored 4"], "it had all of host memory to itself"


def test_who_waits_for_a_turn_waits_no_longer_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may wait for a store that is down, for as long as its own load may take."""
    loading, goes_on, wait = threading.Event(), threading.Event(), ThreadMover.wait

    def wait_for_long(mover: ThreadMover, seconds: float) -> bool:
        loading.set()
        goes_on.wait(10)
        return wait(mover, seconds)

    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(8))
        stack.settle()
        stack.chain.tiers[0].forget(make_keys(8))
        monkeypatch.setattr(ThreadMover, "wait", wait_for_long)
        other = threading.Thread(target=stack.load, args=(make_keys(8),))
        other.start()
        loading.wait()
        found, settled = stack.load(make_keys(8), seconds=0.01), stack.settle(seconds=0.0).done
        still_loading = not goes_on.is_set() and other.is_alive()
        goes_on.set()
        other.join()
        assert (found, settled, still_loading) == ({}, False, True)
        assert stack.load(make_keys(8), seconds=float("inf")) == blocks(8)


@pytest.mark.parametrize("proves", [True, False])
def test_a_block_that_does_not_verify_is_logged_with_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, proves: bool
) -> None:
    """It was counted, and nothing else; of many the log has the first, and each doubling."""
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        stack.store(blocks(8))
        stack.settle()
        stack.chain.tiers[0].forget(make_keys(8))
        disk = stack.chain.tiers[1]
        places = disk.files(disk.prepare_load(make_keys(8)))
        disk.complete_load(make_keys(8))
        for place in places:
            flip(Path(place.path), place.at + 5000)
        for key in make_keys(8):
            ticket = stack.chain.begin_load([key], "one", float("inf"), proves=proves)
            while not ticket.landed:
                stack.mover.wait(1)
                stack.chain.poll()
            bad = {key: Outcome.CORRUPT} if proves else {}
            stack.chain.end_load(ticket, bad)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 4, "of the first, second, fourth and eighth"
    where = f"{make_keys(1)[0].hex()}, {places[0].path} at {places[0].at}"
    for words in ("tier nvme", where, "kvtier verify --repair"):
        assert words in said[0]


def test_a_payload_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    with Stack.open(config(tmp_path), NAMESPACE) as stack, pytest.raises(ValueError, match="8192"):
        stack.store({make_keys(1)[0]: b"short"})


@pytest.mark.parametrize("size", [4, 41])
def test_a_key_that_no_record_can_name_is_refused(tmp_path: Path, size: int) -> None:
    """It would be taken, found by nobody, and count as damage."""
    key = BlockKey(bytes(size))
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        with pytest.raises(ValueError, match="block_key"):
            stack.store({key: bytes(NAMESPACE.payload_of(key))})
        assert stack.settle()
        assert [tier.stats().stored for tier in stack.chain.tiers] == [0, 0]
        asked: list[tuple[Any, type[Exception]]]
        asked = [([key], ValueError), (["key"], TypeError), (b"a key", TypeError)]
        for keys, error in asked:
            for ask in (stack.load, stack.lookup, stack.delete):
                with pytest.raises(error, match="key"):
                    ask(keys)
        with pytest.raises(TypeError, match="block_key"):
            assert asked[1][0][0] in stack


@pytest.mark.parametrize(
    ("block_hash", "group", "error"),
    [
        ("text", 0, TypeError),
        (bytearray(8), 0, TypeError),
        (b"", 0, ValueError),
        (bytes(37), 0, ValueError),
        (b"hash", -1, ValueError),
        (b"hash", 1024, ValueError),
    ],
)
def test_no_key_is_made_of_what_is_no_hash(
    block_hash: Any, group: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"hash|group"):
        block_key(block_hash, group)


def test_a_payload_that_cannot_be_copied_keeps_no_slot(tmp_path: Path) -> None:
    one, other, third = make_keys(3)
    numbers = memoryview(array("H", [7] * NAMESPACE.payload_of(other)))
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        with pytest.raises(ValueError, match="different structures"):
            stack.store({one: payload(one), other: numbers, third: payload(third)})
        assert stack.chain.tiers[0].stats().in_flight == 0
        assert stack.store(blocks(3)) == [other, third]
        assert stack.load([one, other, third]) == blocks(3)


def test_a_tier_too_small_for_one_block_is_found_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"\$\.tiers\[0\]\.capacity"):
        Stack.open(config(tmp_path, blocks=0), NAMESPACE)
    assert not (tmp_path / "nvme").exists()


def test_what_was_read_before_the_size_of_a_block_was_known_is_checked_again(
    tmp_path: Path,
) -> None:
    large = Namespace(facts=NAMESPACE.facts, group_bytes=(8 << 20,))
    read = load_config(config(tmp_path, blocks=1024))
    with pytest.raises(ConfigErrors, match=r"\$\.tiers\[1\]\.capacity"):
        Stack.open(read, large)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize("engine", ["model/replica-0", "../up", "two words", "line\n", "x" * 200])
def test_an_engine_whose_name_names_no_file_is_refused(tmp_path: Path, engine: str) -> None:
    """Its memory would lie in a folder where nobody looks for what dead engines left behind."""
    with pytest.raises(ConfigError, match="no part of a file's name"):
        Stack.open(config(tmp_path), NAMESPACE, engine=engine)
    assert list((tmp_path / "host").iterdir()) == []
    with Stack.open(config(tmp_path), NAMESPACE, engine=f"{'x' * 64}-dp15") as stack:
        assert stack.context.engine.endswith("-dp15")


def test_what_was_made_and_not_read_is_checked_like_a_file(tmp_path: Path) -> None:
    good = load_config(config(tmp_path))
    host, lower = good.tiers
    for tiers, place in [
        ((), r"\$\.tiers: a stack has 1 to 8"),
        ((lower,), r"\$\.tiers\[0\]\.kind: the first tier must be host memory"),
        ((host, lower, lower), r"\$\.tiers\[2\]\.path: \$\.tiers\[1\] uses"),
    ]:
        with pytest.raises(ConfigErrors, match=place):
            Stack.open(msgspec.structs.replace(good, tiers=tiers), NAMESPACE)
    with Stack.open(good, NAMESPACE) as stack:
        assert len(stack.store(blocks(2))) == 2


def test_a_tier_of_another_package_may_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr("kvtier.stack.kinds", lambda **_: ["cpu"])
    monkeypatch.setattr(NvmeTier, "tick", away)
    with Stack.open(config(tmp_path), NAMESPACE) as stack:
        assert stack.store(blocks(3)) == make_keys(3)
        assert stack.settle()
        assert stack.load(make_keys(3)) == blocks(3)
        assert stack.chain.chain_stats().down == [False, True]
