"""The machine stops at random moments of a life; what was not synced is lost, or there in part."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import campaign.power
from campaign.power.life import MEDIA, NOTES
from campaign.power.recording import Loss, Recording
from campaign.round import Round, Scenario
from kvtier.testing.crash_campaign import Books
from kvtier.testing.crash_processes import BLOCKS
from kvtier.testing.subject import Rig, make_keys

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
        [sys.executable, "-m", "campaign.power.life", medium, str(root), str(round.number)],
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
    books = Books()
    books.read([recording.said(cut)])
    keys = sorted(books.possible)
    when = f"{medium}: a crash at change {cut}, of the rest {loss.value} lost"
    round.counts["crashes"] += 1
    round.counts[f"crashes, {medium}"] += 1
    round.counts[f"crashes, lost: {loss.value}"] += 1
    try:
        with Closing(Rig(MEDIA[medium], root, blocks=BLOCKS)) as rig:
            served = set(rig.get(keys))
            lost = books.due - served
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
        held = len(lost) <= books.slack
        round.check(held, f"{when}: {len(lost)} of {len(books.due)} committed blocks are lost")
        round.counts["committed blocks due after a crash, durability: power"] += len(books.due)
    else:
        round.counts[f"committed blocks lost, as may be, {medium}"] += len(lost)
        round.counts[f"committed blocks, {medium}"] += len(books.due)


class Closing:
    """A rig that is closed whatever happens."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __enter__(self) -> Rig:
        return self._rig

    def __exit__(self, *_: object) -> None:
        self._rig.close()
