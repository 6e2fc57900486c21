"""The machine stops at random moments of a life; what was not synced is lost, or there in part.

The life that is recorded, preloaded: `python -m campaign.scenarios.power MEDIUM FOLDER SEED`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
from support.object import object_subjects
from support.tiers import subjects

import campaign.power
from campaign.crash import BLOCKS, Ledger, Moment, Writer
from campaign.power.recording import Loss, Recording
from campaign.round import Round, Scenario
from kvtier.backends.nvme import NvmeSettings
from kvtier.settings import Durability
from kvtier.testing.subject import Rig, Subject, make_keys

NOTES = "notes"


class PowerSafe(subjects.NvmeSubject):
    """A folder whose committed blocks survive a loss of power."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        return _power_safe(super().settings(folder, blocks, record_bytes))


class PowerSafeSlabs(subjects.SlabsSubject):
    """The same in several slabs."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        return _power_safe(super().settings(folder, blocks, record_bytes))


def _power_safe(settings: NvmeSettings) -> NvmeSettings:
    return msgspec.structs.replace(settings, durability=Durability.POWER)


MEDIA: dict[str, Subject] = {
    "nvme, power": PowerSafe(),
    "nvme slabs, power": PowerSafeSlabs(),
    "nvme, process": subjects.NVME,
    "object folder": object_subjects.FOLDER,
}


def main() -> None:
    """Store, load and drop, and report each deed into a file that is recorded like the others."""
    medium, folder, seed = sys.argv[1:]
    notes = os.open(f"{folder}/{NOTES}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(text: str) -> None:
        os.write(notes, f"{text}\n".encode())

    Writer(MEDIA[medium], Path(folder), say, int(seed)).live(Moment("call", -1))


_CRASHES = 60
_SOURCE = Path(campaign.power.__file__).with_name("recorder.c")


class Power(Scenario):
    name = "power"
    about = (
        "All changes of a life to its files are recorded in order (LD_PRELOAD). From the record "
        "come the states that a machine's crash at any moment may leave: of what was not synced "
        "all, nothing, a beginning, some pages or some sectors. None of them has a wrong block; "
        "with `durability: power` every committed block is there; every one of them can be used."
    )
    share = 2.0

    def play(self, round: Round) -> None:
        if not shutil.which("cc"):
            round.counts["no C compiler here, to record with"] += 1
            return
        medium = list(MEDIA)[round.number % len(MEDIA)]
        recording = _record(round, medium)
        for _ in range(_CRASHES):
            cut = round.dice.randrange(len(recording.ops) + 1)
            loss = round.dice.choice(list(Loss))
            _crash(round, medium, recording, cut, loss)
        round.counts["changes recorded"] += len(recording.ops)
        round.counts["syncs recorded"] += recording.syncs


def _record(round: Round, medium: str) -> Recording:
    shim, log, root = (round.folder / name for name in ("recorder.so", "log", "root"))
    root.mkdir()
    build = ["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(_SOURCE)]
    subprocess.run(build, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "campaign.scenarios.power", medium, str(root), str(round.number)],
        env=os.environ
        | {"LD_PRELOAD": str(shim), "POWER_ROOT": str(root), "POWER_LOG": str(log)}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the life to record ended with {done.returncode}: {done.stderr}")
    recording = Recording(log, root, NOTES)
    shutil.rmtree(root)
    return recording


def _crash(round: Round, medium: str, recording: Recording, cut: int, loss: Loss) -> None:
    root = round.folder / "root"
    root.mkdir()
    recording.crash(cut, loss, round.dice).write(root)
    ledger = Ledger()
    ledger.read([recording.said(cut)])
    keys = sorted(ledger.possible)
    when = f"{medium}: a crash at change {cut}, of the rest {loss.value} lost"
    round.counts["crashes"] += 1
    round.counts[f"crashes, {medium}"] += 1
    round.counts[f"crashes, lost: {loss.value}"] += 1
    try:
        with closing(Rig(MEDIA[medium], root, blocks=BLOCKS)) as rig:
            served = set(rig.get(keys))
            lost = ledger.due - served
            new = make_keys(2, start=10**14)
            round.check(rig.put(new) == new, f"{when}: nothing can be stored")
            rig.check_room()
    except AssertionError as wrong:
        round.found(f"{when}: {wrong}")
        return
    finally:
        shutil.rmtree(root)
    round.counts["blocks proved after a crash"] += len(served)
    if medium.endswith("power"):
        held = len(lost) <= ledger.slack
        round.check(held, f"{when}: {len(lost)} of {len(ledger.due)} committed blocks are lost")
        round.counts["committed blocks due after a crash, durability: power"] += len(ledger.due)
    else:
        round.counts[f"committed blocks lost, as may be, {medium}"] += len(lost)
        round.counts[f"committed blocks, {medium}"] += len(ledger.due)


if __name__ == "__main__":
    main()
