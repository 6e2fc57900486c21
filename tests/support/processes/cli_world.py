"""How tests call the command line, and the stacks and processes that it meets."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import Stack
from kvtier.cli import app
from kvtier.interfaces import backend as door
from kvtier.slab import layout
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Namespace
from support.processes.forked_commands import ForkServer

KVTIER = Path(sys.executable).with_name("kvtier")

STACK = """\
version: 1
name: cli
tiers:
  - {{kind: cpu, path: "{host}", capacity: 4MiB}}
  - {{kind: nvme, path: "{blocks}", capacity: 16MiB, free_floor: 0}}
"""

KINDS = ("nvme", "folder")
"""Kinds of a second tier: a built-in one, and that of examples/custom_tier."""
every_kind = pytest.mark.parametrize("second_tier", KINDS)
EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_tier"


def stack_text(host: Path, blocks: Path, kind: str = "nvme") -> str:
    """A stack of host memory and a tier of this kind."""
    text = STACK.format(host=host, blocks=blocks)
    return text if kind == "nvme" else text.replace("nvme", kind).replace(", free_floor: 0", "")


def with_store(stack: Path, where: Path | str) -> Path:
    """The same stack file with a third tier: a store in a folder, or of these settings."""
    settings = f'url: "{where.as_uri()}"' if isinstance(where, Path) else where
    stack.write_text(f"{stack.read_text()}  - {{kind: object, capacity: 64MiB, {settings}}}\n")
    return stack


def install_example(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """Have the example's package found, here and in the processes that are started from here, with
    more kinds of a package in this folder."""
    info = folder / "kvtier_folder-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-folder\nVersion: 0.1.0\n")
    points = f"[kvtier.backends]\nfolder = kvtier_folder:BACKEND\n{more}"
    (info / "entry_points.txt").write_text(points)
    # The package alone: a build by its own README leaves another description of it beside it.
    (folder / "kvtier_folder").symlink_to(EXAMPLE / "kvtier_folder")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    for known in (door.backend, door._points):
        known.cache_clear()


# Fills a stack with as many blocks as it is told, says so, and holds it open until told to go.
HOLDER = """
import sys
from pathlib import Path
from kvtier import Stack
from kvtier.testing.subject import NAMESPACE, make_keys, payload
with Stack.open(Path(sys.argv[1]), NAMESPACE) as stack:
    wanted = {key: payload(key) for key in make_keys(int(sys.argv[2]))}
    stack.store(wanted)
    assert stack.settle(300)
    for tier in stack.chain.tiers:
        tier.refresh()  # the room that is made ahead is there
    print("ready", flush=True)
    if sys.stdin.readline() == "check\\n":
        for tier in stack.chain.tiers:
            assert stack.load(list(wanted)) == wanted
            tier.forget(list(wanted))
"""

Hold = Callable[..., subprocess.Popen[str]]


def fill(path: Path, blocks: int = 8) -> None:
    """Store blocks in a stack, and leave it; the room that an engine makes ahead is there, too."""
    with Stack.open(path, NAMESPACE) as stack:
        stack.store({key: payload(key) for key in make_keys(blocks)})
        assert stack.settle()
        for tier in stack.chain.tiers:
            tier.refresh()


def put(path: Path, keys: Sequence[BlockKey], namespace: Namespace = NAMESPACE) -> None:
    """Have an engine store these, and end."""
    with Stack.open(path, namespace) as stack:
        stack.store({key: payload(key, namespace) for key in keys})
        assert stack.settle()


def served(path: Path, namespace: Namespace = NAMESPACE, count: int = 8) -> int:
    """How many of the blocks that were stored a new engine serves, none of them wrong."""
    wanted = {key: payload(key, namespace) for key in make_keys(count)}
    with Stack.open(path, namespace) as stack:
        found = stack.load(list(wanted))
    assert all(wanted[key] == data for key, data in found.items())
    return len(found)


def refused(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    """Run what cannot work; what it says of that."""
    assert app.run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def said(self) -> str:
        """All its words, wherever its lines end: that may hang on the length of a folder's name."""
        return " ".join((self.out + self.err).split())


def command(
    *args: object,
    columns: int | None = None,
    typed: str = "",
    rights: bool = True,
    before: Sequence[object] = (),
) -> Done:
    """Run the command line in a process of its own; `before` are the words in front of it."""
    environment = os.environ | ({"COLUMNS": str(columns)} if columns else {})
    words = list(map(str, args))
    if rights and not before and _fork_server().suits(environment):
        done = Done(*_fork_server().run(str(KVTIER), words, environment, typed))
    else:
        ended = subprocess.run(
            [*map(str, before), KVTIER, *words],
            capture_output=True,
            text=True,
            env=environment,
            input=typed,
            timeout=300,
            preexec_fn=None if rights else no_rights,
        )
        done = Done(ended.returncode, ended.stdout, ended.stderr)
    assert "Traceback" not in done.err, done.err
    assert "a mistake in kvtier" not in done.err, done.err
    return done


_fork_server = functools.cache(ForkServer)


def run(*args: object, code: int = 0) -> Any:
    """What a command answers, for programs."""
    done = command(*args, "--json")
    assert done.code == code, done.err
    return json.loads(done.out)


def no_rights() -> None:
    """In a child before it begins: root's right to pass over the rights of files is taken away."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 1]))


def one(folder: Path, pattern: str) -> Path:
    """The one such file; of slabs the one that has blocks, and on a disk unless `folder` is that of
    host memory."""
    (found,) = [
        path
        for path in folder.rglob(pattern)
        if path.suffix not in (".slab", ".table")
        or ("host" not in path.relative_to(folder).parts and has_blocks(path.with_suffix(".table")))
    ]
    return found


def block_file(folder: Path, kind: str) -> Path:
    """A file of the second tier that begins with a block's record."""
    return one(folder, "*.slab") if kind == "nvme" else min(folder.rglob("*.kv"))


def has_blocks(table: Path) -> bool:
    """Not the table of a spare slab, which an engine that runs may be about to make."""
    return table.exists() and any(table.read_bytes()[layout.TABLE_AT :])
