"""The door of the command `kvtier`: what Python runs first, and so imports next to nothing.

Until a command is imported there is nothing to undo, and Ctrl-C, like all that tells it to end,
ends the process at once. An exception would come out of the middle of some import, which may print
it or make another of it.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people and services end a command by: Ctrl-C, `kill`, a closed terminal."""


class Told(KeyboardInterrupt):
    """To end, by one of these signals."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main() -> None:
    """Entry point of the `kvtier` command."""
    _fill_standard_streams()
    _print_what_can_be_printed()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)
    from kvtier.cli import commands, console

    sys.excepthook = console.report_crash
    sys.exit(commands.run(sys.argv[1:]))


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


def begin() -> None:
    """There will be something to undo: from now on what ends a command is an exception."""
    for number in ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _tell)


def _tell(number: int, frame: FrameType | None) -> None:
    raise Told(number)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
