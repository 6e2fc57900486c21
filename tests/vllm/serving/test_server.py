"""The server as people run it: `kvtier serve`, with vLLM's own processes, and its metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from engines.world import World, flip

from kvtier.backends.cpu.medium import engine_of
from kvtier.slab.files import held
from kvtier.vllm.hooks.versions import SERVER
from kvtier.vllm.server_process import Server

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = "Tell me about caches. " * 50
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
HANGS_S = 300
FLAGS = ["--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]


HANGING_DISK = """
import os, sys, time
if "kvtier.move.process_main" in sys.orig_argv:
    from kvtier.system.disk import Disk
    write = Disk.writev
    def later(*arguments):
        while os.path.exists({hangs!r}):
            time.sleep(0.01)
        return write(*arguments)
    Disk.writev = later
"""
"""What Python runs first: a disk that takes nothing while there is a file."""


class Serving:
    """A model, a stack in a file, and servers on them."""

    def __init__(self, world: World, model: Path) -> None:
        self.model = str(model)
        self.folder = world.folder
        self.stack = world.folder / "stack.yaml"
        self.stack.write_text(json.dumps(world.stack()))
        self.log = world.folder / "server.log"

    def start(self, *flags: str, **environment: str) -> Server:
        return Server.start(
            self.model,
            self.stack,
            [*FLAGS, *flags],
            log=self.log,
            environment=ENVIRONMENT | environment,
        )

    def ask(self, server: Server) -> str:
        return server.complete(self.model, TEXT, 12)


def tells(server: Server, name: str, value: float, **labels: str) -> None:
    """Wait until a metric has this value: it is told a moment after it is true."""
    end = time.monotonic() + HANGS_S
    while (found := server.metric(name, **labels)) != value:
        assert time.monotonic() < end, f"{name} {labels}: {found}, not {value}"
        time.sleep(0.1)


def prefetched(server: Server, rank: int) -> None:
    """Wait until it is told of a rank that blocks which it prefetched from a disk were used."""
    used = rf'^kvtier:prefetch_used_blocks_total\{{.*engine="{rank}".*tier="nvme".*\}} [1-9]'
    end = time.monotonic() + HANGS_S
    while not re.search(used, metrics := server.get("/metrics"), re.MULTILINE):
        told = re.findall("^kvtier:.*_total.* [1-9].*", metrics, re.MULTILINE)
        assert time.monotonic() < end, "\n".join(told)
        time.sleep(0.1)


def started_by(server: int) -> list[int]:
    """Handles of all processes of a server's session but its own."""
    return [os.pidfd_open(pid) for pid in of_session(server) if pid != server]


