"""What breaks below a serving engine costs time, never a wrong token and never the engine."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine
from engines.world import World, flip, flip_memory, prompt

LENGTH = 1100
CHUNK = 256
HIT = 1024
TOKENS = 16
PROMPTS = [prompt(100 + seed, LENGTH) for seed in range(14)]


class Served:
    """An engine with a stack, and what it must answer."""

    def __init__(self, world: World, model: Path, plain: Engine) -> None:
        self.world = world
        found = plain.generate(prompts=PROMPTS, tokens=TOKENS)
        self.reference = [each["tokens"] for each in found]
        self.engine = world.engine(model, stack=world.stack(load_deadline="10s"))

    def ask(self, number: int) -> int:
        """The tokens of a prompt that were not computed; the answer must be right."""
        (found,) = self.engine.generate(prompts=[PROMPTS[number]], tokens=TOKENS)
        assert found["tokens"] == self.reference[number]
        return int(found["cached"])

    def known(self, number: int) -> None:
        """Let a prompt lie in both tiers, and not in the engine."""
        self.ask(number)
        assert self.engine.settle()  # on busy processors a copy may outlast the answer
        self.engine.forget_engine_cache()
        assert self.ask(number) == HIT
        self.engine.forget_engine_cache()

    def only_on_disk(self) -> None:
        """Let the CPU tier forget."""
        self.engine.forget_engine_cache()
        self.engine.clear(tier=0)

    def slabs(self) -> list[Path]:
        """The files that hold the NVMe tier's records."""
        return sorted(self.world.blocks.rglob("*.slab"))

    def facts(self) -> dict[str, Any]:
        return dict(self.engine.facts())


@pytest.fixture(scope="module")
def served(shared_world: World, model: Callable[..., Path], plain_llama: Engine) -> Served:
    return Served(shared_world, model("llama"), plain_llama)


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    """Whatever happened: nothing is held, and nothing has reached the border to vLLM."""
    yield
    assert served.engine.settle()
    facts = served.facts()
    assert (facts["pending"], facts["mistakes"]) == (0, 0)
    assert [tier["pinned"] for tier in facts["chain"]["tiers"]] == [0, 0]
    assert [tier["in_flight"] for tier in facts["chain"]["tiers"]] == [0, 0]


def test_bits_flipped_in_cpu_memory(served: Served) -> None:
    served.known(0)
    before = served.facts()
    flip_memory(served.engine)
    served.ask(0)
    served.known(0)
    after = served.facts()
    found = after["chain"]["tiers"][0]["corrupt"] - before["chain"]["tiers"][0]["corrupt"]
    assert found == HIT // CHUNK, "all of them at once"
    assert after["failed_loads"] == before["failed_loads"] + 1


def test_bits_flipped_on_disk(served: Served) -> None:
    served.known(1)
    before = served.facts()
    for slab in served.slabs():
        flip(slab, 5000)
    served.only_on_disk()
    served.ask(1)
    served.known(1)
    after = served.facts()
    found = after["chain"]["tiers"][1]["corrupt"] - before["chain"]["tiers"][1]["corrupt"]
    assert found == HIT // CHUNK
    assert after["failed_loads"] == before["failed_loads"] + 1
    served.only_on_disk()
    assert served.ask(1) == HIT, "and they were written again"


def test_files_cut_short(served: Served) -> None:
    served.known(2)
    before = served.facts()
    for slab in served.slabs():
        os.truncate(slab, 4096)
    served.only_on_disk()
    served.ask(2)
    assert served.engine.settle()
    after = served.facts()
    assert after["failed_loads"] == before["failed_loads"] + 1
    assert sum(after["chain"]["failures"][1].values()) > sum(
        before["chain"]["failures"][1].values()
    )


def test_mover_killed(served: Served) -> None:
    served.known(3)
    mover = served.engine.mover()
    before = served.facts()
    os.kill(mover, signal.SIGKILL)
    served.only_on_disk()
    served.ask(3)
    served.known(4)
    assert served.engine.mover() != mover
    after = served.facts()
    assert after["chain"]["mover"]["restarts"] == before["chain"]["mover"]["restarts"] + 1


