"""How commands speak to people and to programs, ask, and end; `from kvtier.cli import console`.

Lines, tables and JSON go to standard output, warnings and notes to standard error; progress shows
on terminals only. Exit codes: 0 all is well, 1 something was found or failed, 2 the call or the
configuration is wrong, 130, 143 and 129 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli.signals import EndSignal
from kvtier.errors import (
    MORE_MEMORY,
    ConfigError,
    ConfigErrors,
    KVTierError,
    describe_error,
    naming,
)

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CLOSED_PIPE = 141
OUTPUT = "standard output"

_MORE_THREADS = "raise the limit (ulimit -u and -v, or the container's of pids and memory)"
_FILE_COLUMNS = 160
_FOLDED_COLUMNS = 3
_NAME_COLUMNS = 40
"""Names are filled up to the longest, at most to this: any may come from elsewhere, and be long."""
_GAP = 2
"""Between two columns of a table."""

# -- lines and JSON --------------------------------------------------------------------------------


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


def say(text: str = "") -> None:
    """One line to the person who called."""
    with naming(OUTPUT):
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


def print_json(value: object) -> None:
    """One JSON document to the program that called."""
    import json

    import msgspec

    from kvtier.settings import show_hook

    # In ASCII, whatever the locale is; names of files may hold bytes that are no text.
    text = json.dumps(msgspec.to_builtins(value, enc_hook=show_hook), indent=2, allow_nan=False)
    with naming(OUTPUT):
        print(text)


# -- tables ----------------------------------------------------------------------------------------


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
    with naming(OUTPUT):
        stdout().print(table)


def print_values(values: Mapping[str, object]) -> None:
    """Names and values under each other."""
    width = min(max(map(len, values), default=0), _NAME_COLUMNS)
    for name, value in values.items():
        say(f"{name:<{width}}  {value}")


# -- how far it has come ---------------------------------------------------------------------------


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
        from kvtier import amounts

        text = f"{self._what} {self.done}"
        if self._total:
            text += f" of {self._total} {self._unit} {amounts.share(self.done, self._total)}"
        if self.bytes and seconds > 0:
            text += f", {amounts.rate(self.bytes / seconds)}"
        if 0 < self.done < self._total:
            left = seconds * (self._total - self.done) / self.done
            text += f", {amounts.duration(left)} left"
        return text

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Progress]:
    """A line that says how far something has come, gone at the end. It is there at once: a store
    that does not answer, or the first of a few long simulations, is waited for before any end."""
    bar = Progress(what, total, unit)
    try:
        bar.advance(0)
        yield bar
    finally:
        bar.clear()


# -- questions -------------------------------------------------------------------------------------


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
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        print(question, end="", file=sys.stderr, flush=True)
        while sys.stdin not in select.select([sys.stdin, reader], [], [])[0]:
            os.read(reader, 64)  # of a signal that ended nothing
        return sys.stdin.readline()
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _end_question() -> None:
    with suppress(OSError):  # the terminal may have gone
        print(file=sys.stderr)


# -- how a command ends ----------------------------------------------------------------------------


def explain(error: KVTierError | OSError) -> int:
    """Say what went wrong in one sentence a mistake, and answer the exit code."""
    if isinstance(error, ConfigErrors):
        for each in error.errors:
            warn(str(each))
    else:
        warn(describe_error(error))
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def end_output(code: int) -> int:
    """Write what is still buffered, which may fail only now; answers the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, EndSignal) as error:
        # What cannot be written goes nowhere, or the interpreter would try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, EndSignal):  # nobody reads on, as in a pager
            return 128 + error.number
        if isinstance(error, BrokenPipeError):
            return EXIT_CLOSED_PIPE
        error.filename = OUTPUT
        return explain(error)
    return code


def report_crash(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """`sys.excepthook` of the command line: a mistake in kvtier itself, without a traceback."""
    if os.environ.get("KVTIER_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, MemoryError):
        warn(f"Cannot allocate memory; {MORE_MEMORY}")
    elif str(error) == "can't start new thread":  # for which Python has no type of its own
        warn(f"no more threads can be started here; {_MORE_THREADS}")
    else:
        warn(
            f"a mistake in kvtier: {kind.__name__}: {error}; "
            "please report it with what KVTIER_TRACEBACK=1 prints"
        )
