"""Writers of one folder killed at steps of the bytecode and at random instants."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("kills", "seed", "engines"),
    [
        (12, 1, 1),
        *(pytest.param(*many, marks=pytest.mark.slow) for many in ((30, 1, 1), (200, 2, 1))),
        pytest.param(30, 5, 2, marks=pytest.mark.slow),
    ],
)
def test_what_was_committed_is_there(kills: int, seed: int, engines: int) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "kvtier.testing.crash_campaign", "object_subjects:FOLDER"),
            *("--kills", str(kills), "--seed", str(seed), "--engines", str(engines)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kills + 2} deaths")
