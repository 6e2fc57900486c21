"""kvtier's tiers below the host memory of SGLang's HiCache, on a real engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST, Engine, EngineError
from engines.world import World, fill, flip, prompt, small_disk
from support.object import object_servers
from support.processes.dynamo_indexer import until

from kvtier.cli.inspect import blocks_of, look, parts_of
from kvtier.config import load
from kvtier.types import group_of

SGLANG = HOST.with_name("sglang_host.py")
STAND_IN = HOST.with_name("sglang_cpu")
PROMPTS = [prompt(seed, 900) for seed in range(3)]
FULL = 900 // 64 * 64
PAGES = len(PROMPTS) * 900 // 64
TOKENS = 16


class Sglang:
    """SGLang's engines, one after the other, on one stack."""

    def __init__(self, folder: Path, world: World, model: Path) -> None:
        self.folder, self.world, self.model = folder, world, model
        self.stack = world.stack(capacity="16MiB")
        self._engines: list[Engine] = []

    def engine(self, model: Path | None = None, **more: Any) -> Engine:
        """One that keeps its pages; `extra` changes what it is told of its storage."""
        extra = {
            "backend_name": "kvtier",
            "module_path": "kvtier.sglang.storage",
            "class_name": "KVTierStorage",
            "interface_v1": 1,
            "stack": self.stack,
            **more.pop("extra", {}),
        }
        return self.plain(model, storage=json.dumps(extra), **more)

    def plain(self, model: Path | None = None, **more: Any) -> Engine:
        """One without HiCache, unless more is said."""
        engine = Engine(
            self.folder / f"engine-{len(self._engines)}.log",
            host=SGLANG,
            environment=environment(),
            model=str(model or self.model),
            **more,
        )
        self._engines.append(engine)
        return engine

    def held(self) -> dict[str, int]:
        """How many blocks each tier of the stack holds, seen from outside."""
        held: dict[str, int] = {}
        for part in parts_of(look(load(self.stack, to_write=False))):
            held[part.kind] = held.get(part.kind, 0) + part.blocks
        return held

    def settle(self, tier: str = "nvme", pages: int = PAGES) -> None:
        """Until the engine has written so much."""
        until(lambda: self.held().get(tier, 0) >= pages)

    def lose_memory(self) -> None:
        """As after a restart of the machine."""
        for root in self.world.region.iterdir():
            shutil.rmtree(root)

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()


