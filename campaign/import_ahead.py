"""Imports beforehand what rounds would import late: a child that is forked then need not.

A life that is killed after a few hundredths of a second cost more in imports (of eviction policies,
the parts of a tier, commands) than in all that it did.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from campaign.children import Child, Say
from campaign.scenarios.commands import COMMANDS
from campaign.stacks import described, payloads
from kvtier import Stack
from kvtier.cli import app
from kvtier.testing.subject import NAMESPACE, make_keys

_BLOCKS = 8


def import_ahead(work: Callable[[], None]) -> None:
    """Import what `work` does, which runs in a child: its threads and its files stay there."""

    def tell(say: Say) -> None:
        work()
        say(f"imported {' '.join(sys.modules)}")

    child = Child(tell)
    child.wait()
    if child.told("raised"):
        raise RuntimeError(f"the first life of a campaign fails: {child.told('raised')}")
    for line in child.told("imported"):
        for name in line.split():
            with suppress(ImportError):  # some are made by others' imports, and have no file
                importlib.import_module(name)
    gc.freeze()  # else the first collection of each child copies the pages of all these


def whole_life() -> None:
    """What engines, movers and commands of a campaign do, once and briefly."""
    with tempfile.TemporaryDirectory(prefix="kvtier-campaign-") as name:
        folder = Path(name)
        config = described(folder, blocks=4 * _BLOCKS)
        keys = make_keys(_BLOCKS)
        for mode in ("process", "threads"):
            with Stack.open(config | {"mover": {"mode": mode}}, NAMESPACE) as stack:
                stack.store(payloads(keys))
                stack.settle()
                stack.load(keys)
        path = folder / "stack.yaml"
        path.write_text(yaml.safe_dump(config))
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        for text in COMMANDS.values():
            words = text.format(backup=f"file://{folder}/backup")
            app.run([*words.split(), "-c", str(path)])
