"""Three writers on one prefix while a fourth process collects garbage, one killed at random."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from object_life import BATCH, BLOCKS, SharedFolder

from kvtier.backends.object.files import FileStore
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifest import ADDED, keys_of
from kvtier.backends.object.names import parse_block
from kvtier.testing.records import NAMESPACE, make_keys
from kvtier.testing.subject import Rig

RECORD = 12288
WRITERS = 3
ROUNDS = 40


class Life:
    """A process of this test's own, and what it said so far."""

    def __init__(self, folder: Path, role: str, seed: int) -> None:
        self.role = role
        self.lines: list[str] = []
        self.heard = threading.Condition()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("object_life.py")),
                str(folder),
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
            self.heard.wait_for(
                lambda: len(self.lines) >= count or self.process.poll() is not None, timeout=120
            )
        assert self.process.poll() is None, self.end()

    def end(self) -> str:
        """Kill it; what it had to complain about."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        complaint = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return complaint


def block_bytes(folder: Path) -> int:
    store = FileStore(folder / "store")
    return sum(info.size for info in store.list() if parse_block(info.name))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_three_writers_a_collector_and_a_death(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    first = Rig(SharedFolder(), tmp_path, blocks=BLOCKS)  # makes the place before they start
    first.close()
    writers = [Life(tmp_path, "write", number) for number in range(WRITERS)]
    collector = Life(tmp_path, "collect", 0)
    # beside the budget: a batch of each writer on its way, before it has heard of the others, and
    # what the others wrote since this process looked
    limit = BLOCKS * RECORD + WRITERS * (BLOCKS // 2 + BATCH) * RECORD
    most = 0
    for turn in range(1, ROUNDS + 1):
        for writer in writers:
            writer.wait_for(turn)
        most = max(most, block_bytes(tmp_path))
        if turn == ROUNDS // 2:
            victim = writers.pop(dice.randrange(len(writers)))
            assert "Error" not in victim.end()
    collector.wait_for(2)
    for life in [*writers, collector]:
        assert "Traceback" not in life.end(), life.role
    assert most <= limit

    # nothing that is there is unknown to the manifests of those who said that it is written down
    rig = Rig(SharedFolder(), tmp_path, blocks=BLOCKS)
    rig.settle()
    resident = rig.resident(make_keys(200))
    assert rig.get(resident) == resident
    assert resident
    end = time.monotonic() + 60
    while block_bytes(tmp_path) > BLOCKS * RECORD:
        # what the dead were about to delete may still be read by others for a moment
        assert time.monotonic() < end, "the budget is never reached"
        rig.settle()
    entries = Journal(FileStore(tmp_path / "store"), NAMESPACE).everything()
    stated = set(keys_of(entries[entries["kind"] == ADDED]))
    survivors_said = {
        key for life in writers for line in life.lines if line[0] == "F" for key in line.split()[1:]
    }
    unknown = [key for key in resident if key not in stated and key.hex() in survivors_said]
    assert unknown == []
    rig.close()