def of_session(leader: int) -> dict[int, bytes]:
    """The processes of a session with their command lines; those that have ended have none."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


@pytest.fixture(scope="module")
def serving(shared_world: World, model: Callable[..., Path]) -> Serving:
    return Serving(shared_world, model("llama"))


@pytest.fixture(scope="module")
def server(serving: Serving) -> Iterator[Server]:
    with serving.start() as server:
        yield server


def test_metrics_restart_and_sleep(serving: Serving, server: Server) -> None:
    chunks = len(TEXT) // 256
    text = serving.ask(server)
    tells(server, "kvtier:blocks", chunks, tier="nvme")
    server.settle()
    tells(server, "kvtier:missed_tokens_total", chunks * 256, reason="not_computed")
    check_explained(serving, server)
    server.forget_engine_cache()
    assert serving.ask(server) == text
    for tier, hits in (("cpu", chunks), ("nvme", 0)):
        tells(server, "kvtier:hit_blocks_total", hits, tier=tier)
    server.settle()

    for tier in ("cpu", "nvme"):
        assert server.metric("kvtier:blocks", tier=tier) == chunks
        assert server.metric("kvtier:stored_blocks_total", tier=tier) == chunks
        used = server.metric("kvtier:bytes_used", tier=tier)
        assert 0 < used < server.metric("kvtier:bytes_capacity", tier=tier)
    assert server.metric("kvtier:copied_bytes_total") > 0
    assert server.metric("kvtier:transfer_seconds_count", source="cpu", target="nvme") > 0
    assert server.metric("kvtier:queued_blocks") == 0
    assert server.metric("kvtier:internal_errors_total") == 0
    tells(server, "vllm:external_prefix_cache_hits_total", chunks * 256)
    for prompt in ("computed", "loaded"):
        tells(server, "kvtier:first_token_seconds_count", 1, prompt=prompt)
    check_panels_of_vllms(server, chunks)

    known = {line.split()[2] for line in server.get("/metrics").splitlines() if "# HELP" in line}
    ours = {re.sub("_(total|created)$", "", name) for name in known if name.startswith("kvtier:")}
    page = (DOCS / "reference/metrics.md").read_text()
    assert ours == set(re.findall(r"`(kvtier:\w+)`(?=[ ,].*\|)", page))

    server.kill()
    name = "small"
    with serving.start("--served-model-name", name) as again:
        assert again.complete(name, TEXT, 12) == text
        tells(again, "kvtier:hit_blocks_total", chunks)
        again.settle()
        check_sleep(again, name, text)
        check_strange_requests(again, name, text)
        check_engine_ends(again, serving.folder)


def check_explained(serving: Serving, server: Server) -> None:
    """A request is known by the id of its answer; this one finds all in vLLM's own cache."""
    body = {"model": serving.model, "prompt": TEXT, "max_tokens": 1}
    answer = server.post("/v1/completions", body)
    command = ["explain", "-c", serving.stack, "--request", answer["id"], "--json"]
    asked = subprocess.run([sys.executable, "-m", "kvtier", *command], capture_output=True)
    assert asked.returncode == 0, asked.stderr
    (found,) = json.loads(asked.stdout)["misses"]
    assert found["request"].startswith(answer["id"])
    assert (found["reason"], found["tier_tokens"]) == ("", 0)
    assert found["engine_tokens"] >= len(TEXT) // 256 * 256


def check_panels_of_vllms(server: Server, chunks: int) -> None:
    """What vLLM's own offloading tells, after as many chunks were stored, and loaded once."""
    stored = server.metric("vllm:kv_offload_store_bytes_total")
    assert server.metric("vllm:kv_offload_load_bytes_total") == stored > 0
    assert server.metric("vllm:kv_offload_tiering_write_bytes_total", tier="nvme") == stored
    assert server.metric("vllm:kv_offload_tiering_write_time_total", tier="nvme") > 0
    assert server.metric("vllm:kv_offload_tiering_read_bytes_total", tier="nvme") == 0
    assert server.metric("vllm:kv_offload_tiering_chunk_queries_total", tier="nvme") == chunks
    assert server.metric("vllm:kv_offload_tiering_chunk_hits_total", tier="nvme") == 0
    assert server.metric("vllm:kv_offload_cpu_allocation_size_sum") >= chunks
    assert server.metric("vllm:kv_offload_cpu_cache_usage_perc") == 0, "all is at rest"


def check_sleep(server: Server, name: str, text: str) -> None:
    """It sleeps when all that is under way in its processes has ended, and forgets everything."""
    other = f"Another. {TEXT}"
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(server.complete, name, other, 200)
        server.post("/sleep?level=1&mode=wait")
        assert json.loads(server.get("/is_sleeping"))["is_sleeping"]
        server.post("/wake_up")
        assert not json.loads(server.get("/is_sleeping"))["is_sleeping"]
        assert busy.result() == server.complete(name, other, 200)

    server.settle()
    hits = server.metric("vllm:external_prefix_cache_hits_total")
    assert server.complete(name, TEXT, 12) == text
    server.settle()
    assert server.metric("vllm:external_prefix_cache_hits_total") == hits, "all is emptied"
    server.forget_engine_cache()
    assert server.complete(name, TEXT, 12) == text
    found = hits + len(TEXT) // 256 * 256
    tells(server, "vllm:external_prefix_cache_hits_total", found)
    assert server.metric("kvtier:internal_errors_total") == 0


