"""The mover's process keeps the contract of every mover, whatever happens to either process."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.movers.contract import HOST, NEAR, SOON, MoverContract, MoverRig
from support.movers.media import MediumSettings
from support.processes.mover_processes import alive, await_restart, pid_of, until

from kvtier import Stack
from kvtier.backends.cpu import CpuSpec, CpuTier
from kvtier.errors import MoverError
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Mover, TransferKind, TransferResult
from kvtier.move import process as process
from kvtier.move import process as process_connection
from kvtier.move.process import ProcessMover
from kvtier.move.protocol import Hello, TierOpening, frame
from kvtier.slab import layout
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Outcome

pytestmark = pytest.mark.usefixtures("installed")


class TestProcessMover(MoverContract):
    def open_mover(self, tiers: Sequence[MediumSettings], context: TierContext) -> Mover:
        return ProcessMover(
            tiers, context, staging_bytes=1 << 16, start_seconds=SOON, grace_seconds=SOON
        )

    def test_only_its_listener_stands_back(self, rig: MoverRig) -> None:
        """The kernel lets it interrupt nobody; the threads that move bytes are like all others."""
        rig.fill(NEAR, range(4))
        assert rig.outcomes(rig.load(range(4))) == [Outcome.OK] * 4
        pid = pid_of(rig.mover)
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        batch = [each for each in threads if os.sched_getscheduler(each) == os.SCHED_BATCH]
        assert batch == [pid]
        assert len(threads) > 1

    def test_what_cannot_be_handed_on_takes_no_room(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig.fill(NEAR, range(4))
        transfer = rig.transfer(TransferKind.LOAD, NEAR, HOST, range(4))
        with monkeypatch.context() as full:
            full.setattr(process_connection.MoverConnection, "send", lambda *_: False)
            assert not rig.mover.submit(transfer)
        assert rig.mover.stats().in_flight_blocks == 0
        assert rig.outcomes(rig.submit(transfer)) == [Outcome.OK] * 4

    # ---- the death of the mover's process

    def test_a_killed_process_drops_what_it_had_and_is_started_again(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(8))
        rig.media[NEAR].hold(range(8))
        moving, waiting = rig.load(range(4)), rig.load(range(4, 8))
        rig.media[NEAR].next_call()
        killed = pid_of(rig.mover)
        os.kill(killed, signal.SIGKILL)
        results = rig.results(moving, waiting)
        assert [result.outcomes for result in results] == [[Outcome.DROPPED] * 4] * 2
        rig.media[NEAR].release()
        assert await_restart(rig.mover, killed) != killed
        assert rig.outcomes(rig.load(range(8))) == [Outcome.OK] * 8
        stats = rig.mover.stats()
        assert (stats.restarts, stats.in_flight_blocks) == (1, 0)

    def test_a_mistake_of_the_supervisor_ends_what_is_in_flight(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one that starts no process for a while: nobody waits for a thread that is dead."""
        rig.fill(NEAR, range(4))
        rig.media[NEAR].hold([0])
        load, killed = rig.load([0]), pid_of(rig.mover)
        rig.media[NEAR].next_call()
        with monkeypatch.context() as patch:
            patch.setattr(process_connection.MoverConnection, "watch", mistaken)
            assert rig.outcomes(load) == [Outcome.DROPPED]
            assert not alive(killed)
            until(lambda: rig.mover.lost)
            assert rig.mover.down
        rig.media[NEAR].release()
        await_restart(rig.mover, killed)
        assert rig.outcomes(rig.load(range(4))) == [Outcome.OK] * 4

    def test_a_result_sent_before_the_death_counts(self, rig: MoverRig) -> None:
        rig.fill(NEAR, range(4))
        load = rig.load(range(4))
        assert rig.mover.wait(SOON)  # sent, and not read yet
        os.kill(pid_of(rig.mover), signal.SIGKILL)
        assert rig.outcomes(load) == [Outcome.OK] * 4

    def test_a_death_without_results_wakes_nobody_for_ever(self, rig: MoverRig) -> None:
        killed = pid_of(rig.mover)
        os.kill(killed, signal.SIGKILL)
        await_restart(rig.mover, killed)
        assert not rig.mover.wait(0.0)

    @pytest.mark.slow
    @pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hanging"])
    def test_a_process_that_does_not_answer_is_dead_before_its_transfers_time_out(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch, stopped: bool
    ) -> None:
        rig.media[NEAR].hold([0])
        pid = pid_of(rig.mover)
        late = rig.load([0])
        other = rig.load([1, 2], seconds=10 * SOON)
        rig.media[NEAR].next_call()
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3 * SOON)
        monkeypatch.setattr(process, "time", later)
        results: dict[int, TransferResult] = {}
        while late not in results:
            rig.mover.wait(SOON)
            results |= {result.id: result for result in rig.mover.poll()}
            assert late not in results or not alive(pid)
        assert results[late].outcomes == [Outcome.TIMEOUT]
        assert results[late].busy_seconds > SOON, "it would have taken that long at least"
        assert results[other].outcomes in ([Outcome.DROPPED] * 2, [Outcome.CORRUPT] * 2)
        assert results[other].busy_seconds < SOON, "nobody knows how long it would have taken"
        await_restart(rig.mover, pid)

    def test_a_store_has_the_time_that_its_handler_states(self, rig: MoverRig) -> None:
        """Who is only slow must not be killed."""
        rig.media[NEAR].hold([0, 1])
        mover, later = process_mover(rig), time.monotonic() + 3 * SOON
        store = rig.store([0])
        assert not mover._overdue(later)
        load = rig.load([1])
        assert mover._overdue(later)
        rig.media[NEAR].release()
        rig.results(store, load)

    def test_a_mover_without_a_process_refuses(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "BACKOFF_SECONDS", SOON)
        killed = pid_of(rig.mover)
        os.kill(killed, signal.SIGKILL)
        until(lambda: process_mover(rig).pid is None)
        assert not rig.mover.submit(rig.transfer(TransferKind.LOAD, NEAR, HOST, [0]))
        assert not rig.mover.submit(rig.transfer(TransferKind.STORE, HOST, NEAR, [0]))

    def test_submitting_to_a_stopped_process_never_blocks_and_is_bounded(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process_connection, "OUTGOING_BYTES_MAX", 1 << 16)
        pid = pid_of(rig.mover)
        os.kill(pid, signal.SIGSTOP)
        accepted = []
        while rig.mover.submit(transfer := rig.transfer(TransferKind.LOAD, NEAR, HOST, [])):
            accepted.append(transfer.id)
        assert len(accepted) > 100
        os.kill(pid, signal.SIGCONT)
        assert {tuple(result.outcomes) for result in rig.results(*accepted)} == {()}

    def test_close_does_not_wait_for_a_process_that_hangs(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "CLOSE_SECONDS", 0.1)
        rig.media[NEAR].hold([0])
        load = rig.load([0])
        rig.media[NEAR].next_call()
        pid = pid_of(rig.mover)
        rig.mover.close()
        assert not alive(pid)
        assert rig.outcomes(load) == [Outcome.CANCELLED]

    def test_a_closed_mover_leaves_nothing(self, rig: MoverRig) -> None:
        before, threads = open_files(), set(threading.enumerate())
        for _ in range(2):
            mover = self.open_mover(rig.tiers, rig.context)
            pid = pid_of(mover)
            mover.close()
            assert not alive(pid)
        assert open_files() == before
        assert set(threading.enumerate()) <= threads

    @pytest.mark.slow
    def test_fifty_restarts_leak_nothing(
        self, rig: MoverRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "BACKOFF_SECONDS_MAX", 0.0)
        rig.fill(NEAR, range(4))
        before, threads = open_files(), set(threading.enumerate())
        pid = pid_of(rig.mover)
        for _ in range(50):
            load = rig.load(range(4))
            os.kill(pid, signal.SIGKILL)
            assert rig.outcomes(load) in ([Outcome.OK] * 4, [Outcome.DROPPED] * 4)
            pid = await_restart(rig.mover, pid)
        assert rig.outcomes(rig.load(range(4))) == [Outcome.OK] * 4
        assert rig.mover.stats().restarts == 50
        assert open_files() == before
        assert set(threading.enumerate()) <= threads


