"""`kvtier demo`: what kvtier is for, in one go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.signals import ENDING, uninterrupted
from kvtier.errors import ConfigError, KVTierError
from kvtier.settings import ByteSize
from kvtier.system.disk import Disk
from kvtier.vllm import tiny_model
from kvtier.vllm.hooks.versions import installed
from kvtier.vllm.server_process import NotStarted, Server

app = options.new_app()

_MEDIA = ("cpu", "nvme")
_CHUNK_TOKENS = 128
_MEMORY = "/dev/shm"
_LOG = "server.log"
_CPU = ByteSize.parse("1GiB")
_INSIST_S = 0.2


class AskedRow(msgspec.Struct):
    """One request: how long it took, and where its KV cache came from."""

    name: str
    seconds: float
    hits: dict[str, int]
    text: str


@app.command(epilog="Example: kvtier demo --tokens 4000")
def demo(
    tokens: Annotated[int, typer.Option(min=600, max=30000, help="Length of the prompt.")] = 6000,
    layers: Annotated[int, typer.Option(hidden=True, min=1, help="Layers of the small model.")] = 8,
    hidden: Annotated[int, typer.Option(hidden=True, min=128, help="Its hidden size.")] = 512,
) -> None:
    """A long prompt on a real server: cold, warm, and after the server was killed.

    Builds a small model with random weights. Everything happens in folders of its own, which are
    removed at the end. Exit code 1 if an output differs.
    """
    installed()
    _check_room()
    _say(
        f"a small model with random weights, a prompt of {tokens} tokens, and a server that is "
        "started three times"
    )
    with _ending_in_order(), _folder() as folder, _folder(_MEMORY) as region:
        model = tiny_model.build(folder / "model", layers=layers, hidden=hidden, seed=1)
        try:
            rows = _run(folder, region, model, tokens)
        except NotStarted as error:
            for line in error.lines:
                print(console.plain(line), file=sys.stderr)
            file, kept = tempfile.mkstemp(prefix="kvtier-demo-", suffix=".log")
            os.close(file)
            shutil.copyfile(folder / _LOG, kept)
            raise KVTierError(
                f"vLLM did not start: above is the end of its log, and {kept} has all of it"
            ) from error
    _show(rows, tokens)
    if len({row.text for row in rows}) > 1:
        console.warn("an answer differs from that of the cold server: please report it")
        raise typer.Exit(console.EXIT_FAILURE)


def _check_room() -> None:
    free = Disk().free_bytes(Path(_MEMORY))
    if free < _CPU.bytes:
        raise ConfigError(
            _MEMORY,
            f"{amounts.size(free)} are free, and the demonstration takes {_CPU}",
            "free some, or enlarge it: mount -o remount,size=... (containers: --shm-size)",
        )


@contextlib.contextmanager
def _folder(parent: str | None = None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """However it is told to end, by Ctrl-C, `kill` or a closed terminal: the server ends first, and
    the folders go. That takes a moment, in which nothing more is heard.

    Python drops an exception that comes where none can go on, as in a finalizer: it is raised anew
    until it is seen to be on its way.
    """
    handled_signals = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    exits: list[SystemExit] = []

    def leave(number: int, frame: FrameType | None) -> None:
        for each in handled_signals:
            signal.signal(each, signal.SIG_IGN)
        exits.append(SystemExit(128 + number))
        signal.signal(signal.SIGALRM, insist)
        signal.setitimer(signal.ITIMER_REAL, _INSIST_S, _INSIST_S)
        raise exits[0]

    def insist(number: int, frame: FrameType | None) -> None:
        handled = sys.exc_info()[1]
        while handled not in (None, exits[0]):
            handled = handled.__context__
        if handled is None:
            raise exits[0]
        signal.setitimer(signal.ITIMER_REAL, 0)

    for each in handled_signals:
        signal.signal(each, leave)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run(folder: Path, region: Path, model: Path, tokens: int) -> list[AskedRow]:
    stack = _write_stack(folder, region)
    letters = "".join(f"Rule {number}: every byte is proved. " for number in range(tokens))
    prompt = letters[: tokens - 1]  # one token is the beginning of the text
    rows = []

    def ask(server: Server, name: str) -> None:
        _say(f"asking: {name}")
        rows.append(_ask(server, model, prompt, name))

    with _start(folder, model, stack, tokens) as server:
        server.complete(str(model), "Hello", 8)  # the first request of all compiles and allocates
        ask(server, "cold")
        server.settle()
        ask(server, "again (vLLM's own cache)")
        server.forget_engine_cache()
        ask(server, "vLLM's cache emptied")
        server.settle()
        _say("kill -9")
        server.kill()
    with _start(folder, model, stack, tokens) as server:
        server.complete(str(model), "Hello", 8)
        ask(server, "after kill -9, a new start")
        _say("kill -9, and the shared memory is lost as in a reboot")
        server.kill()
    shutil.rmtree(region)
    region.mkdir(mode=0o700)
    with _start(folder, model, stack, tokens) as server:
        server.complete(str(model), "Hello", 8)
        ask(server, "after a reboot")
    return rows


def _write_stack(folder: Path, region: Path) -> Path:
    tiers = [
        {"kind": "cpu", "path": str(region), "capacity": str(_CPU)},
        {"kind": "nvme", "path": str(folder / "blocks"), "capacity": "2GiB"},
    ]
    stack = folder / "stack.yaml"  # JSON is YAML, too
    content = {"version": 1, "name": "demo", "chunk_tokens": _CHUNK_TOKENS, "tiers": tiers}
    content["prefetch"] = {"warmup_share": 0}  # the last row shows what the disk alone gives
    content["load_policy"] = "always"  # computing may be faster, with a model as small as one likes
    stack.write_text(json.dumps(content))
    return stack


@contextlib.contextmanager
def _start(folder: Path, model: Path, stack: Path, tokens: int) -> Iterator[Server]:
    _say("starting the server")
    length = ["--max-model-len", str(tokens + 256), "--dtype", "float32", "--enforce-eager"]
    log, uncut = folder / _LOG, uninterrupted()
    with Server.start(str(model), stack, length, log=log, uncut=uncut) as server:
        _say(f"it is up after {server.started_in:.0f} s")
        yield server


def _ask(server: Server, model: Path, prompt: str, name: str) -> AskedRow:
    before = {tier: server.metric("kvtier:hit_blocks_total", tier=tier) for tier in _MEDIA}
    begin = time.monotonic()
    text = server.complete(str(model), prompt, 8)
    seconds = time.monotonic() - begin
    server.settle()
    hits = {
        tier: int(server.metric("kvtier:hit_blocks_total", tier=tier) - before[tier])
        * _CHUNK_TOKENS
        for tier in _MEDIA
    }
    return AskedRow(name, seconds, hits, text)


def _show(rows: list[AskedRow], tokens: int) -> None:
    cold = rows[0]
    columns = [
        f"a prompt of {tokens} tokens",
        "seconds",
        "faster",
        "from cpu",
        "from nvme",
        "output",
    ]
    shown = [
        [
            row.name,
            f"{row.seconds:.2f}",
            f"{cold.seconds / row.seconds:.1f}x",
            row.hits["cpu"],
            row.hits["nvme"],
            "the same" if row.text == cold.text else "DIFFERENT",
        ]
        for row in rows
    ]
    console.say()
    console.print_table(columns, shown, numbers=columns[1:5])
    console.say()
    console.say_wrapped(
        f"from cpu and nvme: tokens found there, in whole blocks of {_CHUNK_TOKENS}; the rest is "
        f"computed. What took {cold.seconds:.2f} s takes {rows[-2].seconds:.2f} s after a crash, "
        f"and {rows[-1].seconds:.2f} s after a reboot."
    )


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)
