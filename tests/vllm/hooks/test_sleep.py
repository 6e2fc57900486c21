"""Sleeping, other weights, and aborts, with copies under way: what follows is right, all the same.

vLLM's CPU platform has no sleep mode of its own: the flag is refused there, and its workers keep
their memory. But the engine goes through all of it: it pauses, resets every cache, calls its
workers, and wakes up again. What a GPU would lose in between is spoilt here by hand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines.engine import Engine, EngineError
from engines.world import World, prompt

PROMPTS = [prompt(500 + seed, 1100) for seed in range(5)]
HIT = 1024
PAUSE_S = 0.2
TOKENS = 16
SOON_S = 60.0


class Sleeper:
    """An engine with a stack, and what it must answer with its own weights and with others."""

    def __init__(self, world: World, model: Callable[..., Path], plain: Engine) -> None:
        self.world = world
        self.own, self.other = model("llama"), model("llama", seed=1)
        self.expected = {self.own: plain.generate(prompts=PROMPTS, tokens=TOKENS)}
        with world.engine(self.other) as other:
            self.expected[self.other] = other.generate(prompts=PROMPTS, tokens=TOKENS)
        self.weights = self.own
        self.engine = self.start()

    def start(self, **more: str) -> Engine:
        return self.world.engine(self.own, stack=self.world.stack(load_deadline="10min") | more)

    def ask(self, number: int) -> int:
        """The tokens of a prompt that were not computed; the answer must be right."""
        (found,) = self.engine.generate(prompts=[PROMPTS[number]], tokens=TOKENS)
        assert found["tokens"] == self.expected[self.weights][number]["tokens"]
        return int(found["cached"])

    def known(self, number: int) -> None:
        """What is asked for now is found later."""
        self.ask(number)
        self.engine.forget_engine_cache()
        assert self.ask(number) == HIT

    def sleep_amid_stores(self, number: int) -> None:
        """And wake up again."""
        self.engine.slow_stores(pause=PAUSE_S)
        self.engine.begin(prompt=PROMPTS[number], tokens=TOKENS)
        self.engine.abort()
        assert self.engine.sleep(level=1) == 0
        self.engine.slow_stores(pause=0)
        self.wake()

    def take(self, weights: Path) -> None:
        """Have it read these while it runs."""
        self.engine.take_weights(folder=str(weights))
        self.weights = weights

    def wake(self) -> None:
        self.engine.spoil_device()
        assert self.engine.wake_up()


@pytest.fixture(scope="module")
def sleeper(shared_world: World, model: Callable[..., Path], plain_llama: Engine) -> Sleeper:
    return Sleeper(shared_world, model, plain_llama)


@pytest.fixture(autouse=True)
def nothing_is_left(sleeper: Sleeper) -> Iterator[None]:
    yield
    assert sleeper.engine.settle()
    facts = sleeper.engine.facts()
    assert (facts["pending"], facts["requests"], facts["mistakes"]) == (0, 0, 0)
    assert [tier["pinned"] for tier in facts["chain"]["tiers"]] == [0, 0]
    assert [tier["in_flight"] for tier in facts["chain"]["tiers"]] == [0, 0]


def test_this_platform_has_no_sleep_mode(world: World, model: Callable[..., Path]) -> None:
    with pytest.raises(EngineError, match="Sleep mode is not supported on current platform"):
        world.engine(model("llama"), stack=world.stack(), enable_sleep_mode=True)


def test_abort_while_it_stores(sleeper: Sleeper) -> None:
    """What was computed is kept, for whoever asks next."""
    sleeper.engine.slow_stores(pause=PAUSE_S)
    sleeper.engine.begin(prompt=PROMPTS[0], tokens=TOKENS)
    sleeper.engine.abort()
    sleeper.engine.slow_stores(pause=0)
    assert sleeper.engine.settle()
    sleeper.engine.forget_engine_cache()
    assert sleeper.ask(0) == HIT


def test_nobody_waits_for_the_tiers_below(sleeper: Sleeper) -> None:
    """A request ends, and its blocks are served, while none of them can be written to disk."""
    mover = sleeper.engine.mover()
    os.kill(mover, signal.SIGSTOP)
    (found,) = sleeper.engine.generate(prompts=[PROMPTS[1]], tokens=TOKENS)
    facts = sleeper.engine.facts()
    os.kill(mover, signal.SIGCONT)
    assert found["tokens"] == sleeper.expected[sleeper.own][1]["tokens"]
    assert facts["busy"]
    assert facts["pending"] == 0


def test_a_pause_does_not_wait_for_the_tiers_below(sleeper: Sleeper) -> None:
    """But it does for copies of the device. What waits is written when the engine goes on."""
    engine, asked = sleeper.engine, prompt(600, 1100)
    mover = engine.mover()
    os.kill(mover, signal.SIGSTOP)
    engine.begin(prompt=asked, tokens=TOKENS)
    engine.end()
    waits = engine.pause()
    goes_on = engine.resume()
    os.kill(mover, signal.SIGCONT)
    assert (waits, goes_on) == (False, True)
    assert engine.settle()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    (found,) = engine.generate(prompts=[asked])
    assert found["cached"] == HIT


def test_sleep_while_it_stores(sleeper: Sleeper) -> None:
    """When it sleeps nothing is copied; and what was copied out is not served afterwards."""
    sleeper.known(0)
    sleeper.sleep_amid_stores(2)
    assert [sleeper.ask(0), sleeper.ask(2)] == [0, 0]
    sleeper.known(0)
    sleeper.known(2)


def test_sleep_while_it_loads(sleeper: Sleeper) -> None:
    """vLLM refuses (in one process; in several it waits), and goes on when the load has ended."""
    engine = sleeper.engine
    sleeper.known(2)
    mover = engine.mover()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    os.kill(mover, signal.SIGSTOP)
    engine.begin(prompt=PROMPTS[2], tokens=TOKENS)
    engine.abort()
    with pytest.raises(EngineError, match="waiting for remote KV transfer"):
        engine.sleep(level=1)
    os.kill(mover, signal.SIGCONT)
    assert engine.wake_up()
    assert engine.settle()
    assert sleeper.ask(2) == HIT
    assert engine.sleep(level=1) == 0
    sleeper.wake()
    assert sleeper.ask(2) == 0


def test_reset_while_it_loads_and_stores(sleeper: Sleeper) -> None:
    """Requests in the middle of it end with the right tokens."""
    engine = sleeper.engine
    sleeper.known(3)
    mover = engine.mover()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    engine.slow_stores(pause=PAUSE_S)
    engine.begin(prompt=PROMPTS[4], tokens=TOKENS)
    os.kill(mover, signal.SIGSTOP)
    engine.begin(prompt=PROMPTS[3], tokens=TOKENS)
    engine.forget_everything()
    os.kill(mover, signal.SIGCONT)
    engine.slow_stores(pause=0)
    expected = [sleeper.expected[sleeper.own][number]["tokens"] for number in (3, 4)]
    assert sorted([engine.end()["tokens"], engine.end()["tokens"]]) == sorted(expected)
    assert engine.settle()
    engine.forget_everything()
    assert [sleeper.ask(3), sleeper.ask(4)] == [0, 0]
    sleeper.known(3)


def test_those_who_wait_for_anothers_load_cost_the_others_nothing(sleeper: Sleeper) -> None:
    """vLLM asks about each of them in every step, and its prompt may be long."""
    engine = sleeper.engine
    sleeper.known(3)
    mover = engine.mover()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    os.kill(mover, signal.SIGSTOP)
    try:
        for _ in range(2):
            engine.begin(prompt=PROMPTS[3], tokens=TOKENS)
        assert engine.looks(steps=5) == 0
    finally:
        os.kill(mover, signal.SIGCONT)
    expected = sleeper.expected[sleeper.own][3]["tokens"]
    assert [engine.end()["tokens"], engine.end()["tokens"]] == [expected, expected]


def test_nobody_waits_for_what_loads_at_a_reset(sleeper: Sleeper) -> None:
    """It has blocks of its own: others are computed while a tier does not answer."""
    engine = sleeper.engine
    computed, loaded = (sleeper.expected[sleeper.own][each]["tokens"] for each in (4, 3))
    sleeper.known(3)
    mover = engine.mover()
    engine.forget_engine_cache()
    engine.clear(tier=0)
    os.kill(mover, signal.SIGSTOP)
    engine.begin(prompt=PROMPTS[3], tokens=TOKENS)
    engine.forget_everything()
    try:
        engine.call("begin", seconds=SOON_S, prompt=PROMPTS[4], tokens=TOKENS)
        assert engine.end()["tokens"] == computed
    finally:
        os.kill(mover, signal.SIGCONT)
    assert engine.end()["tokens"] == loaded


def test_a_reset_right_after_another(sleeper: Sleeper) -> None:
    """The workers have not been told of the first, and are still at what it lets them finish."""
    engine = sleeper.engine
    sleeper.known(0)
    engine.slow_stores(pause=PAUSE_S)
    engine.begin(prompt=PROMPTS[3], tokens=TOKENS)
    for _ in range(2):
        engine.forget_everything()
    engine.slow_stores(pause=0)
    assert engine.end()["tokens"] == sleeper.expected[sleeper.own][3]["tokens"]
    assert engine.forget_engine_cache()
    assert [sleeper.ask(0), sleeper.ask(3)] == [0, 0]


def test_preempted_requests_load_what_they_had(sleeper: Sleeper) -> None:
    """In the very step after they were preempted, while nothing else is known of the tiers."""
    sleeper.known(1)
    sleeper.engine.begin(prompt=PROMPTS[1], tokens=TOKENS)
    loaded = sleeper.engine.facts()["chain"]["hits"][0]
    assert sleeper.engine.preempt_all()
    assert sleeper.engine.end()["tokens"] == sleeper.expected[sleeper.own][1]["tokens"]
    assert sleeper.engine.facts()["chain"]["hits"][0] > loaded


def test_other_weights(sleeper: Sleeper) -> None:
    """Read after a deep sleep, and under a reset: no block of others is served, and none is left
    for a new start with the weights on disk."""
    sleeper.known(0)
    assert sleeper.engine.sleep(level=2) == 0
    sleeper.take(sleeper.other)
    sleeper.wake()
    assert sleeper.ask(0) == 0
    sleeper.known(0)

    sleeper.take(sleeper.own)
    assert sleeper.engine.forget_everything()
    assert sleeper.ask(0) == 0
    sleeper.known(0)

    sleeper.engine.settle()
    sleeper.engine.kill()
    sleeper.engine = sleeper.start()
    assert sleeper.ask(0) == 0
    sleeper.known(0)


def test_other_weights_without_a_word(sleeper: Sleeper) -> None:
    """Nobody resets what is kept, but only what vLLM itself keeps: old blocks are not served."""
    for weights in (sleeper.other, sleeper.own):
        sleeper.known(1)
        sleeper.take(weights)
        assert sleeper.engine.forget_engine_cache()
        assert sleeper.ask(1) == 0
        sleeper.known(1)


def test_what_the_engine_kept_of_other_weights_is_not_stored(sleeper: Sleeper) -> None:
    """Its own cache still serves it to who asks before that is reset, too."""
    sleeper.known(2)
    sleeper.take(sleeper.other)
    (found,) = sleeper.engine.generate(prompts=[PROMPTS[2]], tokens=TOKENS)
    assert found["cached"] == HIT, "computed with the weights before"
    assert sleeper.engine.forget_engine_cache()
    assert sleeper.ask(2) == 0
    sleeper.known(2)
    sleeper.take(sleeper.own)
    assert sleeper.engine.forget_engine_cache()


def test_what_was_loaded_when_other_weights_came_is_not_stored(sleeper: Sleeper) -> None:
    """The engine, which keeps nothing yet, hears of it later: and serves it until it is reset."""
    engine = sleeper.engine
    sleeper.known(3)
    assert engine.forget_engine_cache()
    engine.hold_loads()
    engine.begin(prompt=PROMPTS[3], tokens=TOKENS, steps=1)
    engine.let_loads_go()
    sleeper.take(sleeper.other)
    engine.end()
    (found,) = engine.generate(prompts=[PROMPTS[3]], tokens=TOKENS)
    assert found["cached"] == HIT, "computed with the weights before"
    assert engine.forget_engine_cache()
    assert sleeper.ask(3) == 0
    sleeper.known(3)
    sleeper.take(sleeper.own)
    assert engine.forget_engine_cache()


def test_who_wakes_with_the_same_weights_may_keep_all(sleeper: Sleeper) -> None:
    """If its stack says so; what has other weights, or is told to forget, forgets all the same."""
    sleeper.engine.kill()
    sleeper.engine = sleeper.start(sleep="keep")
    sleeper.known(0)
    assert sleeper.engine.sleep(level=1) == 0
    sleeper.wake()
    assert sleeper.ask(0) == HIT
    sleeper.engine.settle()
    sleeper.engine.kill()
    sleeper.engine = sleeper.start(sleep="keep")
    assert sleeper.ask(0) == HIT

    sleeper.sleep_amid_stores(2)
    sleeper.ask(2)  # what was under way may be there or not; it is right

    assert sleeper.engine.sleep(level=2) == 0
    sleeper.take(sleeper.other)
    sleeper.wake()
    assert sleeper.ask(0) == 0
    sleeper.known(0)
    assert sleeper.engine.forget_everything()
    assert sleeper.ask(0) == 0
    sleeper.take(sleeper.own)
    assert sleeper.engine.forget_everything()
    sleeper.known(1)
