"""Hours of two servers on one disk and one bucket, both far too small, while everything goes wrong.

    make bench-soak      # MINUTES=60 SEED=1 FOLDER=... (kept if named) JSON=figures.json

Two `kvtier serve` and a plain vLLM, which says what the answers must be. Clients ask, go away and
talk on; at random moments processes are killed and stopped, the bucket is down, the disk is full,
bytes are flipped, and commands run beside it all. One of the two servers is never restarted. In
between everything rests, and nothing may be under way. (What grows in a long life is a matter of
`make campaign ONLY=serving_day`.)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path

from benchmarks.report import Report
from benchmarks.soak.load import Load, Reference
from benchmarks.soak.servers import (
    BUCKET_BYTES,
    CPU_BYTES,
    DISK_BYTES,
    ENVIRONMENT,
    MIB,
    THREADS,
    Member,
    Peaks,
    Places,
    build_model,
    flip,
)
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


MINUTES = float(os.environ.get("MINUTES", "60"))
SEED = int(os.environ.get("SEED", "1"))
_REST_EVERY_S = 45.0
_RECORD_BYTES = 2 * MIB
_AT_REST = ("kvtier:queued_blocks", "kvtier:waiting_blocks", "kvtier:reading_blocks")


class Soak:
    """Servers, places and clients, what was done to them, and what was found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = build_model()
        self.places = Places(folder)
        self.plain = Member("plain", self.model, folder, None)
        self.kept = [
            Member(name, self.model, folder, self.places.stack(name))
            for name in ("mortal", "lasting")
        ]
        self.members = [self.plain, *self.kept]
        log = folder / "commands.log"
        mortal, lasting = self.kept
        self.incidents = Incidents(self.places, mortal, lasting, random.Random(SEED), log)
        self.odd = self.incidents.odd
        self.restless = 0
        self._counters: dict[tuple[str, int], dict[object, float]] = {}
        self.totals: Counter[str] = Counter()

    def look_for_deaths(self) -> None:
        for member in self.members:
            if member.up and not member.alive:
                self.incidents.deaths += 1
                self.odd(f"{member.name} died by itself")
                member.end("all killed")
                member.start()

    def look_at_rest(self) -> None:
        """Whether anything is still under way."""
        self.incidents.join()
        for member in self.kept:
            self._rest(member)

    def _rest(self, member: Member) -> None:
        try:
            member.server.settle()
            found = member.server.metrics()
        except (OSError, HTTPException) as error:
            self.odd(f"{member.name} does not tell its metrics: {error}")
            return
        moving = {
            f"{name} {dict(labels)}": value
            for (name, labels), value in found.items()
            if name in _AT_REST and value
        }
        if moving:
            self.restless += 1
            self.odd(f"{member.name} is not at rest: {moving}")
        counters: dict[object, float] = {
            key: value
            for key, value in found.items()
            if key[0].startswith("kvtier:") and key[0].endswith("_total")
        }
        before = self._counters.get((member.name, member.life), {})
        for key, value in before.items():
            if counters.get(key, 0.0) < value:
                self.odd(f"{member.name}: {key} fell from {value} to {counters.get(key)}")
        for key, value in counters.items():
            assert isinstance(key, tuple)
            labels = " ".join(sorted(each for _, each in key[1]))
            self.totals[f"{key[0]} {labels}".strip()] += int(value - before.get(key, 0.0))
        self._counters[member.name, member.life] = counters

    def run(self) -> Load:
        for member in self.members:
            member.start()
        load = Load(self.kept, Reference(self.plain), SEED, self.folder / "answers.jsonl")
        end = time.monotonic() + MINUTES * 60
        rest_at = time.monotonic() + _REST_EVERY_S
        load.go()
        while time.monotonic() < end:
            self.incidents.pause(2, 8)
            self.look_for_deaths()
            if time.monotonic() >= rest_at and not self.incidents.restarting:
                load.rest()
                self.look_at_rest()
                load.go()
                say(f"{dict(load.counts)}, {self.places.taken()['disk'] >> 20} MiB on disk")
                rest_at = time.monotonic() + _REST_EVERY_S
            else:
                self.incidents.happen()
        load.end()
        self.look_at_rest()
        for member in self.kept:
            for each in member.end("SIGTERM at rest"):
                self.odd(each)
        self.plain.end("all killed")
        return load

    def close(self) -> None:
        for member in self.members:
            with contextlib.suppress(AssertionError):
                member.server.kill()
        self.places.close()