def environment() -> dict[str, str]:
    folders = [str(SGLANG.parent), str(STAND_IN), str(HOST.parents[3])]
    return {
        "AWS_ACCESS_KEY_ID": object_servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": object_servers.SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "PYTHONPATH": os.pathsep.join(folders),
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # as all else here
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


@pytest.fixture
def sglang(
    tmp_path: Path,
    world: World,
    model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sglang]:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))  # torchvision needs it to make a model, too
    sglang = Sglang(tmp_path, world, model("llama"))
    yield sglang
    sglang.close()


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an engine without HiCache says; filled by the first test that asks."""
    return []


@pytest.fixture
def right(sglang: Sglang, answers: list[list[int]]) -> list[list[int]]:
    if not answers:
        engine = sglang.plain()
        answers += tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS))
        engine.kill()
        assert all(len(set(each)) > TOKENS // 2 for each in answers), "no output repeats itself"
    return answers


def tokens(found: list[dict[str, Any]]) -> list[list[int]]:
    return [each["tokens"] for each in found]


def stored(found: list[dict[str, Any]]) -> list[int]:
    return [each["stored"] for each in found]


PAGE = HOST.parents[3] / "docs/guides/sglang.md"
BLOCK = re.compile(r"^<!-- run by tests/doors/test_sglang.py -->\n```sh\n(.*?)^```$", re.M | re.S)
ON_A_CPU = (
    "--device cpu --attention-backend torch_native --dtype float32 --hicache-size 1"
    " --max-total-tokens 4096 --mem-fraction-static 0.8 --disable-overlap-schedule"
    " --disable-cuda-graph --skip-server-warmup"
)


def test_the_page_s_commands(sglang: Sglang, right: list[list[int]]) -> None:
    """A server as the page starts it, but for the model, the port and the processor. It is the
    longest of all tests, so it begins first."""
    port = object_servers.free_port()
    written, look_at = BLOCK.findall(PAGE.read_text())
    init, serve = written.replace("MODEL", str(sglang.model)).rstrip().split("\n", 1)
    serve = f"exec {serve} {ON_A_CPU} --port {port}"
    name = f"docs-{uuid.uuid4().hex}"
    named = {
        **os.environ,
        **environment(),
        "KVTIER_NAME": name,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def shell(*lines: str, log: str) -> subprocess.Popen[bytes]:
        with (sglang.folder / log).open("ab") as file:
            return subprocess.Popen(
                ["bash", "-ec", "\n".join(lines)],
                cwd=sglang.folder,
                env=named,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    server = shell(init, serve, log="server.log")
    try:
        await_health(server, port, sglang.folder / "server.log")
        for known in (0, FULL):
            found = json.loads(post(port, "generate", asked(PROMPTS[0])))
            assert (found["output_ids"], found["meta_info"]["cached_tokens"]) == (right[0], known)
            until(lambda: "nvme" in listed(sglang.folder, named))
            until(lambda: b"flushed" in post(port, "flush_cache").lower())
        assert shell(look_at, log="look.log").wait() == 0, (sglang.folder / "look.log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for region in Path("/dev/shm").glob(f"kvtier-*-{name}*"):
            shutil.rmtree(region)


def await_health(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20).close()
            return
        time.sleep(0.2)


def asked(tokens: list[int]) -> bytes:
    parameters = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps({"input_ids": tokens, "sampling_params": parameters}).encode()


def post(port: int, path: str, content: bytes = b"") -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: bytes = answer.read()
    except urllib.error.HTTPError as error:
        return error.read()
    return found


def listed(folder: Path, named: dict[str, str]) -> str:
    """What `kvtier ls` says."""
    command = [sys.executable, "-m", "kvtier", "ls", "--config", "stack.yaml"]
    done = subprocess.run(command, cwd=folder, env=named, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_prompts_are_found_after_kill_9(
    sglang: Sglang, right: list[list[int]], layout: str
) -> None:
    engine = sglang.engine(hicache_mem_layout=layout)
    found = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    engine.kill()  # what it stores is under way
    assert (tokens(found), stored(found)) == (right, [0, 0, 0])
    engine = sglang.engine(hicache_mem_layout=layout)
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    sglang.settle()
    engine.kill()
    sglang.lose_memory()
    engine = sglang.engine(hicache_mem_layout=layout)
    for _ in range(2):
        found = engine.generate(prompts=PROMPTS, tokens=TOKENS)
        assert (tokens(found), stored(found)) == (right, [FULL] * 3)
        until(engine.forget_memory)
    assert engine.forget_storage()
    found = engine.generate(prompts=PROMPTS[:1], tokens=TOKENS)
    assert (tokens(found), stored(found)) == (right[:1], [0])
    engine.shut_down()
    assert "Traceback" not in engine.log.read_text()


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_bucket_serves_a_second_machine(
    sglang: Sglang, right: list[list[int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_servers.moto(sglang.folder) as server:
        tier = {"kind": "object", "capacity": "1GiB", "url": f"file://{sglang.folder}/store"}
        if kind == "s3":
            for name, value in environment().items():
                monkeypatch.setenv(name, value)
            object_servers.make_bucket(server)
            tier |= {"url": "s3://bucket/pages", "endpoint": server.endpoint}
        sglang.stack["tiers"].append(tier)
        engine = sglang.engine()
        engine.generate(prompts=PROMPTS, tokens=1)
        sglang.settle("object")
        engine.kill()
        shutil.rmtree(sglang.world.blocks)
        sglang.lose_memory()
        found = sglang.engine().generate(prompts=PROMPTS, tokens=TOKENS)
        assert (tokens(found), stored(found)) == (right, [FULL] * 3)


def test_each_rank_finds_its_own_pages(sglang: Sglang, right: list[list[int]]) -> None:
    engine = sglang.engine(tp_size=2)
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
    sglang.settle(pages=2 * PAGES)
    engine.kill()
    sglang.lose_memory()
    found = sglang.engine(tp_size=2).generate(prompts=PROMPTS, tokens=TOKENS)
    assert (tokens(found), stored(found)) == (right, [FULL] * 3)


def test_damaged_pages_are_misses(sglang: Sglang, right: list[list[int]]) -> None:
    engine = sglang.engine()
    engine.generate(prompts=PROMPTS, tokens=1)
    sglang.settle()
    engine.kill()
    sglang.lose_memory()
    for slab in sglang.world.blocks.rglob("*.slab"):
        flip(slab, 1 << 20)
    engine = sglang.engine()
    found = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    assert tokens(found) == right
    assert sum(stored(found)) < 3 * FULL
    assert "corrupt" in engine.log.read_text()
    sglang.settle()
    until(engine.forget_memory)
    assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right


def test_what_fails_is_a_miss(sglang: Sglang, right: list[list[int]]) -> None:
    """Tiers smaller than the prompts, a mover that is killed, a folder that is gone."""
    cpu, disk = sglang.stack["tiers"]
    cpu["capacity"], disk["capacity"] = "3MiB", "6MiB"
    engine = sglang.engine()

    def check() -> None:
        for _ in range(2):
            assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
            until(engine.forget_memory)

    check()
    os.kill(mover_of(engine), signal.SIGKILL)
    check()
    sglang.world.lose_disk()
    check()
    for seed in range(3, 9):
        engine.generate(prompts=[prompt(seed, 900)], tokens=1)
    check()


def test_a_full_disk_is_written_when_there_is_room(sglang: Sglang, right: list[list[int]]) -> None:
    sglang.stack["tiers"][1]["capacity"] = "24MiB"
    with small_disk(sglang.world.blocks, "24m"):
        others = fill(sglang.world.blocks)
        engine = sglang.engine()
        for _ in range(2):
            assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
            until(engine.forget_memory)
        assert sglang.held().get("nvme", 0) == 0
        others.unlink()
        seeds = count(3)

        def written() -> bool:
            engine.generate(prompts=[prompt(next(seeds), 900)], tokens=1)
            return sglang.held().get("nvme", 0) > 0

        until(written)
        assert tokens(engine.generate(prompts=PROMPTS, tokens=TOKENS)) == right
        engine.kill()


def mover_of(engine: Engine) -> int:
    """The process that moves bytes for an engine: it is told whose it is."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command = path.read_bytes().split(b"\0")
            mover = b"kvtier.move.process_main" in command
            if mover and os.getpgid(int(command[-2])) == engine.process.pid:
                return int(path.parent.name)
    raise AssertionError("there is none")


