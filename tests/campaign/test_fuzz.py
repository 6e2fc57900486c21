"""The fuzzers run, repeat themselves by seed, and see what no parser may do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from campaign.fuzz.__main__ import fuzz
from campaign.fuzz.harness import Bounds, Mutator, Target


@pytest.mark.slow
def test_no_parser_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "campaign.fuzz", "--inputs", "4000", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_inputs_come_again_by_their_seed() -> None:
    one, two, other = (Mutator([b"corpus", b"other"], [b"word"], seed) for seed in "aab")
    some = [one.next() for _ in range(50)]
    assert some == [two.next() for _ in range(50)]
    assert some != [other.next() for _ in range(50)]


def large(data: bytes) -> None:
    bytearray(200 << 20)[::4096] = b"x" * (200 << 8)


def outside(data: bytes) -> None:
    list(Path("/").iterdir())


def slow(data: bytes) -> None:
    end = time.thread_time() + 1.1
    while time.thread_time() < end:
        pass


def untyped(data: bytes) -> None:
    raise KeyError(data)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (large, "MiB"),
        (outside, "it touched"),
        pytest.param(slow, "it took", marks=pytest.mark.slow),
        (untyped, "KeyError"),
    ],
)
def test_what_no_input_may_do_is_seen(
    tmp_path: Path, what: Callable[[bytes], None], said: str
) -> None:
    def parse(data: bytes) -> None:
        if data != b"good":
            what(data)

    target = Target(name="bad", corpus=[b"good"], parse=parse, typed=(ValueError,))
    _, _, findings = fuzz(target, Bounds(tmp_path), 4, seed=1)
    assert said in findings[0]
