"""What kvtier is for, in one go: a long prompt cold, warm, and after the server was killed.

    python -m kvtier.vllm.demo

Everything happens in a folder of its own, which is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from kvtier.errors import KVTierError
from kvtier.vllm import tiny_model
from kvtier.vllm.server import Server

_MEDIA = ("cpu", "nvme")
_CHUNK_TOKENS = 128


class Row(msgspec.Struct):
    """One request: how long it took, and where its KV cache came from."""

    name: str
    seconds: float
    hits: dict[str, int]
    text: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6000, help="length of the prompt")
    parser.add_argument("--layers", type=int, default=8, help="layers of the small model")
    parser.add_argument("--hidden", type=int, default=512, help="its hidden size")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    region = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/dev/shm"))
    try:
        model = tiny_model.build(
            folder / "model", layers=options.layers, hidden=options.hidden, seed=1
        )
        rows = _run(folder, region, model, options.tokens)
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(region, ignore_errors=True)
    _show(rows, options.tokens)
    return 0 if len({row.text for row in rows}) == 1 else 1


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
    from kvtier.cli import console

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


if __name__ == "__main__":
    sys.exit(main())
