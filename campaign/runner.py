"""Plays rounds, one after the other, each in a process of its own, and keeps the books in a file.

The next round is of the scenario that has had the least time for its share. So the order of rounds
hangs on the machine, but no round hangs on another: scenario, seed and number repeat it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from campaign.children import Child, Say
from campaign.round import Finding, Result, Round, Scenario
from kvtier import __version__
from kvtier.system.disk import lock_within

_WRITE_S = 5.0
_TELL_S = 60.0
_NOTES_MAX = 64
_BEAT_S = 0.25
_LOOKS = 10
"""In the time after which a round that counts nothing hangs."""


class Tally(msgspec.Struct):
    """What a scenario has had so far."""

    rounds: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = {}
    notes: list[str] = []
    """Of its last rounds."""


class Books(msgspec.Struct):
    """All that a campaign remembers: what it goes on from."""

    seed: int
    begun: str
    versions: list[str] = []
    tallies: dict[str, Tally] = {}
    findings: list[Finding] = []

    @property
    def seconds(self) -> float:
        """The time of all rounds."""
        return sum(tally.seconds for tally in self.tallies.values())


class Runner:
    """One campaign in its folder."""

    def __init__(self, folder: Path, seed: int, scenarios: Mapping[str, Scenario]) -> None:
        self.folder = folder = folder.absolute()  # stacks name it in URLs
        self.scenarios = scenarios
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "books.json"
        self._lock = (folder / "lock").open("w")
        try:
            self.books = self._opened(seed)
        except BaseException:
            self._lock.close()
            raise
        if (versions := _versions()) not in self.books.versions:
            self.books.versions.append(versions)
        self._written = self._told = 0.0

    def _opened(self, seed: int) -> Books:
        """What was there before, if there was anything; raises SystemExit if it is another's."""
        if not lock_within(self._lock.fileno(), fcntl.LOCK_EX, 0.0):
            raise SystemExit(f"another campaign is at work in {self.folder}: name another FOLDER")
        if not self._file.exists():
            return Books(seed, time.strftime("%Y-%m-%d %H:%M"))
        books = msgspec.json.decode(self._file.read_bytes(), type=Books)
        if books.seed != seed:
            raise SystemExit(
                f"{self.folder} has a campaign of seed {books.seed}: go on with SEED={books.seed}, "
                "or name another FOLDER"
            )
        return books

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()

    def run(self, seconds: float) -> None:
        """As many rounds as begin within so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            scenario = min(self.scenarios.values(), key=self._had)
            self.play(scenario, self._tally(scenario).rounds)
            self._tell(end - time.monotonic())
        self._write()

    def play(self, scenario: Scenario, number: int) -> Result:
        """One round, entered into the books."""
        began = time.monotonic()
        home = self.folder / f"{scenario.name}-{number}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        result = _in_process(scenario, Round(scenario.name, self.books.seed, number, home))
        shutil.rmtree(home, ignore_errors=True)
        tally = self._tally(scenario)
        tally.rounds = max(tally.rounds, number + 1)
        tally.seconds += time.monotonic() - began
        tally.counts = dict(Counter(tally.counts) + Counter(result.counts))
        notes = [f"round {number}: {note}" for note in result.notes]
        tally.notes = [*tally.notes, *notes][-_NOTES_MAX:]
        for text in result.findings:
            self.books.findings.append(Finding(scenario.name, number, text))
            print(f"\nFOUND by {scenario.name}, round {number}: {text}", flush=True)
        if result.findings or time.monotonic() - self._written > _WRITE_S:
            self._write()
        return result

    def _tally(self, scenario: Scenario) -> Tally:
        return self.books.tallies.setdefault(scenario.name, Tally())

    def _had(self, scenario: Scenario) -> float:
        return (self._tally(scenario).seconds + scenario.round_s) / (scenario.share or 1.0)

    def _write(self) -> None:
        self._written = time.monotonic()
        making = self._file.with_suffix(".making")
        making.write_bytes(msgspec.json.format(msgspec.json.encode(self.books), indent=1))
        making.replace(self._file)

    def _tell(self, left: float) -> None:
        live = sys.stderr.isatty()
        if not live and time.monotonic() - self._told < _TELL_S:
            return
        self._told = time.monotonic()
        rounds = ", ".join(f"{name} {one.rounds}" for name, one in self.books.tallies.items())
        line = f"{left / 60:.0f} min left; rounds: {rounds}; {len(self.books.findings)} findings"
        print(f"\r{line}\033[K" if live else line, end="" if live else "\n", file=sys.stderr)
        sys.stderr.flush()


def _in_process(scenario: Scenario, round: Round) -> Result:
    """Play a round in a child: one that dies or hangs is a finding, and leaves nothing behind."""
    child = Child(lambda say: _play(scenario, round, say))
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(child.pid, child.pid)  # as it does itself, perhaps only later
    quiet = heard = 0
    try:
        while quiet < _LOOKS and child.listen(scenario.limit_s / _LOOKS):
            quiet = quiet + 1 if len(child.lines) == heard else 0
            heard = len(child.lines)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with all that it has started
        status = child.wait()
    if said := child.told("result"):
        return msgspec.json.decode(said[0], type=Result)
    why = "hangs" if quiet == _LOOKS else f"died: status {status}"
    return Result({}, [f"the round {why}"])


def _play(scenario: Scenario, round: Round, say: Say) -> None:
    """In the child."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger().addHandler(logging.NullHandler())  # what is damaged is warned of
    ended = threading.Event()
    beats = threading.Thread(target=_tell_progress, args=(round, say, ended), daemon=True)
    beats.start()
    try:
        scenario.play(round)
    except BaseException:  # whatever it is
        round.found(traceback.format_exc())
    ended.set()
    beats.join()
    say(f"result {msgspec.json.encode(round.result).decode()}")


