"""Several engines on one folder and one store, with commands beside them; budgets from outside."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import yaml
from support.object.object_servers import ACCESS_KEY, SECRET_KEY, rclone

from campaign.children import Child, Say
from campaign.round import Round, Scenario
from campaign.stacks import SLOT, described, payloads, run_command, wrong_clock, wrong_in
from kvtier import Stack
from kvtier.testing.subject import NAMESPACE, make_keys

_ENGINES = 8
_SECONDS = 12.0
_LOOK_S = 0.02
_PAUSE_S = 0.06
"""Between two requests of an engine: eight without any would be all that the machine does."""
_STORE_BLOCKS = 160
_NVME_BYTES = 4 << 20
_PAGE_BYTES = 4096
"""A file ends amid its last one: budgets count lengths, and `du` whole pages."""
_THREADS = 4
_KEYS = 600
"""All engines serve the same prompts, far more than there is room for."""
_COMMANDS = (
    "prewarm",
    "gc",
    "verify --tier nvme --json",
    "snapshot --to {backup}",
    "ls",
    "du",
    "verify --repair --json",
    "prewarm --hottest --size 1MiB",
)
_FINE = ("0", "1")
"""1: something was found, as a block that an engine has just evicted."""


class Shared(Scenario):
    name = "shared"
    about = (
        f"{_ENGINES} engines store and load the same blocks through one folder and one store, both "
        "far too small; commands run beside them, and engines are killed and come back. Sizes are "
        "looked at from outside all the time: neither budget is ever exceeded. (A server that is "
        "killed in the middle of PUTs leaves one object a thread beyond all accounts.)"
    )
    limit_s = 180.0

    def play(self, round: Round) -> None:
        self._serve_all(round, {}, round.folder / "store")

    def _serve_all(self, round: Round, store: dict[str, Any], files: Path) -> None:
        """A round with these settings of the store, whose objects are files in a folder."""
        configs = [self._config(round.folder, number, store) for number in range(_ENGINES)]
        command = round.folder / "stack.yaml"
        command.write_text(yaml.safe_dump(configs[0] | {"name": "commands"}))
        engines = [self._start(round, config) for config in configs]
        looks = _Looks(round, round.folder / "nvme", files)
        end = time.monotonic() + _SECONDS
        running: Child | None = None
        while time.monotonic() < end:
            looks.look()
            if running is None or not running.listen(0.0 if running.ended else 0.001):
                _judge(round, running)
                running = _command(round, command)
            if round.dice.random() < 0.004:
                number = round.dice.randrange(_ENGINES)
                self._end(round, engines[number])
                looks.killed += 1
                engines[number] = self._start(round, configs[number])
            time.sleep(_LOOK_S)
        _judge(round, running)
        for engine in engines:
            self._end(round, engine)
            looks.killed += 1
        looks.look()
        share = looks.fullest / (_STORE_BLOCKS * SLOT)
        round.notes.append(f"the store had up to {share:.0%} of its budget")

    def _config(self, folder: Path, number: int, store: dict[str, Any]) -> dict[str, Any]:
        config = described(folder, host=f"host{number}", blocks=48, refresh="100ms")
        config["name"] = f"engine{number}"
        config["tiers"][1]["capacity"] = _NVME_BYTES
        config["tiers"][2] |= {"capacity": _STORE_BLOCKS * SLOT, "threads": _THREADS} | store
        return config

    def _start(self, round: Round, config: dict[str, Any]) -> Child:
        seed = round.dice.randrange(1 << 30)
        return Child(lambda say: self._serve(say, config, seed))

    def _serve(self, say: Say, config: dict[str, Any], seed: int) -> None:
        serve(say, config, seed)

    def _end(self, round: Round, engine: Child) -> None:
        engine.kill()
        engine.wait()
        round.counts["engines killed"] += 1
        for said in engine.told("raised") + engine.told("wrong"):
            round.found(f"an engine: {said}")
        for line in engine.told("did"):
            stored, loaded = map(int, line.split())
            round.counts["blocks stored"] += stored
            round.counts["blocks loaded and proved"] += loaded


class Bucket(Shared):
    name = "bucket"
    about = (
        f"The same {_ENGINES} engines and commands with their store in a bucket: behind a real S3 "
        "server, rclone, which checks every signature, and keeps objects as files."
    )
    share = 0.5

    def play(self, round: Round) -> None:
        home = round.folder / "rclone"
        home.mkdir()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with rclone(home) as server:
            store = {"url": "s3://bucket/kv", "endpoint": server.endpoint, "region": "us-east-1"}
            self._serve_all(round, store, home / "data" / "bucket")


def serve(say: Say, config: dict[str, Any], seed: int) -> None:
    """Ask for what others may have stored, and store what is not there."""
    dice = Random(seed)
    keys = make_keys(_KEYS)
    with Stack.open(config, NAMESPACE) as stack:
        while True:
            start = int(dice.paretovariate(0.6) * 8) % _KEYS
            some = keys[start : start + 8]
            found = stack.load(some, 5.0)
            if wrong := wrong_in(found):
                say(f"wrong bytes for {wrong}")
            stored = stack.store(payloads([key for key in some if key not in found]))
            say(f"did {len(stored)} {len(found)}")
            time.sleep(dice.uniform(0, _PAUSE_S))


class _Looks:
    """Sizes, as `du` sees them, or as `ls` does if that is more."""

    def __init__(self, round: Round, nvme: Path, store: Path) -> None:
        self._round = round
        self._nvme = nvme
        self._store = store
        self.killed = 0
        self.fullest = 0
        """The most bytes of blocks that the store had."""

    def look(self) -> None:
        files = [size for path, size in _sizes(self._nvme) if "owners" not in path]
        nvme, most = sum(files), _NVME_BYTES + len(files) * _PAGE_BYTES
        blocks = sum(size for path, size in _sizes(self._store) if _is_block(path))
        allowed = (_STORE_BLOCKS + self.killed * _THREADS) * SLOT
        self.fullest = max(self.fullest, blocks)
        self._round.counts["looks at both budgets"] += 1
        self._round.check(nvme <= most, f"the folder has {nvme} bytes of {most}")
        text = f"the store has {blocks} bytes of {allowed}, {self.killed} engines were killed"
        self._round.check(blocks <= allowed, text)


def _is_block(path: str) -> bool:
    """Whether a file is a block; what a server is still writing is no object yet."""
    return "/blocks/" in path and not path.endswith(".partial")


def _sizes(root: Path) -> Iterator[tuple[str, int]]:
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                found = os.lstat(f"{folder}/{name}")
                yield f"{folder}/{name}", max(found.st_size, found.st_blocks * 512)


def _command(round: Round, stack: Path) -> Child:
    return run_command(
        stack, round.dice.choice(_COMMANDS).format(backup=f"file://{stack.parent}/backup")
    )


def _judge(round: Round, child: Child | None) -> None:
    if child is None:
        return
    child.wait()
    (command,), ended = child.told("command"), child.told("ended")
    round.counts[f"run beside: {command.partition(' --to')[0]}"] += 1
    fine = bool(ended) and ended[0].split()[0] in _FINE and "Traceback" not in ended[0]
    round.check(fine, f"{command} ended with {ended} {child.told('raised')}")
    bad = re.search(r'"bad": [1-9]', ended[0]) if ended else None
    round.check(bad is None, f"{command} found bad records: {ended}")
    if fine and ended[0].split()[0] == "1":
        round.counts["found or could not read something"] += 1


_JUMP_EVERY_S = 0.7
_HOURS = 12.0


class Clocks(Shared):
    name = "clocks"
    about = (
        "As `shared`, and the clock of each engine is wrong: by up to twelve hours either way, and "
        f"by others every {_JUMP_EVERY_S} s, while those of its files and of the commands are "
        "right. Budgets hold at every look, and nothing wrong is served; a block may leave sooner "
        "or later than its turn."
    )

    def _serve(self, say: Say, config: dict[str, Any], seed: int) -> None:
        with wrong_clock(_jumping(seed)):
            serve(say, config, seed)


def _jumping(seed: int) -> Callable[[], int]:
    """How wrong a clock is: by something else every now and then; nanoseconds."""
    offs = dict[int, int]()

    def off_ns() -> int:
        spell = int(time.monotonic() / _JUMP_EVERY_S)
        if spell not in offs:
            hours = Random(f"{seed} {spell}").uniform(-_HOURS, _HOURS)
            offs[spell] = int(hours * 3600e9)
        return offs[spell]

    return off_ns
