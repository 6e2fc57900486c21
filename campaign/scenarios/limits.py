"""Descriptors, threads, memory and lengths of files at their limits, in the process that serves."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any
from unittest import mock

from campaign.children import Child, Say
from campaign.round import Round, Scenario
from campaign.stacks import described, idle, payloads, wrong_in
from kvtier import Stack
from kvtier.errors import KVTierError
from kvtier.testing.subject import NAMESPACE, make_keys

_BLOCKS = 64
_SPELLS = 10
_STEPS = 10
_SLACK_BYTES = 4 << 20
_TYPED = (KVTierError, OSError, MemoryError, RuntimeError)
"""What a caller may get who has no memory, thread or file left: Python's own say so."""


class Limits(Scenario):
    name = "limits"
    about = (
        "The process of an engine stand-in has no descriptor, thread or memory left, or may write "
        "no longer files (RLIMIT_NOFILE, RLIMIT_AS, RLIMIT_FSIZE, threads that do not start), "
        "while it serves, or while it opens its stack. It does not die or hang, serves right bytes "
        "or a miss, raises at most what says why, and serves fully once it has what it needs."
    )
    limit_s = 240.0

    def play(self, round: Round) -> None:
        seed = round.dice.randrange(1 << 30)
        child = Child(lambda say: _serve(say, described(round.folder, blocks=_BLOCKS), seed))
        while child.listen(1.0):
            round.counts["steps"] = len(child.told("step"))
        code = child.wait()
        round.counts["steps"] = len(child.told("step"))
        for said in child.told("raised") + child.told("wrong"):
            round.found(said)
        round.check(code == 0, f"the engine ended with {code}, at {child.lines[-1:]}")
        for spell in child.told("spell"):
            round.counts[f"spells, {spell}"] += 1
        for error in child.told("typed"):
            round.counts[f"raised, as may be: {error}"] += 1
        round.counts["blocks loaded and proved"] += sum(map(int, child.told("loaded")))
        round.counts["full service afterwards"] += len(child.told("full"))


def _serve(say: Say, config: dict[str, Any], seed: int) -> None:
    dice = Random(seed)
    stack = Stack.open(config, NAMESPACE)
    for number in range(_SPELLS):
        limit = dice.choice((no_descriptors, no_threads, little_memory, short_files))
        opens = dice.random() < 0.3
        say(f"spell {limit.__name__}{', opening' if opens else ''}")
        if opens:
            stack.close()
            with limit(), _noted(say):
                Stack.open(config, NAMESPACE).close()
            stack = Stack.open(config, NAMESPACE)
        else:
            with limit():
                for _ in range(_STEPS):
                    with _noted(say):
                        _use(say, stack, dice)
                    say("step 1")
        _full_service(say, stack, number)
    stack.close()


@contextmanager
def _noted(say: Say) -> Iterator[None]:
    try:
        yield
    except _TYPED as error:
        with suppress(*_TYPED):
            say(f"typed {type(error).__name__}")


def _use(say: Say, stack: Stack, dice: Random) -> None:
    universe = make_keys(3 * _BLOCKS)
    start = dice.randrange(len(universe))
    some = universe[start : start + 8]
    found = stack.load(some, 5.0)
    if wrong := wrong_in(found):
        say(f"wrong bytes for {wrong}")
    say(f"loaded {len(found)}")
    stack.store(payloads([key for key in some if key not in found]))
    if dice.random() < 0.3:  # else all would be found in memory
        stack.chain.tiers[0].forget(universe)


def _full_service(say: Say, stack: Stack, number: int) -> None:
    """All tiers keep what is stored now."""
    for attempt in range(20):
        keys = make_keys(8, start=(number * 100 + attempt + 1) * 10**6)
        stack.store(payloads(keys))
        idle(stack)
        stack.settle(10.0)
        places = [[at.name for at in tier.lookup(keys)] for tier in stack.chain.tiers]
        if all(at == ["HIT"] * len(keys) for at in places):
            stack.chain.tiers[0].forget(keys)
            if (found := len(stack.load(keys, 20.0))) == len(keys):
                say("full 1")
                return
            say(f"wrong: only {found} of {len(keys)} blocks are loaded afterwards")
            return
        stack.mover.wait(0.3)
    say(f"wrong: afterwards tiers keep no more than {places}")


Limit = Callable[[], Any]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Whoever opens a file gets EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@contextmanager
def no_threads() -> Iterator[None]:
    """As the kernel's refusal is told by Python; the kernel refuses root nothing."""
    error = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=error):
        yield


@contextmanager
def little_memory() -> Iterator[None]:
    """Little more can be mapped than is."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with _limited(resource.RLIMIT_AS, mapped + _SLACK_BYTES):
        yield


@contextmanager
def short_files() -> Iterator[None]:
    """No file may grow beyond a page; Python ignores the signal that says so."""
    with _limited(resource.RLIMIT_FSIZE, 4096):
        yield


@contextmanager
def _limited(what: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))
