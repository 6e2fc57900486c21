"""The entry point of the command: what Python runs first, and so imports next to nothing."""

from __future__ import annotations

import codecs
import io
import os
import sys

from kvtier.cli import signals


def main() -> None:
    """Entry point of the `kvtier` command."""
    _fill_standard_streams()
    _print_what_can_be_printed()
    signals.leave_at_once()
    from kvtier.cli import app, console

    sys.excepthook = console.report_crash
    sys.exit(app.run(sys.argv[1:]))


def _fill_standard_streams() -> None:
    """A stream that the caller has closed leads nowhere. Its number would otherwise go to the next
    file that is opened, a block's perhaps, and what is printed with it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # also for what is run from here, like a server
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


# What stands for a character of ours, where the terminal or file takes no Unicode.
_NEAREST = dict(zip("·░▒▓█▏▎▍▌▋▊▉", ".:+%#-------", strict=True))


def _print_what_can_be_printed() -> None:
    """Not every locale has all characters, and a file's name may be no text at all: what cannot be
    printed is shown as well as can be, and stops nobody."""

    def show(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        wrong = error.object[error.start : error.end]
        return "".join(map(_shown, wrong)), error.end

    codecs.register_error("kvtier", show)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="kvtier")


def _shown(letter: str) -> str:
    byte = ord(letter) - 0xDC00  # so Python reads a byte of a name that is not UTF-8
    return f"\\x{byte:02x}" if 0 <= byte < 0x100 else _NEAREST.get(letter, "?")
