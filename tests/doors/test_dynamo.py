"""Dynamo's own indexer hears what kvtier publishes, and knows what the tiers hold."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.engine import connector
from engines.world import World, prompt
from support.object.object_servers import free_port
from support.processes.dynamo_indexer import PYTHON, Indexer, Overlap, until

from kvtier import Stack
from kvtier.chain.plan import HOST
from kvtier.record.record import record_bytes
from kvtier.testing.subject import make_memory_folder
from kvtier.types import BlockKey, Namespace, Presence, block_key

BLOCK, CHUNK_BLOCKS = 16, 4
CHUNK = BLOCK * CHUNK_BLOCKS
NAMESPACE = Namespace(facts={"model": "doors"}, group_bytes=(256 << 10,))
EVENTS = 10_000
CPU, STORAGE = "CPU", "STORAGE"
SEED = 20
PAGE = Path(__file__).parents[2] / "docs/guides/routers.md"
MARKED = re.compile(r"^<!-- run by tests/doors/test_dynamo.py -->\n```sh\n(.*?)^```$", re.M | re.S)
MARKS = count(1 << 20)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


class Prompt:
    """Tokens, with the hashes of vLLM's blocks of them; some of it is the beginning of others."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.hashes: list[bytes] = []
        for at in range(0, len(tokens), BLOCK):
            before = self.hashes[-1] if self.hashes else b""
            block = repr(tokens[at : at + BLOCK]).encode()
            self.hashes.append(hashlib.sha256(before + block).digest())
        ends = self.hashes[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
        self.keys = [block_key(end, 0) for end in ends]
        self.request = SimpleNamespace(
            request_id="any",
            block_hashes=self.hashes,
            all_token_ids=tokens,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
        )

    def blocks(self, chunk: int) -> list[bytes]:
        return self.hashes[chunk * CHUNK_BLOCKS : (chunk + 1) * CHUNK_BLOCKS]


def make_prompts(chance: random.Random, prompts: int) -> list[Prompt]:
    made = [Prompt(chance.choices(range(50_000), k=8 * CHUNK))]
    while len(made) < prompts:
        shared = chance.choice(made).tokens[: chance.randrange(8 * CHUNK_BLOCKS) * BLOCK]
        own = chance.randint(1, 10) * CHUNK - len(shared) % CHUNK
        made.append(Prompt(shared + chance.choices(range(50_000), k=own)))
    return made


class Server:
    """What an engine has beside its device: the tiers, and vLLM's own publisher of events."""

    group = SimpleNamespace(
        sliding_window_size_in_chunks=None,
        hashes_per_chunk=CHUNK_BLOCKS,
        tokens_per_chunk=CHUNK,
        tokens_per_block=BLOCK,
    )

    def __init__(self, config: dict[str, Any], indexer: Indexer) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        from kvtier.vllm.events import DescribedEvents, place_of
        from kvtier.vllm.manager import ChainManager
        from kvtier.vllm.spec import VllmManager

        self._indexer = indexer
        alone = config | {"tiers": config["tiers"][:1]}
        self.neighbour = Stack.open(alone, NAMESPACE, engine="neighbour")
        """Another engine, whose memory this one reads."""
        self.stack = Stack.open(config, NAMESPACE)
        self.tiers = self.stack.chain.tiers
        chain_manager = ChainManager(self.stack, region="none", ranks=1)
        self._manager = VllmManager(chain_manager, events=True, keeps=False)
        places = [place_of(each, by_tier=False) for each in self._manager.media]
        kinds = {0: ("full_attention", None)}
        self._events = DescribedEvents(
            lambda key, _: BlockKey(key), self._manager.holders, kinds, places
        )
        publish, replay = (free_port() for _ in range(2))
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{publish}", f"tcp://*:{replay}")
        ends = [f"tcp://127.0.0.1:{port}" for port in (publish, replay)]
        indexer.listen_to(*ends, BLOCK)
        self.told = 0

    def ask(self, prompt: Prompt, *, store: bool = True) -> None:
        """As an engine: look up, load what is there, compute and store the rest."""
        found = self.stack.chain.locate(prompt.keys)
        hits = next((i for i, at in enumerate(found) if at < HOST), len(found))
        for chunk, key in enumerate(prompt.keys[:hits]):
            self._events.record_lookup(prompt.request, self.group, chunk, key)
        if store:
            self.stack.load(prompt.keys[:hits])
            for chunk in range(hits, len(prompt.keys)):
                key = prompt.keys[chunk]
                self._events.record_store(prompt.request, self.group, chunk, key)
            size = NAMESPACE.group_bytes[0]
            self.stack.store({key: bytes(key[:1]) * size for key in prompt.keys[hits:]})

    def come_to_rest(self) -> None:
        """Until nothing moves, and all is known of the neighbour that there is."""
        assert self.stack.settle().done
        self.tiers[HOST].refresh()

    def forget_device(self) -> None:
        """As vLLM when its own cache is reset, and the tiers are not."""
        from vllm.distributed.kv_events import AllBlocksCleared

        self._publish([AllBlocksCleared()])
        self._events.announce_again()

    def tell(self) -> int:
        """As at the end of a step: publish what there is to be told; how much that was."""
        told = self._events.take_events(self._manager.take_events())
        self._publish(told)
        self.told += len(told)
        return len(told)

    def tell_all(self) -> None:
        """Until the indexer has heard it."""
        from vllm.distributed.kv_events import BlockStored

        while self.tell() or self._events._found:
            pass
        for medium in (CPU, STORAGE):  # a queue each, maybe
            number = next(MARKS)
            mark = [50_000 + number % 50_000] * BLOCK
            stored = BlockStored([number], None, mark, BLOCK, None, medium, None)
            self._publish([stored])
            depth = "cpu" if medium == CPU else "disk"
            until(lambda: getattr(self._indexer.overlap(mark), depth) > 0)  # noqa: B023

    def _publish(self, events: Sequence[Any]) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        if events:
            self._publisher.publish(KVEventBatch(ts=0.0, events=list(events)))

    def holds(self, prompts: Sequence[Prompt]) -> dict[str, set[bytes]]:
        """vLLM's blocks that are in CPU memory, and below."""
        held: dict[str, set[bytes]] = {CPU: set(), STORAGE: set()}
        for tier in self.tiers:
            blocks = held[CPU if tier.medium == "cpu" else STORAGE]
            for each in prompts:
                for chunk, at in enumerate(tier.lookup(each.keys)):
                    blocks.update(each.blocks(chunk) if at is Presence.HIT else ())
        return held

    def keys(self, prompts: Sequence[Prompt]) -> dict[str, set[str]]:
        """What each tier holds; also what the neighbour has and this one was told to forget."""
        every = list({key for each in prompts for key in each.keys})
        found: dict[str, set[str]] = {tier.medium: set() for tier in self.tiers}
        for tier in (*self.tiers, self.neighbour.chain.tiers[HOST]):
            tier.refresh()
            states = zip(every, tier.lookup(every), strict=True)
            found[tier.medium].update(key.hex() for key, at in states if at is Presence.HIT)
        return found

    def close(self) -> None:
        self._publisher.shutdown()
        self.stack.close()
        self.neighbour.close()


def lists(config: dict[str, Any], held: dict[str, set[str]], folder: Path) -> bool:
    """Whether `kvtier ls` lists what the tiers say that they hold. What a bucket has dropped is
    listed until its caretaker has deleted it."""
    (stack := folder / "stack.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "kvtier", "ls", NAMESPACE.id, "--config", str(stack)]
    command += ["--limit", "1000000", "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    listed: dict[str, set[str]] = {kind: set() for kind in held}
    for row in json.loads(done.stdout)["blocks"]:
        listed[row["kind"]].add(row["key"])
    return listed.pop("object") >= held.pop("object") and listed == held


def truth(prompt: Prompt, held: dict[str, set[bytes]]) -> Overlap:
    """As Dynamo counts it: CPU memory first, then the disk goes on where that ends."""
    ends, at = [], 0
    for medium in (CPU, STORAGE):
        while at < len(prompt.hashes) and prompt.hashes[at] in held[medium]:
            at += 1
        ends.append(at * BLOCK)
    return Overlap(0, *ends)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Three tiers, of which none has room for all."""
    memory = make_memory_folder()
    slot = record_bytes(NAMESPACE.payload_bytes)
    disk, bucket = tmp_path / "disk", tmp_path / "bucket"
    bucket.mkdir()
    yield {
        "version": 1,
        "name": "doors",
        "mover": {"mode": "threads"},
        "tiers": [
            {"kind": "cpu", "path": str(memory), "capacity": str(24 * slot)},
            {"kind": "nvme", "path": str(disk), "capacity": "20MiB", "free_floor": 0},
            {"kind": "object", "url": bucket.as_uri(), "capacity": "30MiB"},
        ],
    }
    shutil.rmtree(memory)


def test_its_indexer_knows_what_the_tiers_hold(
    indexer: Indexer, config: dict[str, Any], tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """After 10,000 events of stores, evictions, drops, resets and restarts. What an earlier process
    has left, or a neighbour has stored, is known when it was asked for once; and never is more said
    to be there than is. At the end of a life `kvtier ls` lists the same."""
    chance = random.Random(SEED)
    prompts = make_prompts(chance, 40)
    told = lives = checks = 0
    while told < EVENTS:
        server = Server(config, indexer)
        try:
            for _ in range(chance.randint(5, 25)):
                for _ in range(chance.randint(1, 6)):
                    act(chance, server, prompts)
                server.come_to_rest()
                for asked in (False, True):
                    for prompt in prompts if asked else ():
                        server.ask(prompt, store=False)
                    server.tell_all()
                    held = server.holds(prompts)
                    said = [indexer.overlap(prompt.tokens) for prompt in prompts]
                    exact = [truth(prompt, held) for prompt in prompts]
                    assert all(map(at_most, said, exact)), f"life {lives}, check {checks}"
                assert said == exact, f"life {lives}, check {checks}"
                checks += 1
            until(lambda: lists(config, server.keys(prompts), tmp_path))  # noqa: B023
        finally:
            told += server.told
            server.close()
        lives += 1
    figure(f"dynamo.indexer: {told:,} events in {lives} lives, {checks} times all answers right")


def test_its_indexer_knows_of_a_neighbours_memory(indexer: Indexer, config: dict[str, Any]) -> None:
    """When it was asked for once, and until the neighbour drops it."""
    (prompt,) = make_prompts(random.Random(SEED), 1)
    server = Server(config, indexer)
    try:
        server.neighbour.store({key: bytes(NAMESPACE.group_bytes[0]) for key in prompt.keys})
        server.tell_all()
        assert indexer.overlap(prompt.tokens) == (0, 0, 0), "nobody has asked"
        server.come_to_rest()
        server.ask(prompt, store=False)
        server.tell_all()
        assert indexer.overlap(prompt.tokens) == (0, len(prompt.tokens), len(prompt.tokens))
        server.neighbour.delete(prompt.keys)

        def taken_back() -> bool:
            server.stack.settle()
            server.tell_all()
            return indexer.overlap(prompt.tokens) == (0, 0, 0)

        until(taken_back)
    finally:
        server.close()


def at_most(said: Overlap, exact: Overlap) -> bool:
    return said.gpu == 0 and said.cpu <= exact.cpu and said.disk <= exact.disk


def act(chance: random.Random, server: Server, prompts: Sequence[Prompt]) -> None:
    what = chance.random()
    if what < 0.75:
        server.ask(chance.choice(prompts))
    elif what < 0.85:
        size = NAMESPACE.group_bytes[0]
        server.neighbour.store({key: bytes(key[:1]) * size for key in chance.choice(prompts).keys})
    elif what < 0.95:  # they do not verify, say
        keys = [key for prompt in chance.sample(prompts, 3) for key in prompt.keys]
        server.stack.chain.forget(chance.sample(keys, len(keys) // 2))
    elif what < 0.97:
        server.forget_device()
    elif what < 0.99:
        chance.choice(server.tiers).clear()
    else:
        server.stack.chain.clear()
    server.tell()


PARSE = """
import json, sys
from argparse import ArgumentParser
from dynamo.frontend.frontend_args import FrontendArgGroup
from dynamo.vllm.args import parse_args

worker, frontend = json.loads(sys.argv[1])
parser = ArgumentParser()
FrontendArgGroup().add_arguments(parser)
routing = parser.parse_args(frontend)
sys.argv[1:] = worker
engine = parse_args().engine_args
transfer, events = engine.kv_transfer_config, engine.kv_events_config
weights = routing.host_cache_hit_weight, routing.disk_cache_hit_weight
said = routing.router_mode, *weights, transfer.kv_connector_module_path, events.topic
print(json.dumps([*said, engine.prefix_caching_hash_algo]))
"""
"""What Dynamo's own parsers make of flags."""


def test_its_frontend_and_worker_take_the_page_s_flags(model: Callable[..., Path]) -> None:
    worker, frontend = page_commands()[1]
    assert (worker[2], frontend[2]) == ("dynamo.vllm", "dynamo.frontend")
    given = [[str(model("llama")) if each == "MODEL" else each for each in worker], frontend]
    folder = next(PYTHON.parents[1].glob("lib/python*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([each[3:] for each in given])],
        env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == ["kv", 0.75, 0.25, "kvtier.vllm", "kv-events", "sha256_cbor"]


def page_commands() -> list[list[list[str]]]:
    """The commands of each block of the page that is marked for this file."""
    blocks = MARKED.findall(PAGE.read_text().replace("\\\n", " "))
    return [[shlex.split(each) for each in commands(block)] for block in blocks]


def commands(block: str) -> list[str]:
    """A quoted value may go on in the next line."""
    return re.findall(r"^\S(?:'[^']*'|[^'\n])*$", block, re.M)


def value(command: Sequence[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.timeout(1800)
def test_its_indexer_hears_a_real_engine(
    world: World, model: Callable[..., Path], indexer: Indexer
) -> None:
    """With vLLM's own publisher, as the page has its settings; also after kill -9, and when the
    tiers are emptied."""
    text, hit = prompt(21, 1100), 1024
    (serve,), _ = page_commands()

    def engine() -> Any:
        publish, replay = (free_port() for _ in range(2))
        events = json.loads(value(serve, "--kv-events-config"))
        events |= {"endpoint": f"tcp://*:{publish}", "replay_endpoint": f"tcp://*:{replay}"}
        transfer = connector(world.stack())
        started = world.engine(
            model("llama"), transfer=transfer, kv_events_config=events, block_size=32
        )
        ends = [f"tcp://127.0.0.1:{port}" for port in (publish, replay)]
        indexer.listen_to(*ends, 32)
        return started

    with engine() as first:
        first.generate(prompts=[text])
        first.settle()
        first.forget_engine_cache()
        first.generate(prompts=[text[:9]])
        until(lambda: indexer.overlap(text) == (0, hit, hit))
        first.clear(tier=0)
        until(lambda: indexer.overlap(text) == (0, 0, hit))
        first.kill()
    with engine() as second:
        assert indexer.overlap(text) == (0, 0, 0), "it has said nothing yet"
        assert second.generate(prompts=[text])[0]["cached"] == hit
        second.settle()
        second.generate(prompts=[text[:9]])
        second.clear(tier=0)
        until(lambda: indexer.overlap(text).gpu >= hit)
        second.forget_engine_cache()
        second.generate(prompts=[text[:9]])
        until(lambda: indexer.overlap(text) == (0, 0, hit))
        second.forget_everything()
        second.generate(prompts=[text[:9]])
        until(lambda: indexer.overlap(text) == (0, 0, 0))
