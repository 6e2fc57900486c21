"""What commands say: lines and JSON on standard output, warnings and notes on standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from kvtier.errors import naming

if TYPE_CHECKING:
    from rich.console import Console

OUTPUT = "standard output"
_FILE_COLUMNS = 160


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
