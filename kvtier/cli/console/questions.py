"""Asking a person before what cannot be undone."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

import typer

from kvtier.cli.console.exits import EXIT_FAILURE
from kvtier.cli.console.output import warn


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