def test_other_weights_find_nothing(
    sglang: Sglang, right: list[list[int]], model: Callable[..., Path]
) -> None:
    other = model("llama", seed=1)
    engine = sglang.engine()
    engine.generate(prompts=PROMPTS, tokens=1)
    sglang.settle()
    engine.take_weights(folder=str(other))
    found = engine.generate(prompts=PROMPTS, tokens=TOKENS)
    assert stored(found) == [0, 0, 0]
    assert tokens(found) != right
    until(engine.forget_memory)
    assert stored(engine.generate(prompts=PROMPTS, tokens=1)) == [0, 0, 0]
    assert sglang.held()["nvme"] == PAGES, "and nothing was kept"
    engine.kill()
    found = sglang.engine(other).generate(prompts=PROMPTS, tokens=1)
    assert stored(found) == [0, 0, 0], "nor at the next start"


STATES = {"hicache_mem_layout": "page_first_direct", "max_mamba_cache_size": 64}
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mellum", {"hicache_mem_layout": "layer_first"}),
    "states": ("qwen3_next", {**STATES, "mamba_radix_cache_strategy": "extra_buffer"}),
    "last states": (
        "qwen3_next",
        {**STATES, "mamba_radix_cache_strategy": "no_buffer", "page_size": 1},
    ),
}
"""Models that have more than KV cache, and what SGLang needs for them."""
SEEN = 320
BEGUN = [each[:SEEN] for each in PROMPTS]
LONGER = [each + prompt(9, 2) for each in BEGUN]
"""With so little more that what is said still depends on the states before it."""


class Hybrid(Sglang):
    """Engines of a model that has more than KV cache. Some states are those at the end of a request
    only, and so a prompt finds the ones of another prompt that it begins with."""

    def __init__(self, sglang: Sglang, kind: str, model: Callable[..., Path]) -> None:
        self.kind, self._model = kind, model
        self._family, self._settings = HYBRID[kind]
        super().__init__(sglang.folder, sglang.world, model(self._family))
        self.stack["tiers"][0]["capacity"] = "64MiB"

    def plain(self, model: Path | None = None, **more: Any) -> Engine:
        return super().plain(model, **self._settings, **more)

    def with_other_weights(self) -> Engine:
        return self.engine(self._model(self._family, seed=1))

    def keep(self, prompts: list[list[int]], ranks: int = 1) -> None:
        """Have an engine keep these on disk, and lose what is not there."""
        engine = self.engine(tp_size=ranks)
        engine.generate(prompts=prompts, tokens=1)
        expected = ranks * sum(map(len, prompts)) // self._settings.get("page_size", 64)

        def written() -> bool:
            pages = sum(group_of(each.key) == 0 for each in self.on_disk())
            return pages == expected and self.held()["cpu"] == self.held()["nvme"]

        until(written)
        engine.kill()
        self.lose_memory()

    def on_disk(self) -> list[Any]:
        """The blocks there."""
        return list(blocks_of(look(load(self.stack, to_write=False), 1)))

    def damage_states(self, but: Collection[Any] = ()) -> None:
        """Change a bit in each record there of states or windows, but those with these keys."""
        for block in self.on_disk():
            if group_of(block.key) > 0 and block.key not in but:
                header = block.slab.header
                with block.slab.data.open("r+b") as file:
                    file.seek(at := header.data_at + block.slot * header.slot_bytes + 6000)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 4]))


@pytest.fixture(params=HYBRID)
def hybrid(
    request: pytest.FixtureRequest, sglang: Sglang, model: Callable[..., Path]
) -> Iterator[Hybrid]:
    hybrid = Hybrid(sglang, request.param, model)
    yield hybrid
    hybrid.close()