_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|\d+(\.\d+)?")


def read_log(path: Path) -> tuple[int, Counter[str]]:
    """Tracebacks that go through kvtier, and how often each warning was said."""
    tracebacks = 0
    said: Counter[str] = Counter()
    inside = False
    for line in path.read_text(errors="replace").splitlines():
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and ("/kvtier/" in line or "/backends/" in line) and 'File "' in line:
            tracebacks += 1
            inside = False
        elif level := _LEVEL.search(line):
            said[_VARIES.sub("#", line[level.start() :])[:150]] += 1
    return tracebacks, said


def report(soak: Soak, load: Load, peaks: Peaks, minutes: float) -> None:
    found = Report(f"soak of {minutes:.0f} minutes, seed {SEED}")
    found.add("requests answered", load.counts["answered"], "")
    found.add("requests aborted", load.counts["aborted"], "")
    found.add("cut off by what was done", load.counts["cut off"], "")
    found.add("incidents", sum(soak.incidents.done.values()), "")
    found.at_most("wrong answers", load.counts["wrong"], "", 0)
    found.at_most("answers with a tie of two tokens", load.counts["ties"], "", 0)
    found.at_most("requests that failed", load.counts["failed"], "", 0)
    found.at_most("deaths not of our making", soak.incidents.deaths, "", 0)
    found.at_most("looks at which something was still under way", soak.restless, "", 0)
    found.at_most("other things that should not be", len(soak.incidents.strange), "", 0)
    found.add("longest answer", max(each.seconds_max for each in soak.kept), "s")
    for name, most, budget in (
        ("memory", peaks.most["memory"], len(soak.kept) * CPU_BYTES),
        ("disk", peaks.most["disk"], DISK_BYTES),
        # One PUT a thread of a server that was killed is beyond all accounts.
        ("bucket", peaks.most["bucket"], BUCKET_BYTES + 2 * THREADS * _RECORD_BYTES),
    ):
        found.at_most(f"{name}, most", most / MIB, "MiB", budget / MIB)
    for name in ("hit_blocks", "failed_loads", "corrupt_blocks", "mover_restarts", "mistakes"):
        for key, value in sorted(soak.totals.items()):
            if key.startswith(f"kvtier:{name}_total"):
                found.add(key, value, "")
    found.at_most("exceptions at the border", soak.totals["kvtier:internal_errors_total"], "", 0)
    tracebacks = 0
    for member in soak.kept:
        number, said = read_log(member.log)
        cut = sum(count for text, count in said.items() if "force killing remaining pro" in text)
        found.add(f"{member.name}: processes that vLLM did not wait for", cut, "")
        tracebacks += number
        for text, count in said.most_common(8):
            say(f"{member.name} {count} x {text}")
    found.at_most("tracebacks through kvtier", tracebacks, "", 0)
    found.finish()
    for name, count in sorted((soak.incidents.done + soak.incidents.exits).items()):
        say(f"{count} x {name}")
    for each in soak.incidents.strange:
        say(f"ODD: {each}")


def main() -> None:
    named = os.environ.get("FOLDER")
    folder = Path(named or tempfile.mkdtemp(prefix="kvtier-soak-")).absolute()
    folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    soak = Soak(folder)
    peaks = Peaks(soak.places)
    try:
        begin = time.monotonic()
        load = soak.run()
        peaks.close()
        report(soak, load, peaks, (time.monotonic() - begin) / 60)
        (folder / "totals.json").write_text(json.dumps(soak.totals, indent=1))
    finally:
        soak.close()
        if named is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
