"""What `benchmarks.soak` does to its servers, their disk and their bucket."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path

from benchmarks.soak.servers import ENVIRONMENT, Member, Places, flip
from kvtier.errors import KVTierError

_KVTIER = Path(sys.executable).with_name("kvtier")
_COMMAND_S = 180.0
_COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "du": [],
    "gc": [],
    "verify": [],
    "verify --repair": ["--repair"],
    "prewarm": ["--size", "8MiB"],
    "prewarm --hottest": ["--size", "8MiB", "--hottest"],
    "snapshot": ["--size", "8MiB"],
    "clear": ["--yes"],
    "clear nvme": ["--yes", "--tier", "nvme"],
}


def say(text: str) -> None:
    """Tell it now, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Incidents:
    """Chooses and does them, and remembers what was not as it should be."""

    def __init__(
        self, places: Places, mortal: Member, lasting: Member, rng: random.Random, log: Path
    ) -> None:
        self.places = places
        self.mortal = mortal
        self.kept = [mortal, lasting]
        self.rng = rng
        self._log = log
        self.done: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()
        self.strange: list[str] = []
        self.deaths = 0
        self._weather = threading.Lock()
        """Held by whoever makes the disk or the bucket unfit."""
        self._restart: threading.Thread | None = None

    def odd(self, text: str) -> None:
        """Something that should not be."""
        say(f"ODD: {text}")
        self.strange.append(text)

    def join(self) -> None:
        """Wait until all servers are back."""
        if self._restart is not None:
            self._restart.join()

    def happen(self) -> None:
        """Something happens."""
        kinds = self._incidents()
        (name,) = self.rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        begin = time.monotonic()
        kinds[name][1]()
        self.done[name] += 1
        say(f"{name} ({time.monotonic() - begin:.1f} s)")

    def _incidents(self) -> dict[str, tuple[float, Callable[[], None]]]:
        found: dict[str, tuple[float, Callable[[], None]]] = {
            "a command": (4, self.command),
            "mover killed": (2, self.kill_mover),
            "mover stopped": (2, lambda: self.stop("mover")),
            "engine stopped": (1, lambda: self.stop("engine")),
            "slab flipped": (2, self.flip_slab),
            "table flipped": (0.5, self.flip_table),
            "slab cut short": (0.3, self.cut_slab),
            "object flipped": (2, lambda: self.flip_objects("blocks")),
            "manifest flipped": (0.5, lambda: self.flip_objects("manifest")),
            "objects deleted": (1, self.delete_objects),
            "engine's cache emptied": (2, self.forget),
            "reset": (0.3, lambda: self.forget("?reset_external=true", [self.mortal])),
        }
        if not self.restarting:
            for how in self.mortal.ways_to_go:
                found[how] = (0.6, partial(self.restart, how))
        if self._weather.locked():
            return found
        if self.places.mounted:
            found["disk full"] = (2, self.fill_disk)
        if self.places.store is not None:
            found["bucket down"] = (2, self.bucket_down)
            found["bucket stopped"] = (1, self.bucket_stopped)
        return found

    def pause(self, low: float, high: float) -> None:
        time.sleep(self.rng.uniform(low, high))

    def restart(self, how: str) -> None:
        """The mortal one goes, and comes back while other things happen."""
        self._restart = threading.Thread(target=self._end_and_start, args=(how,))
        self._restart.start()

    @property
    def restarting(self) -> bool:
        """Whether the mortal one is on its way."""
        return self._restart is not None and self._restart.is_alive()

    def _end_and_start(self, how: str) -> None:
        begin = time.monotonic()
        for each in self.mortal.end(how):
            self.odd(each)
        with self._trouble() as trouble:
            try:
                self.mortal.start()
            except KVTierError as error:
                self.deaths += 1
                self.odd(f"{self.mortal.name} does not start after: {how}{trouble}: {error}")
                self.mortal.start()
        say(f"  back after: {how}{trouble} ({time.monotonic() - begin:.0f} s)")

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[str]:
        """A dead bucket or a full disk at a start, sometimes."""
        chance = self.rng.random()
        store = self.places.store
        if chance < 0.2 and store is not None:
            with self._weather:
                store.kill()
                try:
                    yield ", with the bucket down"
                finally:
                    store.start()
        elif chance < 0.4 and self.places.mounted:
            with self._weather:
                self.places.fill_disk()
                try:
                    yield ", with the disk full"
                finally:
                    self.places.empty_disk()
        else:
            yield ""

    def kill_mover(self) -> None:
        self._signal("mover", signal.SIGKILL)

    def stop(self, role: str) -> None:
        stopped = self._signal(role, signal.SIGSTOP)
        self.pause(1, 12)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _signal(self, role: str, number: signal.Signals) -> list[int]:
        pids = self.rng.choice(self.kept).pids(role)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def bucket_down(self) -> None:
        assert self.places.store is not None
        with self._weather:
            self.places.store.kill()
            self.pause(2, 20)
            self.places.store.start()

    def bucket_stopped(self) -> None:
        assert self.places.store is not None
        with self._weather:
            self.places.store.freeze()
            self.pause(2, 15)
            self.places.store.thaw()

    def fill_disk(self) -> None:
        with self._weather:
            self.places.fill_disk()
            self.pause(4, 15)
            self.places.empty_disk()

    def flip_slab(self) -> None:
        for path in self.places.slab_files():
            flip(path, self.rng, self.rng.randrange(60))

    def flip_table(self) -> None:
        if files := self.places.small_files():
            flip(self.rng.choice(files), self.rng, 5)

    def cut_slab(self) -> None:
        if files := self.places.slab_files():
            path = self.rng.choice(files)
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, self.rng.randrange(path.stat().st_size))

    def flip_objects(self, kind: str) -> None:
        for path in self.places.objects(kind):
            if self.rng.random() < 0.2:
                flip(path, self.rng, 3)

    def delete_objects(self) -> None:
        for path in self.places.objects("blocks"):
            if self.rng.random() < 0.3:
                path.unlink(missing_ok=True)

    def forget(self, more: str = "", members: Sequence[Member] = ()) -> None:
        # vLLM's server never ends when its engine goes amid such a call: not while one is ending.
        for member in [each for each in members or self.kept if each.up]:
            with contextlib.suppress(OSError, HTTPException):  # it may be on its way
                member.server.post(f"/reset_prefix_cache{more}", seconds=20)

    def command(self) -> None:
        """Somebody works by hand, beside it all."""
        name = self.rng.choice(list(_COMMANDS))
        stack = self.rng.choice(self.kept).stack
        arguments = [str(_KVTIER), name.split()[0], "--config", str(stack), *_COMMANDS[name]]
        try:
            done = subprocess.run(
                arguments,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
                env={**os.environ, **ENVIRONMENT},
            )
        except subprocess.TimeoutExpired:
            self.odd(f"kvtier {name} does not end")
            return
        self.exits[f"kvtier {name}: {done.returncode}"] += 1
        said = done.stdout + done.stderr
        with self._log.open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {name}: {done.returncode}\n{said}\n")
        if done.returncode not in (0, 1) or "Traceback" in said or "mistake" in said:
            self.odd(f"kvtier {name}: {done.returncode}: {said[-400:]}")
