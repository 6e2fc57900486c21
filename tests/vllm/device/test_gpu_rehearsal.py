"""The GPU tests and the GPU benchmark, rehearsed on a CPU that plays CUDA.

In torch's environment, like all that needs torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).parents[3]

_SMALL = """
from support.device import pretend_cuda
import torch
from support.device.host_reads import HostDriver
from benchmarks.gpu import arena, beside, copies, disk, kernels, timeline
arena.LAYERS = beside.LAYERS = copies.LAYERS = disk.LAYERS = 4
arena.RECORD_BYTES, copies.TURN_BYTES = 128 << 10, 512 << 10
copies.PAGES, copies.IDENTITY_PAGES, copies.IDENTITY_RECORDS = [16 << 10, 64 << 10], 50, 4
beside.SIZE, beside.SIDE, beside.PRODUCTS = 512 << 10, 32, 4
beside.TURNS, beside.ROUNDS, beside.FEW_ROUNDS = 1, 2, 2
kernels.ROUNDS, kernels.BYTES_MAX, timeline.SIZE = 1, 1 << 20, 512 << 10
copies.SECONDS = copies.PART_SECONDS = 600.0  # processors may be busy here
disk.DISK_BYTES = 1 << 20
disk.probe = lambda folder: None
disk.KvikioDriver = lambda index: HostDriver(torch)
copies.main()
"""

_READY = """
from support.device import pretend_cuda
from pathlib import Path
from benchmarks.gpu import ready
ready.FOLDER, ready.SLOT_BYTES, ready.BESIDE_S = Path("{}"), 1 << 20, 0.1
ready._BUILD = "from support.device import pretend_cuda" + ready._BUILD
ready.main(8 << 20)
"""


def python(*arguments: str, **environment: str) -> str:
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_tests() -> None:
    quiet = (
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.device.pretend_cuda",
    )
    # The interpreter takes up to a minute for each test with staged pages that are large: one is
    # enough, and parts of several pieces are test_device_torch.py's.
    large = "staged and (1048576 or 262144 and not test_pages_out_and_back)"
    chosen = ("-k", f"not ({large})")
    said = python("-m", "pytest", "-q", *quiet, *chosen, "tests/gpu", PYTEST_ADDOPTS="")
    assert "passed" in said
    assert "skipped" not in said


def test_the_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    said = python("-c", _SMALL, JSON=str(file), FOLDER=str(tmp_path))
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())}
    wrong = [name for name in figures if name.startswith("wrong pages of")]
    assert [figures[name]["value"] for name in wrong] == [0]
    assert figures["bytes changed that should not have been"]["met"]
    assert figures["stores alone"]["value"] > 0
    assert figures["stores meanwhile"]["value"] > 0
    assert "one hop, of the sum of its halves" in figures
    assert figures["disk to GPU directly"]["value"] > 0
    assert "GPUDirect Storage: works here" in said
    assert figures["timeline of loads: copies to the device at once"]["value"] == 1
    assert (tmp_path / "figures.loads-beside-stores.json.gz").exists()


def test_what_a_start_waits_for(tmp_path: Path) -> None:
    said = python("-c", _READY.format(tmp_path)).splitlines()
    figures = [json.loads(line) for line in said if line.startswith("{")]
    assert [figure["what"] for figure in figures] == [
        *["taking fresh memory"] * 2,
        *["pinning", "giving back", "mapping memory that is there", "pinning", "giving back"],
        *["a step of 100 launches"] * 2,
        *["building and trying kernels"] * 2,
    ]
