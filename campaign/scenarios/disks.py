"""File systems of their own that fill up, turn read-only, go and come back under a whole stack."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from campaign.round import Round, Scenario
from campaign.stacks import SLOT, described, idle, payloads, wrong_in
from kvtier import Stack
from kvtier.errors import ConfigErrors, MediumError
from kvtier.testing.subject import NAMESPACE, make_keys

_BLOCKS = 64
_SPELLS = 6
_STEPS = 12
_PATIENCE_S = 60.0
_HOUR_S = 3600.0
_ROOM = 2 * _BLOCKS * SLOT + (4 << 20)


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
            _full_service(round, stack)
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
    universe = make_keys(3 * _BLOCKS)
    for _ in range(_STEPS):
        start = round.dice.randrange(len(universe))
        some = universe[start : start + 8]
        with round.expected(f"use while {when}"):
            found = stack.load(some, 10.0)
            round.counts["blocks loaded and proved"] += len(found)
            round.check(not wrong_in(found), f"while {when}: wrong bytes for {wrong_in(found)}")
            lacking = [key for key in some if key not in found]
            round.counts["blocks stored"] += len(stack.store(payloads(lacking)))
            if round.dice.random() < 0.3:  # else all would be found in memory
                stack.settle(0.2)
                stack.chain.tiers[0].forget(universe)


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


def _full_service(round: Round, stack: Stack) -> None:
    """Each tier that the stack has keeps what is stored from now on."""
    for number, tier in enumerate(stack.chain.tiers):
        kept = _eventually(partial(_keeps, stack, number))
        round.check(kept, f"when all was well again, {tier.medium} kept nothing")
        round.counts["full service afterwards"] += kept


def _keeps(stack: Stack, number: int, start: int) -> bool:
    keys = make_keys(8, start=start)
    stack.store(payloads(keys))
    idle(stack, 5.0)
    stack.settle(5.0)
    for tier in stack.chain.tiers[:number]:
        tier.forget(keys)
    found = stack.chain.tiers[number].lookup(keys)
    return all(at.name == "HIT" for at in found) and len(stack.load(keys, 10.0)) == len(keys)


def _eventually(holds: Callable[[int], bool]) -> bool:
    end, start = time.monotonic() + _PATIENCE_S, 10**9
    while time.monotonic() < end:
        if holds(start):
            return True
        start += 1000
        time.sleep(0.2)
    return False
