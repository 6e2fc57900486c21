"""Engines of several tensor-parallel sizes hand prompts over, and commands work on what they store.

Tokens are compared as in `test_degrees`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines.answers import HITS, ask, check, hand_over, prompts
from engines.engine import HOST
from engines.world import World, flip
from support.object.object_servers import ACCESS_KEY, SECRET_KEY, ServerProcess, rclone
from support.processes.cli_world import run

from kvtier.record.record import Header

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
RCLONE = Path(__file__).parents[3] / ".venv" / "bin" / "rclone"


@pytest.mark.parametrize(
    ("family", "sizes", "parts"), [("four_kv_heads", (1, 4, 1), {4, 1}), ("llama", (4, 2), {2})]
)
def test_four_ranks(
    world: World, model: Callable[..., Path], family: str, sizes: tuple[int, ...], parts: set[int]
) -> None:
    """What four have written others read, and they what one has; of the two KV heads of the Llama
    two ranks hold each, and one of these writes it."""
    folder, stack = model(family), world.stack_across_degrees()
    asked, last = prompts(130), prompts(140)[:1]
    with world.engine(folder, host=HOST.with_name("scored.py")) as plain:
        expected = [plain.weigh(prompt=each) for each in asked + last]
    for turn, ranks in enumerate(sizes):
        with world.engine(folder, tensor_parallel_size=ranks, stack=stack) as engine:
            check(ask(engine, asked), expected[:2], HITS if turn else [0, 0])
            if turn:
                check(ask(engine, last), expected[2:], HITS[:1] if turn > 1 else [0])
            engine.settle()
            facts = engine.facts()
            assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
            engine.kill()
        world.lose_tiers(1)
    records = (world.folder / "bucket").glob("*/blocks/*/*/*")
    assert {Header.read(each.read_bytes()).parts for each in records} == parts


def memory_of_all(world: World) -> list[dict[str, Any]]:
    """Two stacks, for two engines of one machine that have nothing but memory."""
    stack = world.stack_across_degrees()
    return [stack | {"tiers": stack["tiers"][:1]}] * 2


def memory_of_each_and_a_bucket(world: World, server: ServerProcess) -> list[dict[str, Any]]:
    """Two stacks, for two machines that share a bucket."""
    bucket = {"kind": "object", "url": "s3://bucket/kv", "endpoint": server.endpoint}
    bucket |= {"capacity": "1GiB", "refresh": "2s"}
    # processors may be busy
    bucket |= {"idle_timeout": "60s", "load_deadline": "60s", "store_deadline": "5min"}
    stacks = []
    for machine in ("one", "two"):
        (folder := world.region / machine).mkdir()
        cpu = {"kind": "cpu", "path": str(folder), "capacity": "64MiB"}
        cpu["load_deadline"] = "60s"
        stacks.append(world.stack_across_degrees(tiers=[cpu, bucket]))
    return stacks


@pytest.mark.parametrize("by", ["memory", "bucket"])
def test_a_prompt_is_handed_over_to_another_size(
    world: World, model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Both ways, and before its blocks are where the other engine finds them."""
    folder, of_two, of_one = model("llama"), prompts(90), prompts(100)
    with world.engine(folder, host=HOST.with_name("scored.py")) as plain:
        expected = [[plain.weigh(prompt=each) for each in asked] for asked in (of_two, of_one)]
    with ExitStack() as opened:
        if by == "bucket":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
            server = opened.enter_context(rclone(world.folder, RCLONE))
            one, other = memory_of_each_and_a_bucket(world, server)
        else:
            one, other = memory_of_all(world)
        two_ranks = opened.enter_context(world.engine(folder, tensor_parallel_size=2, stack=one))
        one_rank = opened.enter_context(world.engine(folder, stack=other))
        ways = ((two_ranks, one_rank, of_two), (one_rank, two_ranks, of_one))
        for (computes, answers, asked), known in zip(ways, expected, strict=True):
            answers.wait_for_others(patience=300)
            check([hand_over(computes, answers, each) for each in asked], known, HITS)
            facts = answers.facts()
            hits = facts["chain"]["hits"]
            assert hits[-1] == sum(hits) == sum(HITS) // 256
            assert (facts["failed_loads"], facts["late_loads"], facts["mistakes"]) == (0, 0, 0)


def test_commands_on_what_engines_of_two_sizes_have_stored(
    world: World, model: Callable[..., Path]
) -> None:
    """One namespace, whose records are copied, proved and found whatever number of parts they
    have; an engine of any size hits what was copied for it."""
    folder, asked = model("llama"), prompts(110) + prompts(120)
    asked_file = world.folder / "prompts.jsonl"
    asked_file.write_text("".join(json.dumps({"tokens": each}) + "\n" for each in asked))
    with world.engine(folder, host=HOST.with_name("scored.py")) as plain:
        expected = [plain.weigh(prompt=each) for each in asked]
    stack = world.stack_across_degrees()
    cpu, nvme, bucket = stack["tiers"]
    first, fresh, copied = (world.folder / f"{name}.yaml" for name in ("first", "fresh", "copied"))
    copy, blocks = world.folder / "copy", 2 * sum(HITS) // 256
    for file, tiers in (
        (first, [cpu, bucket]),
        (fresh, [cpu, nvme]),
        (copied, [cpu, bucket | {"url": copy.as_uri()}]),
    ):
        file.write_text(json.dumps(stack | {"name": file.stem, "tiers": tiers}))
    for prompts_of, ranks in ((asked[:2], 2), (asked[2:], 1)):
        with world.engine(folder, stack=str(first), tensor_parallel_size=ranks) as engine:
            engine.generate(prompts=prompts_of)
            engine.settle()
            engine.kill()
    listed = run("ls", "-c", first)["namespaces"]
    assert [(each["kind"], each["blocks"]) for each in listed] == [
        ("cpu", blocks),
        ("object", blocks),
    ]
    assert {each["facts"]["tensor_parallel"] for each in listed} == {"any"}
    shown = run("ls", listed[0]["namespace"], "-c", first)
    assert (shown["parts"], len(shown["blocks"])) == (None, 2 * blocks)
    assert run("ls", shown["blocks"][0]["key"], "-c", first)["copies"]
    assert run("verify", "-c", first)["counts"]["good"] == 2 * blocks
    (report,) = run("copy", first, copy.as_uri(), "--tier", "object")["namespaces"]
    assert (report["asked"], report["copied"]) == (blocks, blocks)
    asks = ["--prompts", asked_file, "--model", folder]
    (report,) = run("prewarm", "-c", fresh, "--from", copy.as_uri(), *asks)["namespaces"]
    assert (report["asked"], report["copied"]) == (blocks, blocks)
    answers = run("explain", "-c", fresh, *asks)["answers"]
    assert [each["hit_tokens"] for each in answers] == HITS + HITS
    for ranks in (2, 1):
        for region in world.region.iterdir():
            shutil.rmtree(region)
        with world.engine(folder, stack=str(fresh), tensor_parallel_size=ranks) as engine:
            found = [engine.generate(prompts=[each])[0] for each in asked]
            check(found, expected, HITS + HITS)
            assert engine.facts()["failed_loads"] == engine.facts()["mistakes"] == 0
            engine.kill()
    for damaged in sorted(copy.glob("*/blocks/*/*/*"))[::5]:
        flip(damaged, damaged.stat().st_size - 1)
    bad = len(sorted(copy.glob("*/blocks/*/*/*"))[::5])
    counts = run("verify", "-c", copied, "--tier", "object", code=1)["counts"]
    assert (counts["good"], counts["bad"]) == (blocks - bad, bad)