REMOTE = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x"}
STRANGE: list[dict[str, Any]] = [
    *({"vllm_xargs": {"kv_transfer_params": each}} for each in ("text", [1, 2], 5)),
    {"kv_transfer_params": REMOTE},
    {"kv_transfer_params": REMOTE, "max_tokens": 100_000, "request_id": "refused"},
    {"kv_transfer_params": {"do_remote_decode": True}},
    {"kv_transfer_params": {"kv_load_tiers": [{"medium": ["x"]}, {"locality": {}}, 5]}},
    {"kv_transfer_params": {"max_load_tokens": 1.5, "max_offload_tokens": "many"}},
    {"kv_transfer_params": {"max_load_tokens": 1 << 63, "max_offload_tokens": -1}},
    {"kv_transfer_params": {"max_load_tokens": 3, "max_offload_tokens": 7}},
    {"cache_salt": "@"},
    {"priority": -(1 << 62)},
    {"prompt": [[1, 2, 3], [4]]},
]


def check_strange_requests(server: Server, name: str, text: str) -> None:
    """A connector has ears for more than a server without one; the same name comes many times."""
    asked = {"model": name, "prompt": TEXT, "max_tokens": 4, "temperature": 0}

    def send(more: dict[str, Any]) -> int:
        try:
            server.post("/v1/completions", asked | more)
        except HTTPError as error:
            return error.code
        return 200

    with ThreadPoolExecutor(8) as threads:
        for more in STRANGE:
            codes = set(threads.map(send, [more] * 8))
            assert len(codes) == 1
            assert codes <= {200, 400, 500}, more
            server.forget_engine_cache()
            assert server.complete(name, TEXT, 12) == text, more
    assert server.metric("kvtier:internal_errors_total") == 0


def check_engine_ends(server: Server, folder: Path) -> None:
    """It ends with its server, and what it held is free for the next one."""
    others = started_by(server.process.pid)
    assert len(others) >= 2, "an engine and its mover"
    server.process.kill()
    for other in others:
        assert select.select([other], [], [], HANGS_S)[0], "it lives on"
        os.close(other)
    assert not list(folder.rglob("owners/*"))


def ask_rank(server: Server, model: str, rank: int, text: str, tokens: int = 12) -> str:
    """What one data-parallel rank answers."""
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


# 0.33 takes a memory node for each rank, unless this is set to whatever.
RANKS = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}