@pytest.fixture(scope="session")
def hybrid_answers() -> dict[str, list[list[int]]]:
    """By kind; filled by the first test that asks."""
    return {}


@pytest.fixture
def right_longer(hybrid: Hybrid, hybrid_answers: dict[str, list[list[int]]]) -> list[list[int]]:
    if hybrid.kind not in hybrid_answers:
        engine = hybrid.plain()
        found = tokens(engine.generate(prompts=LONGER, tokens=TOKENS))
        engine.kill()
        assert all(len(set(each)) > TOKENS // 2 for each in found), "no output repeats itself"
        assert len(set(map(tuple, found))) == len(found), "and tells of the tokens before the end"
        hybrid_answers[hybrid.kind] = found
    return hybrid_answers[hybrid.kind]


def test_states_and_windows_are_found_after_kill_9(
    hybrid: Hybrid, right_longer: list[list[int]]
) -> None:
    engine = hybrid.engine()
    engine.generate(prompts=BEGUN, tokens=1)
    engine.kill()  # what it stores is under way
    hybrid.keep(BEGUN)
    engine = hybrid.engine()
    found = engine.generate(prompts=LONGER, tokens=TOKENS)
    assert (tokens(found), stored(found)) == (right_longer, [SEEN] * 3)
    until(engine.forget_memory)
    assert tokens(engine.generate(prompts=LONGER, tokens=TOKENS)) == right_longer
    engine.shut_down()
    assert "Traceback" not in engine.log.read_text()
    found = hybrid.with_other_weights().generate(prompts=LONGER, tokens=TOKENS)
    assert stored(found) == [0, 0, 0]
    assert tokens(found) != right_longer


def test_pages_are_worth_nothing_without_states(
    hybrid: Hybrid, right_longer: list[list[int]]
) -> None:
    hybrid.keep(BEGUN)
    hybrid.damage_states()
    engine = hybrid.engine()
    found = engine.generate(prompts=LONGER, tokens=TOKENS)
    assert (tokens(found), stored(found)) == (right_longer, [0, 0, 0])
    assert "corrupt" in engine.log.read_text()
    until(engine.forget_memory)
    assert tokens(engine.generate(prompts=LONGER, tokens=TOKENS)) == right_longer


@pytest.mark.parametrize("hybrid", ["states"], indirect=True)
def test_each_rank_finds_its_own_states(hybrid: Hybrid, right_longer: list[list[int]]) -> None:
    hybrid.keep(BEGUN, ranks=2)
    found = hybrid.engine(tp_size=2).generate(prompts=LONGER, tokens=TOKENS)
    assert (tokens(found), stored(found)) == (right_longer, [SEEN] * 3)


@pytest.mark.parametrize("hybrid", ["states"], indirect=True)
def test_an_earlier_state_ends_a_shorter_hit(
    hybrid: Hybrid,
) -> None:
    """As if the later one had been evicted."""
    hybrid.keep(BEGUN)
    earlier = {block.key for block in hybrid.on_disk()}
    whole = [each[: 2 * SEEN] for each in PROMPTS]
    hybrid.keep(whole)
    hybrid.damage_states(but=earlier)
    stack = hybrid.folder / "stack.yaml"
    stack.write_text(json.dumps(hybrid.stack))
    command = [sys.executable, "-m", "kvtier", "verify", "--repair", "-c", str(stack)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "blocks taken out of use" in done.stdout, done.stdout + done.stderr
    longer = [each[: 2 * SEEN + 2] for each in PROMPTS]
    found = hybrid.engine().generate(prompts=longer, tokens=TOKENS)
    assert stored(found) == [SEEN] * 3
    assert tokens(found) == tokens(hybrid.plain().generate(prompts=longer, tokens=TOKENS))


def test_lookups_answer_like_sglang_s_own_storage(tmp_path: Path, sglang: Sglang) -> None:
    command = [sys.executable, str(SGLANG.with_name("sglang_lookups.py")), str(tmp_path / "files")]
    done = subprocess.run(
        command, env={**os.environ, **environment()}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_tiers_smaller_than_a_hybrid_prompt(hybrid: Hybrid, right_longer: list[list[int]]) -> None:
    cpu, disk = hybrid.stack["tiers"]
    cpu["capacity"], disk["capacity"] = "1MiB", "2MiB"
    engine = hybrid.engine()
    for _ in range(3):
        assert tokens(engine.generate(prompts=LONGER, tokens=TOKENS)) == right_longer
        until(engine.forget_memory)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        (
            {"module_path": "hybrid_storage", "class_name": "HybridStorage"},
            "object does not say where its pages lie",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    sglang: Sglang, extra: dict[str, object], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        sglang.engine(extra=extra)
