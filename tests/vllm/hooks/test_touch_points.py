"""The table of what is touched, beside the vLLM that is installed."""

from __future__ import annotations

import importlib

import pytest
import vllm

from kvtier.cli.serve import check_flags
from kvtier.vllm.hooks import versions
from kvtier.vllm.hooks.touch_points import TOUCH_POINTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


def test_all_of_it_is_there() -> None:
    found = versions.touch_points(vllm.__version__)
    assert [moved for each in found for moved in each.moved] == []
    assert versions.find().tested


def test_every_flag_of_the_server_is_known() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    older = vllm.__version__.startswith("0.32")
    home = "launchers" if older else "common"
    parsers = importlib.import_module(f"vllm.entrypoints.{home}.cli_args")
    actions = parsers.make_arg_parser(FlexibleArgumentParser())._actions
    flags = {each for action in actions for each in action.option_strings if each[:2] == "--"}
    assert "--max-model-len" in flags
    check_flags(sorted(flags), versions.known_flags())


def test_nothing_private_is_overridden_that_is_not_in_it() -> None:
    """Of the classes that ours derive from: by accident, say, in a version that has a new one."""
    from kvtier.vllm import KVTierConnector
    from kvtier.vllm.hooks.worker import FailureTolerantWorker, WorkerJobMetadata
    from kvtier.vllm.spec import KVTierSpec, VllmManager

    known = {name for each in TOUCH_POINTS for name in each.names}
    for ours in (
        *(KVTierConnector, KVTierSpec, VllmManager),
        *(WorkerJobMetadata, FailureTolerantWorker),
    ):
        theirs = {name for base in ours.__mro__[1:-1] for name in vars(base)}
        private = {each for each in vars(ours) if each.startswith("_") and each[1] != "_"}
        assert private & theirs <= known | {"_abc_impl"}, ours