def test_data_parallel_ranks(world: World, model: Callable[..., Path]) -> None:
    """What one has computed the other one finds in its memory at its first request. What both have
    stored is only on the disk that they share in the end: each prefetches it for its own queue."""
    serving = Serving(world, model("llama"))
    ahead = {"warmup_share": 0, "memory": 0.75}
    serving.stack.write_text(json.dumps(world.stack() | {"prefetch": ahead}))
    texts = [f"{number}: {TEXT}" for number in range(6)]
    chunks = len(texts) * (len(texts[0]) // 256)
    flags = ("--data-parallel-size", "2", "--max-num-seqs", "1")

    def ask(server: Server, rank: int, text: str, tokens: int = 12) -> str:
        return ask_rank(server, serving.model, rank, text, tokens)

    with serving.start(*flags, **RANKS) as server:
        answers = [ask(server, at % 2, text) for at, text in enumerate(texts)]
        tells(server, "kvtier:stored_blocks_total", chunks, tier="nvme")
        server.settle()
        check_names(world)
        assert [ask(server, (at + 1) % 2, text) for at, text in enumerate(texts)] == answers
        for name in ("kvtier:hit_blocks_total", "kvtier:neighbour_loaded_blocks_total"):
            tells(server, name, chunks, tier="cpu")
        check_no_failure(server)
        server.kill()
    for root in world.region.iterdir():
        shutil.rmtree(root)
    with (
        serving.start(*flags, **RANKS) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        busy = [threads.submit(ask, server, rank, f"Busy {rank}", 1500) for rank in range(2)]
        tells(server, "vllm:num_requests_running", 2)
        waiting = [threads.submit(ask, server, (at + 1) % 2, text) for at, text in enumerate(texts)]
        assert [each.result() for each in waiting] == answers
        assert all(len(each.result()) for each in busy)
        for rank in range(2):
            prefetched(server, rank)
        check_no_failure(server)


def check_names(world: World) -> None:
    """An engine's rank is in its name: it is not whichever is free when it starts."""
    (root,) = world.region.iterdir()
    names = sorted(engine_of(mark) for mark in root.glob("*/owners/*") if held(mark))
    assert len(names) == 2
    assert names[1] == f"{names[0]}-dp1"


def check_no_failure(server: Server) -> None:
    assert server.metric("kvtier:failed_loads_total") == 0
    assert server.metric("kvtier:internal_errors_total") == 0


def test_a_stop_leaves_no_mark(world: World, model: Callable[..., Path]) -> None:
    """vLLM kills its engine at once unless it is told to wait; and what waits for a disk is not
    waited for as long."""
    serving = Serving(world, model("llama"))
    hangs, custom = world.folder / "hangs", world.folder / "custom"
    custom.mkdir()
    (custom / "sitecustomize.py").write_text(HANGING_DISK.format(hangs=str(hangs)))
    path = os.pathsep.join([str(custom), os.environ.get("PYTHONPATH", "")])
    chunks = len(TEXT) // 256
    with serving.start("--shutdown-timeout", str(3 * HANGS_S), PYTHONPATH=path) as server:
        serving.ask(server)
        server.settle()
        assert list(world.folder.rglob("owners/*"))
        hangs.touch()
        server.complete(serving.model, f"Other: {TEXT}", 12)
        tells(server, "kvtier:stored_blocks_total", 2 * chunks, tier="cpu")
        assert server.metric("kvtier:stored_blocks_total", tier="nvme") == chunks
        server.process.terminate()
        assert server.process.wait(2 * HANGS_S) == 0
        assert not list(world.folder.rglob("owners/*"))
    assert "Traceback" not in serving.log.read_text()


@pytest.mark.parametrize("when", [SERVER, "VLLM::EngineCore", "VLLM::Worker"])
def test_a_start_that_is_told_to_end_leaves_no_process(
    world: World, model: Callable[..., Path], when: str
) -> None:
    """All are told, as by a service manager: vLLM's server goes at once, and its engine would wait
    for ever for it."""
    serving = Serving(world, model("llama"))
    command = [sys.executable, "-m", "kvtier", "serve", serving.model]
    command += ["--config", str(serving.stack), "--", *FLAGS, "--port", "0"]
    with serving.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
    end = time.monotonic() + HANGS_S
    while not any(when.encode() in line for line in of_session(process.pid).values()):
        assert process.poll() is None, serving.log.read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    for pid in of_session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    process.wait(HANGS_S)
    assert of_session(process.pid) == {}


def test_among_several_connectors(world: World, model: Callable[..., Path]) -> None:
    """It works, its counters are seen, and a load that fails is recomputed there, too."""
    serving = Serving(world, model("llama"))
    page = (DOCS / "guides/serve.md").read_text()
    (block,) = [each for each in BLOCK.findall(page) if "MultiConnector" in each]
    name, served, _, *flags = shlex.split(block.replace("/path/of/stack.yaml", str(serving.stack)))
    assert (name, served) == ("vllm", "serve")
    flags += FLAGS
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # vLLM collects a connector's counters for its log, too, if it writes one.
    environment |= ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with Server.start(
        serving.model, None, flags, log=serving.log, environment=environment
    ) as server:
        text = serving.ask(server)
        server.settle()
        server.forget_engine_cache()
        assert serving.ask(server) == text
        tells(server, "kvtier:hit_blocks_total", len(TEXT) // 256, tier="cpu")
        assert server.metric("kvtier:failed_loads_total") == 0
        server.forget_engine_cache()
        slab = next(path for path in world.region.rglob("*.slab") if b"KVTB" in path.read_bytes())
        flip(slab, slab.read_bytes().index(b"KVTB") + (1 << 13))
        assert serving.ask(server) == text
        tells(server, "kvtier:failed_loads_total", 1)
        assert server.metric("kvtier:internal_errors_total") == 0
    line = r"EngineCore.* WARNING \d\d-\d\d \d\d:\d\d:\d\d .* a load of \d+ blocks for request"
    assert re.search(line, serving.log.read_text()), "in vLLM's own form"
    found = r"EngineCore.* INFO .* found again: cpu \d+ blocks \(.*\), nvme \d+ blocks \("
    assert re.search(found, serving.log.read_text())
