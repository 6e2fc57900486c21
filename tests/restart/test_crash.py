"""Writers killed at calls of the disk, at steps of the bytecode and at random instants."""

import os
import subprocess
import sys

import pytest


def crash(subject: str, kills: int, seed: int, engines: int = 1) -> str:
    """Run in a process of its own, because it forks; raises with what broke."""
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "campaign.crash", subject),
            *("--kills", str(kills), "--seed", str(seed), "--engines", str(engines)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("subject", ["support.tiers.subjects:CPU", "support.tiers.subjects:NVME"])
def test_a_few_deaths(subject: str) -> None:
    assert crash(subject, kills=12, seed=1).startswith("14 deaths")


@pytest.mark.slow
def test_a_medium_that_is_reached_without_a_disk_dies_too() -> None:
    said = crash("support.tiers.subjects:PLAIN_CPU", kills=4, seed=1)
    assert said.startswith("6 deaths (1 by call, 3 by step, 2 by time)")


def test_who_does_not_share_a_medium_is_not_blamed_for_it() -> None:
    with pytest.raises(AssertionError, match=r"subjects:MEMORY says that it is not shared"):
        crash("support.tiers.subjects:MEMORY", kills=4, seed=1, engines=3)


@pytest.mark.slow
def test_writers_of_a_store_die() -> None:
    said = crash("support.object.object_subjects:FOLDER", kills=100, seed=2)
    assert said.startswith("102 deaths")


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["support.tiers.subjects:CPU", "support.tiers.subjects:NVME"])
def test_hundreds_of_deaths(subject: str) -> None:
    assert crash(subject, kills=150, seed=2).startswith("152 deaths")


@pytest.mark.slow
def test_writers_that_share_a_store_die_together() -> None:
    assert crash("support.object.object_subjects:FOLDER", kills=30, seed=5, engines=2)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [2, 4])
def test_engines_that_share_a_folder_die_together(engines: int) -> None:
    assert crash("support.tiers.subjects:SLABS", kills=90, seed=engines, engines=engines)
