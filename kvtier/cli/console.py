"""What all commands share: how they speak to people and to programs, and how they end.

Exit codes: 0 all is well, 1 something was found or failed, 2 the call or the configuration is
wrong, 130, 143 and 129 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli import main
from kvtier.errors import ConfigError, ConfigErrors, KVTierError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.cli.holdings import Place

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CLOSED_PIPE = 141


_OUTPUT = "standard output"
_FILE_COLUMNS = 160
_FOLDED_COLUMNS = 3
_NAME_COLUMNS = 40
"""Names are filled up to the longest, at most to this: any may come from elsewhere, and be long."""
_GAP = 2
"""Between two columns of a table."""
HELP = {"help_option_names": ["-h", "--help"]}


def new_app() -> typer.Typer:
    """The Typer of one command; with a single function in it, it is the command itself."""
    return typer.Typer(
        no_args_is_help=False,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=HELP,
    )


def stdout() -> Console:
    """The console of standard output: as wide as the terminal, colours only on one."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise  # where every other end of a pipe is handled; rich would end the process

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Ours(highlight=False, width=_FILE_COLUMNS if wide else None)


# What names and messages from media and stores must not do to a terminal: move it, colour it.
_CONTROL = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def plain(text: str) -> str:
    """A text without characters that a terminal obeys instead of showing them."""
    return text.translate(_CONTROL)


@contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """What fails here says where, though only an error in opening a file brings its name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise


def say(text: str = "") -> None:
    """One line to the person who called."""
    with naming(_OUTPUT):
        print(plain(text))


def say_wrapped(text: str, indent: int = 0) -> None:
    """A sentence, broken where the terminal ends; later lines are indented."""
    import textwrap

    later = " " * indent
    width = max(20, stdout().width)
    lines = textwrap.wrap(
        text, width, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    say("\n".join(lines))


def warn(text: str) -> None:
    """One line to standard error."""
    line = plain(text).replace("\n", "\ufffd")  # of a name; a message has none
    print(f"kvtier: {line}", file=sys.stderr)


def speak_for_log() -> None:
    """What the library warns of, in the form of what the command itself says."""
    import logging

    class Plain(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"kvtier: {plain(super().format(record))}"

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Plain())


def note(text: str) -> None:
    """What is going on, to a person who waits: only on a terminal."""
    if sys.stderr.isatty():
        print(f"kvtier: {text} ...", file=sys.stderr)


class Progress:
    """How far something has come: shown on a terminal only, a few times a second."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._start = self._next = time.monotonic()
        self.done = self.bytes = 0

    def advance(self, count: int, size: int = 0) -> None:
        """So much more is done."""
        self.done += count
        self.bytes += size
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + 0.2
            line = self.line(now - self._start)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """How much of what is done, how fast, and the time left."""
        from kvtier.observe import human

        text = f"{self._what} {self.done}"
        if self._total:
            text += f" of {self._total} {self._unit} {human.share(self.done, self._total)}"
        if self.bytes and seconds > 0:
            text += f", {human.rate(self.bytes / seconds)}"
        if 0 < self.done < self._total:
            left = seconds * (self._total - self.done) / self.done
            text += f", {human.duration(left)} left"
        return text

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Progress]:
    """A line that says how far something has come, gone at the end."""
    bar = Progress(what, total, unit)
    try:
        yield bar
    finally:
        bar.clear()


