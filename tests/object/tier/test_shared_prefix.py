"""Three writers on one prefix while a fourth process collects garbage: the caretaker is stopped for
longer than its lease, the next one is killed. All that lies there is counted from outside, all the
time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.object_servers import ServerProcess
from support.object.shared_prefix_process import BATCH, BLOCKS, RECORD, lease_s, subject_at

from kvtier.backends.object import writer_ids
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.lease import Lease
from kvtier.backends.object.manifests import ADDED
from kvtier.backends.object.object_names import parse_block
from kvtier.backends.object.settings import open_for
from kvtier.backends.object.stores.store import Store
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, Rig, make_keys

WRITERS = 3


running: list[Life] = []


@pytest.fixture(autouse=True)
def no_survivors() -> Iterator[None]:
    yield
    while running:
        running.pop().end()


class Life:
    """A process of this test's own, and what it said so far."""

    def __init__(self, folder: Path, endpoint: str, role: str, seed: int) -> None:
        self.role = role
        running.append(self)
        self.lines: list[str] = []
        self.heard = threading.Condition()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(
                    Path(__file__)
                    .parents[2]
                    .joinpath("support", "object", "shared_prefix_process.py")
                ),
                str(folder),
                endpoint,
                role,
                str(seed),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.heard:
                self.lines.append(line)
                self.heard.notify_all()
        with self.heard:
            self.heard.notify_all()

    def wait_for(self, count: int) -> None:
        """Until it has said so many lines (or is dead, which the caller finds out)."""
        with self.heard:
            heard = self.heard.wait_for(
                lambda: len(self.lines) >= count or self.process.poll() is not None, timeout=120
            )
        assert self.process.poll() is None, self.end()
        assert heard, f"{self.role} says nothing any more"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # its threads stop one by one

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Kill it; what it had to complain about."""
        if self.process.stderr is None or self.process.stderr.closed:
            return ""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        complaint = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return complaint


def caretaker_among(writers: list[Life], store: Store) -> Life:
    """The process that keeps the budget now."""
    lease = Lease(store, writer_ids.process_writer_id(), 1.0)
    while lease.look() is None or lease.holder is None:
        time.sleep(0.01)
    pid = int(lease.holder.server[8:16], 16)
    return next(life for life in writers if life.process.pid == pid)


class Scale:
    """Weighs a prefix over and over, in a thread of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._over = threading.Event()
        self.most = 0
        self.weighed = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        before: dict[tuple[str, float], int] = {}
        while not self._over.is_set():
            now = sizes(self._store)
            # what both listings show was there, all of it at once, when the first one ended
            self.most = max(self.most, sum(now[one] for one in now.keys() & before.keys()))
            self.weighed += 1
            before = now

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def sizes(store: Store) -> dict[tuple[str, float], int]:
    """By name and time: a block may be deleted and stored again between two listings."""
    return {(i.name, i.modified_s): i.size for i in store.list() if parse_block(i.name)}


@pytest.fixture(
    params=[
        "folder",
        pytest.param("rclone", marks=[pytest.mark.s3, pytest.mark.slow]),
        pytest.param("moto", marks=pytest.mark.slow),
        pytest.param("azurite", marks=[pytest.mark.s3, pytest.mark.slow]),
    ]
)
def endpoint(request: pytest.FixtureRequest) -> str:
    if request.param == "folder":
        return "-"
    server: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    return server.endpoint


def test_three_writers_a_collector_a_pause_and_a_death(tmp_path: Path, endpoint: str) -> None:
    three_writers(tmp_path, endpoint, seed=1, rounds=32)


@pytest.mark.slow
def test_three_writers_for_longer(tmp_path: Path) -> None:
    """Servers only answer more slowly than a folder."""
    three_writers(tmp_path, "-", seed=2, rounds=80)


def three_writers(tmp_path: Path, endpoint: str, seed: int, rounds: int) -> None:
    """They store, one sleeps for a while, another is killed, and a collector runs beside them."""
    rng = random.Random(seed)
    subject = subject_at(endpoint)
    first = Rig(subject, tmp_path, blocks=BLOCKS)  # makes the place before they start
    first.close()
    store = open_for(first.settings)
    scale = Scale(store)
    writers = [Life(tmp_path, endpoint, "write", number) for number in range(WRITERS)]
    collector = Life(tmp_path, endpoint, "collect", 0)
    sleeper = rng.choice(writers)
    for turn in range(1, rounds + 1):
        for writer in writers:
            if writer is not sleeper or not rounds // 4 < turn <= rounds // 2:
                writer.wait_for(turn)
        if turn == rounds // 4:
            sleeper = caretaker_among(writers, store)
            sleeper.stop()
            asleep = time.monotonic()
        elif turn == rounds // 2:
            while time.monotonic() < asleep + 3 * lease_s(
                endpoint
            ):  # by then others count it as dead
                collector.wait_for(len(collector.lines) + 1)
            while caretaker_among(writers, store) is sleeper:  # until another has taken over
                collector.wait_for(len(collector.lines) + 1)
            sleeper.go_on()
        elif turn == 3 * rounds // 4:
            victim = caretaker_among(writers, store)
            writers.remove(victim)
            assert "Error" not in victim.end()
    collector.wait_for(2)
    for life in [*writers, collector]:
        assert "Traceback" not in life.end(), life.role
    scale.end()
    assert scale.weighed > rounds
    # `-rP` shows it
    print(f"peak: {scale.most / RECORD:.1f} of {BLOCKS} blocks, weighed {scale.weighed} times")
    # The caretaker shares out what is free beside all that is recorded, and all that may be stored
    # by earlier shares. A writer that is killed or stopped may have stored what no share covers
    # any more. Each records a batch before it begins the next, so that is a batch at most.
    assert scale.most <= (BLOCKS + WRITERS * BATCH) * RECORD
    assert scale.most > BLOCKS * RECORD // 2, "the budget is used"

    # nothing that is there is unknown to the manifests of those who said that it is written down
    rig = Rig(subject, tmp_path, blocks=BLOCKS)
    rig.settle()
    resident = rig.resident(make_keys(200))
    assert rig.get(resident) == resident
    assert resident
    entries = Journal(store, NAMESPACE.id).read_all()
    stated = set(keys_of(entries[entries["kind"] == ADDED]))
    survivors_said = {
        key for life in writers for line in life.lines if line[0] == "F" for key in line.split()[1:]
    }
    unknown = [key for key in resident if key not in stated and key.hex() in survivors_said]
    assert unknown == []
    rig.close()
    assert sum(sizes(store).values()) <= BLOCKS * RECORD
    store.close()
