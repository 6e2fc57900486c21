"""What the processes of the shared-prefix test do: write, read and collect, until told to stop.

    python object_life.py FOLDER ROLE SEED

Writers store and load blocks whose bytes follow from their keys, and print a line of every commit.
The collector runs gc over and over. Each proves what it loads; a wrong byte ends it with a trace.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from object_subjects import FolderSubject

from kvtier.backends.object import BACKEND, ObjectSettings, gc, open_for
from kvtier.core.settings import ByteSize, Capacity, Duration
from kvtier.testing.records import make_keys
from kvtier.testing.subject import Rig
from kvtier.types import BlockKey

BLOCKS = 24
BATCH = 3
UNIVERSE = 200


class SharedFolder(FolderSubject):
    """A folder in which writers hear of each other quickly."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        return ObjectSettings(
            url=f"file://{folder}/store",
            capacity=Capacity(size=ByteSize(blocks * record_bytes)),
            refresh=Duration(0.05),
            audit=Duration(0.5),
            load_deadline=Duration(1.0),
        )


def write(folder: Path, seed: int) -> None:
    rig = Rig(SharedFolder(), folder, blocks=BLOCKS, engine=f"writer-{seed}")
    dice = random.Random(seed)
    universe = make_keys(UNIVERSE)
    while True:
        keys = dice.sample(universe, BATCH)
        committed = rig.put(keys)
        say("C", committed)
        rig.get(dice.sample(universe, 8))
        rig.tier.tick()
        rig.tier.flush()
        say("F", committed)
        time.sleep(0.005)


def collect(folder: Path) -> None:
    settings = SharedFolder().settings(folder, BLOCKS, 12288)
    store = open_for(settings)
    while True:
        found = gc.survey(store, settings.capacity.resolve(0), None, time.time())
        gc.collect(store, found)
        say("G", [])
        time.sleep(0.02)


def say(what: str, keys: list[BlockKey]) -> None:
    print(what, *[key.hex() for key in keys], flush=True)


if __name__ == "__main__":
    assert BACKEND.kind == "object"
    _, place, role, number = sys.argv
    if role == "collect":
        collect(Path(place))
    else:
        write(Path(place), int(number))