def test_mover_killed_while_it_loads(served: Served) -> None:
    served.known(5)
    mover = served.engine.mover()
    before = served.facts()
    served.only_on_disk()
    os.kill(mover, signal.SIGSTOP)
    served.engine.begin(prompt=PROMPTS[5], tokens=TOKENS)
    os.kill(mover, signal.SIGKILL)
    assert served.engine.end()["tokens"] == served.reference[5]
    assert served.engine.mover() != mover
    after = served.facts()
    assert after["chain"]["mover"]["restarts"] == before["chain"]["mover"]["restarts"] + 1
    assert after["failed_loads"] == before["failed_loads"] + 1


def test_mover_frozen(served: Served) -> None:
    """The load passes its deadline; the mover that holds its slots is killed."""
    served.known(6)
    mover = served.engine.mover()
    before = served.facts()
    served.only_on_disk()
    os.kill(mover, signal.SIGSTOP)
    served.ask(6)
    served.engine.settle()
    after = served.facts()
    assert after["failed_loads"] == before["failed_loads"] + 1
    assert after["chain"]["mover"]["timeouts"] > before["chain"]["mover"]["timeouts"]
    assert served.engine.mover() != mover
    served.known(7)


def test_requests_share_a_load(served: Served) -> None:
    """The second asks for blocks that are on their way for the first."""
    served.known(11)
    mover = served.engine.mover()
    before = served.facts()
    served.only_on_disk()
    os.kill(mover, signal.SIGSTOP)
    served.engine.begin(prompt=PROMPTS[11], tokens=TOKENS)
    served.engine.begin(prompt=PROMPTS[11], tokens=TOKENS)
    both = served.facts()
    assert both["chain"]["mover"]["in_flight_blocks"] == HIT // both["chunk_tokens"]
    os.kill(mover, signal.SIGCONT)
    expected = {"tokens": served.reference[11], "cached": HIT}
    assert [served.engine.end(), served.engine.end()] == [expected, expected]
    assert served.facts()["failed_loads"] == before["failed_loads"]


def test_abort_while_it_loads(served: Served) -> None:
    """The blocks go on to the CPU tier, for whoever asks next."""
    served.known(12)
    mover = served.engine.mover()
    served.only_on_disk()
    os.kill(mover, signal.SIGSTOP)
    served.engine.begin(prompt=PROMPTS[12], tokens=TOKENS)
    served.engine.abort()
    os.kill(mover, signal.SIGCONT)
    assert served.engine.settle()
    assert served.ask(12) == HIT


def test_nothing_can_be_written(served: Served) -> None:
    """As on a full disk, or on one that has become read-only: every write is refused."""
    mover = served.engine.mover()
    before = served.facts()
    free, hard = resource.prlimit(mover, resource.RLIMIT_FSIZE)
    resource.prlimit(mover, resource.RLIMIT_FSIZE, (0, hard))
    served.ask(8)
    served.engine.settle()
    served.engine.forget_engine_cache()
    assert served.ask(8) == HIT  # the CPU tier goes on
    after = served.facts()
    resource.prlimit(mover, resource.RLIMIT_FSIZE, (free, hard))
    (link,) = [each for each in after["chain"]["links"] if each["target"] == "nvme"]
    (earlier,) = [each for each in before["chain"]["links"] if each["target"] == "nvme"]
    refused = sum(link["failures"].values()) + sum(link["drops"].values())
    assert refused > sum(earlier["failures"].values()) + sum(earlier["drops"].values())
    served.only_on_disk()
    served.ask(8)


def test_folder_removed(served: Served) -> None:
    served.known(9)
    served.world.lose_disk()
    served.only_on_disk()
    served.ask(9)
    served.ask(10)
    served.engine.forget_engine_cache()
    assert served.ask(10) == HIT