# ---- the death of the parent

PARENT = """
import os, sys, time
from kvtier import Stack
from kvtier.backends.cpu import CpuSpec, CpuTier
from kvtier.interfaces.backend import TierContext
from kvtier.slab import layout
from kvtier.move.process import ProcessMover
from support.movers.contract import HOST, NEAR, MoverRig
from pathlib import Path

rig = MoverRig(Path(sys.argv[1]))
rig.mover = ProcessMover(rig.tiers, rig.context)
rig.media[NEAR].hold([0])
rig.load([0])
rig.media[NEAR].next_call()
# A fork keeps a copy of every descriptor, the mover's socket and the held gate included.
if (child := os.fork()) == 0:
    time.sleep(600)
print(rig.mover.pid, child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hanging"])
def test_the_process_dies_with_its_parent(tmp_path: Path, stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        mover, child = (int(word) for word in parent.stdout.readline().split())
        death = os.pidfd_open(mover)
        try:
            if stopped:
                os.kill(mover, signal.SIGSTOP)
            parent.kill()
            assert select.select([death], [], [], SOON)[0], "the mover outlived its parent"
        finally:
            os.close(death)
            os.kill(child, signal.SIGKILL)


def test_a_parent_that_dies_before_it_has_read_all_is_no_mistake(media: MoverRig) -> None:
    ours, theirs = socket.socketpair()
    words = [
        sys.executable,
        "-m",
        "kvtier.move.process_main",
        str(theirs.fileno()),
        str(os.getpid()),
    ]
    with theirs:
        process = subprocess.Popen(
            words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
    tiers = [TierOpening.of(tier) for tier in media.tiers]
    ours.sendall(frame(Hello(media.context, tiers, 1 << 16, logging.WARNING)))
    assert select.select([ours], [], [], SOON)[0], "it does not say that it is ready"
    ours.close()
    assert process.communicate(timeout=SOON)[1] == ""
    assert process.returncode == 0


def test_ctrl_c_in_the_terminal_is_not_for_the_mover(media: MoverRig) -> None:
    media.mover = ProcessMover(media.tiers, media.context, start_seconds=SOON)
    assert os.getpgid(pid_of(media.mover)) != os.getpgid(0)
    media.mover.close()


# ---- starts that fail


def test_media_that_cannot_be_opened_are_one_clear_error(media: MoverRig) -> None:
    media.media[NEAR].path.unlink()
    with pytest.raises(MoverError, match=r"cannot open its tiers: .*tier1"):
        ProcessMover(media.tiers, media.context)


def test_a_process_that_does_not_start_in_time_is_one_clear_error(
    media: MoverRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    before = open_files()
    with pytest.raises(MoverError, match=r"within 0\.01 s"):
        ProcessMover(media.tiers, media.context, start_seconds=0.01)
    assert open_files() == before


def test_a_process_that_ends_at_once_is_one_clear_error(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MoverError, match="ended at its start with status 1"):
        ProcessMover(media.tiers, media.context)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(MoverError, match="cannot be started"):
        ProcessMover(media.tiers, media.context)


def test_whatever_is_raised_at_the_start_is_one_clear_error(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_connection.MoverConnection, "start", mistaken)
    before = open_files()
    with pytest.raises(MoverError, match="cannot be started; the log says why"):
        ProcessMover(media.tiers, media.context)
    assert open_files() == before


def test_nobody_waits_for_a_start_for_ever(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system itself may hang: at a disk with Python's own files, say."""
    for bound in ("START_GRACE_SECONDS", "END_SECONDS", "CLOSE_SECONDS", "CLOSED_END_SECONDS"):
        monkeypatch.setattr(process, bound, 0.0)
    go, spawn = threading.Event(), process_connection.MoverConnection._spawn
    slow = staticmethod(lambda end: spawn(end) if go.wait(SOON) else None)
    monkeypatch.setattr(process_connection.MoverConnection, "_spawn", slow)
    threads = set(threading.enumerate())
    with pytest.raises(MoverError, match=r"did not start within 0\.01 s"):
        ProcessMover(media.tiers, media.context, start_seconds=0.01)
    (supervisor,) = set(threading.enumerate()) - threads
    go.set()
    supervisor.join(SOON)
    assert not supervisor.is_alive()


