"""One engine computes a prompt, and another goes on with it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from engines.engine import connector
from engines.world import World, chunk_tokens, prompt
from support.object.object_servers import free_port

from kvtier.vllm.server_process import Server

ROOT = Path(__file__).parents[3]
FLAGS = ["--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]
TEXT = "Tell me about caches. " * 50
PROMPT = prompt(21, 1100)
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("family", "dtype", "chunk"),
    [("llama", "float32", 256), ("gemma3", "float32", 256), ("qwen3_next", "bfloat16", None)],
)
def test_a_prompt_is_handed_over(
    world: World, model: Callable[..., Path], family: str, dtype: str, chunk: int | None
) -> None:
    """The other engine has it before its blocks have come to the tier that both have, and waits."""
    options = {"dtype": dtype, "stack": world.stack()}
    with world.engine(model(family), dtype=dtype) as plain:
        reference = plain.generate_with(prompt=PROMPT)
    with (
        world.engine(model(family), **options) as first,
        world.engine(model(family), **options) as second,
    ):
        computed = first.generate_with(prompt=PROMPT, tokens=1, limits=COMPUTE)
        assert computed["tokens"] == reference["tokens"][:1]
        said = computed["transfer"]
        assert said.pop("remote_prefill_cached_tokens") == 0, "of which vLLM tells in place of hits"
        second.wait_for_others(patience=300)
        second.begin(prompt=PROMPT, tokens=16, limits=said)
        first.settle()
        hit = 1100 // (size := chunk_tokens(second, chunk)) * size
        assert second.end() == {**reference, "cached": hit}
        second.forget_everything()
        second.wait_for_others(patience=0)
        answer = second.generate_with(prompt=PROMPT, limits=said)
        assert answer == {**reference, "cached": 0}, "nothing comes any more, and it is computed"


def test_of_several_connectors_none_hands_over(world: World, model: Callable[..., Path]) -> None:
    """vLLM takes one answer for a request, and its engine ends at a second."""
    stacks = [world.stack() | {"name": name} for name in ("one", "two")]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector(each) for each in stacks]},
    }
    with world.engine(model("llama"), transfer=transfer) as engine:
        engine.wait_for_others(patience=300)
        expected = engine.generate_with(prompt=PROMPT)
        for said in (COMPUTE, {"do_remote_prefill": True}):
            engine.forget_engine_cache()
            assert engine.generate_with(prompt=PROMPT, limits=said)["tokens"] == expected["tokens"]


@contextmanager
def routed(servers: Sequence[Server], *more: str) -> Iterator[str]:
    """examples/router.py before these."""
    command = [sys.executable, str(ROOT / "examples/router.py"), *(each.url for each in servers)]
    command += ["--port", "0", *more]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert router.stdout is not None
        yield router.stdout.readline().strip()
    finally:
        router.kill()
        router.communicate()


def serve(world: World, model: str, command: list[str], *flags: str) -> Server:
    """As a page has it."""
    name, kvtier, verb, _, config, stack, *_ = command
    assert (kvtier, verb, config) == ("kvtier", "serve", "--config")
    # Of the test alone; and a model as small as this one computes faster than it loads.
    text = (ROOT / stack).read_text().replace("2GiB", "256MiB") + "load_policy: always\n"
    here = world.folder / "stack.yaml"
    here.write_text(text.replace("kind: cpu\n", f"kind: cpu\n    path: {world.region}\n"))
    environment = dict([name.split("=")]) | {"HOME": str(world.folder), "OMP_NUM_THREADS": "1"}
    log = world.folder / f"{name}.log"
    return Server.start(model, here, [*FLAGS, *flags], log=log, environment=environment)


def test_servers_behind_a_router(world: World, model: Callable[..., Path]) -> None:
    """As docs/guides/share.md has it. One computes, the other answers as if it had; also where the
    first is there no more."""
    computing, answering, routing = page_commands("share.md")
    assert routing[:2] == ["python", "examples/router.py"]
    folder = str(model("llama"))
    with (
        serve(world, folder, computing) as computes,
        serve(world, folder, answering) as answers,
        routed([computes, answers]) as url,
    ):
        assert json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"] == folder
        body = {"model": folder, "prompt": TEXT, "max_tokens": 12, "temperature": 0}
        for _ in range(2):  # on busy processors the first time may not wait long enough
            found = json.loads(fetch(f"{url}/v1/completions", body))["choices"][0]["text"]
            assert found == computes.complete(folder, TEXT, 12)
            for server in (computes, answers):
                server.settle()
            answers.forget_engine_cache()
        assert answers.metric("kvtier:hit_blocks_total") >= len(TEXT) // 256
        chat = {"model": folder, "messages": [{"role": "user", "content": TEXT}]}
        chat |= {"max_tokens": 3, "stream": True}
        assert "data: [DONE]" in fetch(f"{url}/v1/chat/completions", chat)
        computes.kill()
        assert fetch(f"{url}/v1/completions", body | {"prompt": f"Other. {TEXT}"})
        with pytest.raises(HTTPError, match="404"):
            fetch(f"{url}/v1/completions", body | {"model": "nobody's"})


def test_a_prompt_goes_where_most_of_it_is(world: World, model: Callable[..., Path]) -> None:
    """As docs/guides/routers.md has it: to the server whose tiers have it, when its device has it
    no more. (The first two tell the test that the router hears both.)"""
    one, two, routing = page_commands("routers.md")
    assert routing[:2] == ["python", "examples/router.py"]
    folder, ports = str(model("llama")), [free_port() for _ in range(2)]
    flags = []
    for command, port in zip((one, two), ports, strict=True):
        said = json.loads(command[command.index("--kv-events-config") + 1])
        flags.append(["--kv-events-config", json.dumps(said | {"endpoint": f"tcp://*:{port}"})])
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    with (
        serve(world, folder, one, *flags[0]) as first,
        serve(world, folder, two, *flags[1]) as second,
        routed([first, second], "--events", *endpoints) as url,
    ):
        servers = (first, second)
        prompts = [f"{at}. {TEXT}" for at in range(8)]
        for at, text in enumerate(prompts):
            servers[at % 2].complete(folder, text, 1)
        for server in servers:
            server.settle()
            server.forget_engine_cache()
            server.complete(folder, "Hello", 1)
        went = []
        for text in prompts:
            before = [each.metric("kvtier:hit_blocks_total") for each in servers]
            body = {"model": folder, "prompt": text, "max_tokens": 1, "temperature": 0}
            fetch(f"{url}/v1/completions", body)
            for server in servers:
                server.settle()  # a hit is told up to half a second after the answer
            after = [each.metric("kvtier:hit_blocks_total") for each in servers]
            went.append([now > then for now, then in zip(after, before, strict=True)])
        assert went[2:] == [[True, False], [False, True]] * 3


def page_commands(page: str) -> list[list[str]]:
    """What a page of docs/guides says to type for it."""
    marked = "<!-- run by tests/vllm/serving/test_handoff.py -->\n```sh\n"
    _, _, after = (ROOT / "docs/guides" / page).read_text().partition(marked)
    return [shlex.split(line, comments=True) for line in after.partition("```")[0].splitlines()]


def fetch(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"})) as answer:
        return str(answer.read().decode())
