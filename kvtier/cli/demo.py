"""`kvtier demo`: what kvtier is for, in one go."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console
from kvtier.vllm import tiny_model
from kvtier.vllm.server import Server
from kvtier.vllm.versions import installed

app = console.new_app("See what it is good for: a prompt cold, warm, after a crash.")

_MEDIA = ("cpu", "nvme")
_CHUNK_TOKENS = 128


class Row(msgspec.Struct):
    """One request: how long it took, and where its KV cache came from."""

    name: str
    seconds: float
    hits: dict[str, int]
    text: str


@app.command(epilog="Example: kvtier demo --tokens 4000")
def demo(
    tokens: Annotated[int, typer.Option(min=600, max=30000, help="Length of the prompt.")] = 6000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the small model.")] = 8,
    hidden: Annotated[int, typer.Option(min=128, help="Its hidden size.")] = 512,
) -> None:
    """A long prompt on a real server: cold, warm, and after the server was killed.

    Builds a small model with random weights. Everything happens in folders of its own, which are
    removed at the end. Exit code 1 if an output differs.
    """
    installed()
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    region = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/dev/shm"))
    try:
        model = tiny_model.build(folder / "model", layers=layers, hidden=hidden, seed=1)
        rows = _run(folder, region, model, tokens)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(region, ignore_errors=True)
    _show(rows, tokens)
    if len({row.text for row in rows}) > 1:
        raise typer.Exit(console.EXIT_FAILURE)


def _run(folder: Path, region: Path, model: Path, tokens: int) -> list[Row]:
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
        ask(server, "again: GPU cache of the engine")
        server.forget_engine_cache()
        ask(server, "its cache emptied")
        server.settle()
        _say("kill -9")
        server.kill()
    with _start(folder, model, stack, tokens) as server:
        server.complete(str(model), "Hello", 8)
        ask(server, "after kill -9 and a new start")
        server.kill()
    _say("kill -9, and the shared memory is lost as in a reboot")
    shutil.rmtree(region)
    region.mkdir(mode=0o700)
    with _start(folder, model, stack, tokens) as server:
        server.complete(str(model), "Hello", 8)
        ask(server, "after a reboot")
    return rows


def _write_stack(folder: Path, region: Path) -> Path:
    tiers = [
        {"kind": "cpu", "path": str(region), "capacity": "1GiB"},
        {"kind": "nvme", "path": str(folder / "blocks"), "capacity": "2GiB"},
    ]
    stack = folder / "stack.yaml"  # JSON is YAML, too
    content = {"version": 1, "name": "demo", "chunk_tokens": _CHUNK_TOKENS, "tiers": tiers}
    content["loads"] = "always"  # computing may be faster, with a model as small as one likes
    stack.write_text(json.dumps(content))
    return stack


def _start(folder: Path, model: Path, stack: Path, tokens: int) -> Server:
    _say("starting a server")
    length = ["--max-model-len", str(tokens + 256), "--dtype", "float32", "--enforce-eager"]
    server = Server.start(str(model), stack, length, log=folder / "server.log")
    _say(f"it is up after {server.started_in:.0f} s")
    return server


def _ask(server: Server, model: Path, prompt: str, name: str) -> Row:
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
    return Row(name, seconds, hits, text)


def _show(rows: list[Row], tokens: int) -> None:
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


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)
