"""What a whole stack lives on, and lacks: file systems that fill up, turn read-only, go and come
back; and descriptors, threads, memory and lengths of files at their limits."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from campaign.children import Child, Say
from campaign.round import Round, Scenario
from campaign.stacks import SLOT, described, lacking_full_service, use
from kvtier import Stack
from kvtier.errors import ConfigErrors, KVTierError, MediumError
from kvtier.testing.subject import NAMESPACE

_BLOCKS = 64
_SPELLS = 6
_STEPS = 12
_ROOM = 2 * _BLOCKS * SLOT + (4 << 20)
_LIMITS, _USES = 10, 10
_SLACK_BYTES = 4 << 20
_TYPED = (KVTierError, OSError, MemoryError, RuntimeError)
"""What a caller may get who has no memory, thread or file left: Python's own say so."""


class Disks(Scenario):
    name = "disks"
    about = (
        "The folder of the NVMe tier and that of the store are file systems of their own (tmpfs): "
        "others fill one up, it is mounted read-only, or it is away for a while, under "
        "a stack that serves, or before one that opens. At every moment right bytes or a "
        "miss, nothing raised but what is typed; and full service once all is well."
    )
    limit_s = 240.0

    def play(self, round: Round) -> None:
        config = described(round.folder, blocks=_BLOCKS)
        mounts = [Mount(round.folder / name) for name in ("nvme", "store")]
        if not all(mount.attach() for mount in mounts):
            round.counts["no right to mount here"] += 1
            return
        try:
            self._spells(round, config, mounts)
        finally:
            for mount in mounts:
                mount.detach()

    def _spells(self, round: Round, config: dict[str, Any], mounts: list[Mount]) -> None:
        stack = Stack.open(config, NAMESPACE)
        try:
            for _ in range(_SPELLS):
                mount = round.dice.choice(mounts)
                trouble = round.dice.choice((mount.filled, mount.read_only, mount.away))
                said = f"{mount.path.name} {trouble.__name__}"
                round.counts[f"spells, {said}"] += 1
                again = round.dice.random() < 0.4
                with trouble():
                    _use(round, stack, said)
                    if again:
                        stack = _reopened(round, stack, config)
                        _use(round, stack, f"{said}, and opened anew")
                if again:  # what opened amid it may lack a tier, or have it in another place
                    stack = _reopened(round, stack, config)
                _use(round, stack, f"after {said}")
            lacking = lacking_full_service(stack, 10**9)
            round.check(not lacking, f"when all was well again: {lacking}")
            round.counts["full service afterwards"] += len(stack.chain.tiers)
        finally:
            stack.close()


class Mount:
    """A file system, and the folder at which it is found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._device = path.with_name(f"{path.name}-device")
        for folder in (path, self._device):
            folder.mkdir(parents=True, exist_ok=True)

    def attach(self) -> bool:
        """False if this is not allowed here."""
        options = f"size={_ROOM},mode=700"
        made = _run("mount", "-t", "tmpfs", "-o", options, "kvtier-campaign", str(self._device))
        return made and self._bind()

    def _bind(self) -> bool:
        return _run("mount", "--bind", str(self._device), str(self.path))

    def detach(self) -> None:
        """At once, though files are open."""
        for folder in (self.path, self._device):
            _run("umount", "--lazy", str(folder))

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Somebody else has taken all the room."""
        others = self.path / "others"
        with suppress(OSError), others.open("wb") as file:
            while True:
                file.write(bytes(SLOT))
                file.flush()
        try:
            yield
        finally:
            others.unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """For whoever opens a file from now on; the kernel has no way to take open ones back."""
        here = str(self.path)
        assert _run("mount", "--bind", here, here)
        assert _run("mount", "-o", "remount,bind,ro", here)
        try:
            yield
        finally:
            assert _run("umount", "--lazy", here)

    @contextmanager
    def away(self) -> Iterator[None]:
        """As a network's or a cable's: it comes back as it was. (Another one in its place is not
        used until the engine is started again.)"""
        assert _run("umount", "--lazy", str(self.path))
        try:
            yield
        finally:
            assert self._bind()


def _run(*command: str) -> bool:
    return not subprocess.run(command, capture_output=True, check=False).returncode


def _use(round: Round, stack: Stack, when: str) -> None:
    for _ in range(_STEPS):
        with round.expected(f"use while {when}"):
            loaded, stored, wrong = use(stack, round.dice, _BLOCKS, 10.0)
            round.counts["blocks loaded and proved"] += loaded
            round.counts["blocks stored"] += stored
            round.check(not wrong, f"while {when}: wrong bytes for {wrong}")


def _reopened(round: Round, stack: Stack, config: dict[str, Any]) -> Stack:
    """Open it again; where it is refused with a sentence, without the tier that cannot be had."""
    stack.close()
    for without in ((), ("nvme",), ("object",), ("nvme", "object")):
        tiers = [tier for tier in config["tiers"] if tier["kind"] not in without]
        try:
            return Stack.open(config | {"tiers": tiers}, NAMESPACE)
        except (MediumError, ConfigErrors):
            round.counts["openings refused with a sentence"] += 1
    raise AssertionError("host memory alone cannot be opened")


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
    for number in range(_LIMITS):
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
                for _ in range(_USES):
                    with _noted(say):
                        loaded, _, wrong = use(stack, dice, _BLOCKS, 5.0)
                        say(f"wrong bytes for {wrong}" if wrong else f"loaded {loaded}")
                    say("step 1")
        lacking = lacking_full_service(stack, (number + 1) * 10**8)
        say(f"wrong: afterwards {lacking}" if lacking else "full 1")
    stack.close()


@contextmanager
def _noted(say: Say) -> Iterator[None]:
    try:
        yield
    except _TYPED as error:
        with suppress(*_TYPED):
            say(f"typed {type(error).__name__}")


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
