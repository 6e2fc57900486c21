"""What the processes of the shared-prefix test do: write, read and collect, until told to stop.

    python tests/support/object/shared_prefix_process.py FOLDER ENDPOINT ROLE SEED

Writers store and load blocks whose bytes follow from their keys, and print a line of every commit.
The collector runs gc over and over. Each proves what it loads; a wrong byte ends it with a trace.
Without an endpoint ("-") they share a folder, else a bucket.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec

from kvtier.backends.object import BACKEND, ObjectSettings, ObjectTier, open_for
from kvtier.backends.object.inspection import garbage as gc
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import Duration, TierSettings
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, Rig, Subject, make_keys
from kvtier.types import BlockKey
from support.object.object_subjects import BucketSubject, FolderSubject

BLOCKS = 24
BATCH = 3
UNIVERSE = 200
RECORD = record_bytes(NAMESPACE.payload_bytes)


def lease_s(endpoint: str) -> float:
    """A server on a busy machine may need a second for one round; and in one without conditional
    puts who takes a place waits for two."""
    return 1.0 if endpoint == "-" else 5.0


def quick(settings: ObjectSettings) -> ObjectSettings:
    """The same, hearing of each other quickly."""
    return msgspec.structs.replace(
        settings,
        codec="none",
        refresh=Duration(0.05),
        audit=Duration(0.5),
        load_deadline=Duration(1.0),
    )


class SharedFolder(FolderSubject):
    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        return quick(super().settings(folder, blocks, record_bytes))

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> ObjectTier:
        assert isinstance(settings, ObjectSettings)
        return BACKEND.open_tier(settings, context, lease_s=lease_s("-"))


class SharedBucket(BucketSubject):
    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        return quick(super().settings(folder, blocks, record_bytes))

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> ObjectTier:
        assert isinstance(settings, ObjectSettings)
        return BACKEND.open_tier(settings, context, lease_s=lease_s(self.endpoint))


def subject_at(endpoint: str) -> SharedFolder | SharedBucket:
    return SharedFolder() if endpoint == "-" else SharedBucket(endpoint)


def write(subject: Subject, folder: Path, seed: int) -> None:
    rig = Rig(subject, folder, blocks=BLOCKS, engine=f"writer-{seed}")
    rng = random.Random(seed)
    universe = make_keys(UNIVERSE)
    while True:
        keys = rng.sample(universe, BATCH)
        committed = rig.put(keys)
        say("C", committed)
        rig.get(rng.sample(universe, 8))
        rig.tier.tick()
        rig.tier.flush()
        say("F", committed)
        time.sleep(0.005)


def collect(settings: ObjectSettings) -> None:
    store = open_for(settings)
    while True:
        found = gc.survey(store, settings.capacity.resolve(0), None, time.time())
        gc.collect(store, found)
        say("G", [])
        time.sleep(0.02)


def say(what: str, keys: list[BlockKey]) -> None:
    print(what, *[key.hex() for key in keys], flush=True)


if __name__ == "__main__":
    _, place, where, role, number = sys.argv
    life = subject_at(where)
    if role == "collect":
        collect(life.settings(Path(place), BLOCKS, RECORD))
    else:
        write(life, Path(place), int(number))