def confirm(question: str, yes: bool) -> None:
    """Ask before what cannot be undone; raises typer.Exit or a wrong call without an answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: say --yes", param_hint="--yes")
    try:
        answer = ""
        while answer not in ("y", "yes", "n", "no"):
            line = _typed(f"{question} [y/N]: ")
            answer = line.strip().lower() or "no"
    except KeyboardInterrupt:
        _end_question()
        raise
    if not line:
        _end_question()
    if answer not in ("y", "yes"):
        warn("nothing was changed")
        raise typer.Exit(EXIT_FAILURE)


def _typed(question: str) -> str:
    """The line that is typed; nothing at the end of the input. A signal that comes just before a
    read would be heard of only when something is typed, so both are waited for."""
    heard, hear = os.pipe()
    os.set_blocking(hear, False)
    before = signal.set_wakeup_fd(hear)
    try:
        print(question, end="", file=sys.stderr, flush=True)
        while sys.stdin not in select.select([sys.stdin, heard], [], [])[0]:
            os.read(heard, 64)  # of a signal that ended nothing
        return sys.stdin.readline()
    finally:
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(hear)


def _end_question() -> None:
    with suppress(OSError):  # the terminal may have gone
        print(file=sys.stderr)


def troubles_of(places: Iterable[Place]) -> list[str]:
    """What could not be read of all these."""
    return [trouble for place in places for trouble in place.troubles]


def end_with_troubles(places: Iterable[Place], *, failed: bool = False) -> None:
    """Say what could not be read; end with a failure if there is any of it, or something failed."""
    if _warn_of_troubles(places) or failed:
        raise typer.Exit(EXIT_FAILURE)


def looked_at(places: Iterable[Place]) -> str:
    """Where something is not that was looked for: it may be in what could not be read, so that is
    said before."""
    return "in what can be seen" if _warn_of_troubles(places) else "here"


def _warn_of_troubles(places: Iterable[Place]) -> bool:
    troubles = troubles_of(places)
    for trouble in troubles:
        warn(trouble)
    return bool(troubles)


def print_json(value: object) -> None:
    """One JSON document to the program that called."""
    import json

    import msgspec

    from kvtier.core.settings.values import show_hook

    # In ASCII, whatever the locale is; names of files may hold bytes that are no text.
    text = json.dumps(msgspec.to_builtins(value, enc_hook=show_hook), indent=2, allow_nan=False)
    with naming(_OUTPUT):
        print(text)


def fits(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
    """Whether a table fits the terminal, without a cell that is broken into lines."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    return sum(widths) + _GAP * (len(columns) - 1) <= stdout().width


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()
) -> None:
    """A table; `numbers` names the columns that are aligned to the right.

    Where it does not fit, rows with many columns are written as names and values.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if len(columns) > _FOLDED_COLUMNS and not fits(columns, rows):
        for index, row in enumerate(rows):
            if index:
                say()
            print_values(dict(zip(columns, row, strict=True)))
        return
    right = (0, _GAP - 1, 0, 0)  # the rest of the gap is where rich would draw a line
    table = Table(box=box.SIMPLE_HEAD, padding=right, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    with naming(_OUTPUT):
        stdout().print(table)


def print_values(values: Mapping[str, object]) -> None:
    """Names and values under each other."""
    width = min(max(map(len, values), default=0), _NAME_COLUMNS)
    for name, value in values.items():
        say(f"{name:<{width}}  {value}")


_MORE_MEMORY = "free some, or raise the limit (ulimit -v, or the container's)"
_MORE_THREADS = "raise the limit (ulimit -u and -v, or the container's of pids and memory)"
_REMEDIES = {
    errno.EACCES: "run this as its owner, or change its rights",
    errno.EPERM: "run this as its owner",
    errno.EIO: "its disk may be failing: see dmesg",
    errno.EBADMSG: "its file system is damaged: see dmesg",
    errno.EUCLEAN: "its file system is damaged: see dmesg",
    errno.ENOENT: "name one that exists",
    errno.ENOTDIR: "name one in a folder that exists",
    errno.EISDIR: "name a file",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOTCONN: "mount it again",
    errno.ESTALE: "mount it again",
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some room there",
    errno.ENOMEM: _MORE_MEMORY,
    errno.EMFILE: "raise the limit: ulimit -n",
    errno.EFBIG: "raise the limit: ulimit -f unlimited",
    errno.EROFS: "name a place that can be written to",
}


def said_of(error: KVTierError | OSError) -> str:
    """What went wrong, and what to do."""
    if not isinstance(error, OSError):
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{name}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


def explain(error: KVTierError | OSError) -> int:
    """Say what went wrong in one sentence a mistake, and answer the exit code."""
    if isinstance(error, ConfigErrors):
        for each in error.errors:
            warn(str(each))
    else:
        warn(said_of(error))
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def end_output(code: int) -> int:
    """Write what is still buffered, which may fail only now; answers the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, main.Told) as error:
        # What cannot be written goes nowhere, or the interpreter would try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, main.Told):  # nobody reads on, as in a pager
            return 128 + error.number
        if isinstance(error, BrokenPipeError):
            return EXIT_CLOSED_PIPE
        error.filename = _OUTPUT
        return explain(error)
    return code


def report_crash(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """`sys.excepthook` of the command line: a mistake in kvtier itself, without a traceback."""
    if os.environ.get("KVTIER_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, MemoryError):
        warn(f"Cannot allocate memory; {_MORE_MEMORY}")
    elif str(error) == "can't start new thread":  # for which Python has no type of its own
        warn(f"no more threads can be started here; {_MORE_THREADS}")
    else:
        warn(
            f"a mistake in kvtier: {kind.__name__}: {error}; "
            "please report it with what KVTIER_TRACEBACK=1 prints"
        )
