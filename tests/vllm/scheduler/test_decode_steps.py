"""What kvtier does in a step in which nothing comes or goes does not grow with the requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engines.engine
import pytest

from kvtier.testing.subject import make_memory_folder

STUB = Path(engines.engine.__file__).with_name("stub.py")
CALLS_MAX = 80
"""Python functions in all 14 hooks of a step in which there is nothing to do, vLLM's with them."""
MORE = {"0.33": 2}
"""So many more does a version of vLLM have."""
Calls = dict[str, dict[str, list[dict[str, int]]]]


@pytest.fixture(scope="module")
def calls(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """By the number of requests, and whether what is decoded is stored."""
    region = make_memory_folder()
    command = [sys.executable, str(STUB), str(model("llama")), str(tmp_path_factory.mktemp("step"))]
    done = subprocess.run([*command, str(region)], capture_output=True, text=True, check=False)
    shutil.rmtree(region)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def least(steps: list[dict[str, int]]) -> dict[str, int]:
    """Those of the step with the fewest: now and then one looks for the keepers' news, too."""
    return min(steps, key=lambda step: sum(step.values()))


@pytest.mark.parametrize("decoded", [False, True])
def test_a_step_of_many_that_decode_calls_no_more_than_one_of_few(
    calls: Calls, decoded: bool
) -> None:
    few, many = (least(calls[f"{requests} {decoded}"]["false"]) for requests in (4, 64))
    assert few == many
    version = pytest.importorskip("vllm").__version__
    assert 0 < sum(many.values()) <= CALLS_MAX + MORE.get(version[:4], 0), many


def test_nor_does_one_in_which_all_get_a_block_for_what_is_not_stored(calls: Calls) -> None:
    quiet, crossing = (least(calls["64 False"][crossed]) for crossed in ("false", "true"))
    assert crossing == quiet


def test_blocks_of_what_is_decoded_are_noted_in_one_pass(calls: Calls) -> None:
    quiet, crossing = (least(calls["64 True"][crossed]) for crossed in ("false", "true"))
    noted = crossing.pop("RequestOffloadState.update_block_id_groups")  # vLLM's, once a request
    assert noted <= 64
    assert sum(crossing.values()) <= sum(quiet.values()) + 1, crossing
