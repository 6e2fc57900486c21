"""The commands of the page on vLLM's own tiering: servers with a stack below vLLM's CPU tier.

vLLM's tiering serves no CPU platform: a stand-in copies between device and CPU memory in place of
its worker for GPUs (tests/engines/hosts/native_cpu). All else is as the page has it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.engine import HOST, shared_by
from engines.world import World
from support.processes.dynamo_indexer import until

from kvtier.cli.inspect import look, parts_of
from kvtier.config import load
from kvtier.vllm.hooks.versions import SERVER
from kvtier.vllm.server_process import Server, _session

PAGE = HOST.parents[3] / "docs/guides/native_tiering.md"
BLOCK = re.compile(
    r"^<!-- run by tests/vllm/serving/test_native.py -->\n```sh\n(.*?)^```$", re.M | re.S
)
FLAGS = ["--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]
TEXT = "Tell me about caches. " * 50
CHUNKS, CHUNK = len(TEXT) // 256, 256
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@contextmanager
def served(command: list[str], folder: Path) -> Iterator[Server]:
    """A server by a command of the page's; killed at the end, with all of its processes."""
    stand_ins = [HOST.parent, HOST.parent / "native_cpu", HOST.parents[3]]
    named = [*map(str, stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = folder / "server.log"
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port.getsockname()[1])],
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(named)},
        )
    server = Server(process, port, log)
    left: set[Path] = set()
    try:
        server._wait_until_up()
        yield server
        for group in {os.getpgid(pid) for pid in _session(process.pid)}:
            left |= shared_by(group)
    finally:
        server.kill()
        for path in left:
            path.unlink(missing_ok=True)


def ask(server: Server, model: str) -> tuple[str, int]:
    """The answer to the prompt, and how much of that was found."""
    body = {"model": model, "prompt": TEXT, "max_tokens": 12, "temperature": 0}
    answer = server.post("/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_page_s_commands(world: World, model: Callable[..., Path]) -> None:
    """What a server has stored that was started by the first, one finds that is by the second."""
    folder, stack = str(model("llama")), world.folder / "stack.yaml"
    stack.write_text(json.dumps(world.stack()))
    short, long = BLOCK.findall(PAGE.read_text())
    kvtier = shlex.split(short.replace("8GiB", "64MiB"))
    vllm = shlex.split(long.replace("8589934592", str(64 << 20)).replace("\\\n", " "))
    assert (kvtier[:3], vllm[:3]) == (["kvtier", "serve", "MODEL"], ["vllm", "serve", "MODEL"])
    python = [sys.executable, "-P", "-m"]
    kvtier[:3] = [*python, "kvtier", "serve", folder]
    vllm[:3] = [*python, SERVER, "--model", folder]  # vLLM's command fails in builds for CPUs
    vllm = [each.replace("/path/of/stack.yaml", str(stack)) for each in vllm]

    def written() -> int:
        parts = parts_of(look(load(stack, to_write=False)))
        return sum(part.blocks for part in parts if part.kind == "nvme")

    with served([*kvtier, "--", *FLAGS], world.folder) as server:
        text, found = ask(server, folder)
        assert found == 0
        until(lambda: written() == CHUNKS)
    with served([*vllm, *FLAGS], world.folder) as server:
        assert ask(server, folder) == (text, CHUNKS * CHUNK)
        hits, tier = "vllm:kv_offload_tiering_chunk_hits_total", "1:KVTierSecondary"
        until(lambda: server.metric(hits, tier=tier) >= CHUNKS)  # told a moment after it is true