def test_a_process_out_of_descriptors_is_one_clear_error(
    media: MoverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("kvtier.move.process.socket.socketpair", exhausted)
    with pytest.raises(MoverError, match="Too many open files"):
        ProcessMover(media.tiers, media.context)


def test_a_mover_is_started_again_in_a_process_with_thousands_of_files(
    media: MoverRig, many_files: None
) -> None:
    """`select` knows no descriptor beyond 1023."""
    with contextlib.closing(ProcessMover(media.tiers, media.context)) as mover:
        killed = pid_of(mover)
        os.kill(killed, signal.SIGKILL)
        assert await_restart(mover, killed) != killed


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many are open that all further descriptors are large."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1024):
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- small words


def mistaken(*_: object, **__: object) -> None:
    raise struct.error("unpack requires a buffer of 4 bytes")


def open_files() -> int:
    gc.collect()  # what tests before this one have left has files, too
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def process_mover(rig: MoverRig) -> ProcessMover:
    assert isinstance(rig.mover, ProcessMover)
    return rig.mover


def test_who_watches_slots_is_told_of_the_death(tmp_path: Path) -> None:
    """Workers look at the slots of a load, not at its mover: they do not wait for its deadline."""
    (tmp_path / "host").mkdir()
    tiers = [
        {"kind": "cpu", "path": str(tmp_path / "host"), "capacity": "4MiB"},
        {"kind": "nvme", "path": str(tmp_path / "disk"), "capacity": "16MiB", "free_floor": 0},
    ]
    stack_of = {"version": 1, "name": "unit", "mover": {"mode": "process"}, "tiers": tiers}
    keys = make_keys(8)
    with Stack.open(stack_of, NAMESPACE) as stack:
        stack.store({key: payload(key) for key in keys})
        assert stack.settle()
        stack.chain.tiers[0].clear()
        mover, host = stack.mover, stack.chain.tiers[0]
        assert isinstance(mover, ProcessMover)
        assert isinstance(host, CpuTier)
        killed = pid_of(mover)
        os.kill(killed, signal.SIGSTOP)
        ticket = stack.chain.begin_load(keys, "request", float("inf"))
        assert isinstance(ticket.spec, CpuSpec)
        assert states(host, ticket.spec.slots) == {layout.RESERVED}
        os.kill(killed, signal.SIGKILL)
        while not ticket.landed:
            mover.wait(SOON)
            stack.chain.poll()
        assert states(host, ticket.spec.slots) == {layout.FAILED}
        stack.chain.end_load(ticket, {})
        assert states(host, ticket.spec.slots) == {layout.FREE}


def states(host: CpuTier, slots: Sequence[int]) -> set[int]:
    return {host.region.state(slot) for slot in slots}