def _tell_progress(round: Round, say: Say, ended: threading.Event) -> None:
    """Tell whenever the round has counted something: where others have the machine, a round takes
    minutes, and does not hang."""
    before = 0
    while not ended.wait(_BEAT_S):
        if (counted := sum(list(round.counts.values()))) != before:
            before = counted
            say("beat")


def _versions() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return (
        f"kvtier {__version__} ({commit or 'no repository'}), Python "
        f"{platform.python_version()}, Linux {platform.release()}"
    )


def write_report(runner: Runner) -> Path:
    """Both files, beside the books; the path of the Markdown."""
    folder, books = runner.folder, runner.books
    (folder / "report.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(books), indent=1) + b"\n"
    )
    page = folder / "report.md"
    page.write_text(_markdown(books, list(runner.scenarios.values())))
    return page


def _markdown(books: Books, scenarios: list[Scenario]) -> str:
    lines = [
        f"# Campaign with seed {books.seed}",
        "",
        f"Begun {books.begun}; {books.seconds / 3600:.2f} hours of rounds. "
        + "; ".join(books.versions)
        + ".",
        "",
        f"**Findings: {len(books.findings)}.**",
        "",
    ]
    for one in books.findings:
        again = f"make campaign SEED={books.seed} ONLY={one.scenario} ROUND={one.round}"
        lines += [f"- `{again}`", "", "```text", one.text.rstrip(), "```", ""]
    for scenario in scenarios:
        tally = books.tallies.get(scenario.name)
        if tally is None:
            continue
        minutes = max(tally.seconds / 60, 1e-9)
        lines += [
            f"## {scenario.name}",
            "",
            scenario.about,
            "",
            f"{tally.rounds} rounds in {minutes:.1f} minutes.",
            "",
            "| what | count | a minute |",
            "|---|---|---|",
        ]
        lines += [
            f"| {what} | {count:,} | {count / minutes:,.0f} |"
            for what, count in sorted(tally.counts.items())
        ]
        lines.append("")
        lines += [f"- {note}" for note in tally.notes]
        lines.append("")
    return "\n".join(lines)
