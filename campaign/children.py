"""Rounds, and children of theirs that are killed: how they start, and what they said before."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

Say = Callable[[str], None]


class Child:
    """A forked process that reports line by line, until it ends or is killed."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self._read, write = os.pipe()
        self._said = b""
        self.lines: list[str] = []
        self.pid = os.fork()
        if not self.pid:
            os.close(self._read)
            _be(work, write)
        os.close(write)
        self.ended = False

    def listen(self, seconds: float) -> bool:
        """Take in what it says for so long; false once it has ended."""
        end = time.monotonic() + seconds
        while not self.ended and (left := end - time.monotonic()) > 0:
            if select.select([self._read], [], [], left)[0]:
                self._take()
        return not self.ended

    def _take(self) -> None:
        chunk = os.read(self._read, 1 << 16)
        self.ended = not chunk
        self._said += chunk
        *lines, self._said = self._said.split(b"\n")
        self.lines += [line.decode() for line in lines]

    def kill(self) -> None:
        """As kill -9 does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status, once it is gone."""
        while not self.ended:
            self._take()
        os.close(self._read)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def told(self, word: str) -> list[str]:
        """What followed this word, line by line."""
        return [line.partition(" ")[2] for line in self.lines if line.startswith(f"{word} ")]


def _be(work: Callable[[Say], None], pipe: int) -> None:
    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    try:
        work(say)
    except BaseException:  # a child must never return into its parent's stack
        said = " | ".join(traceback.format_exc().splitlines())
        with suppress(OSError):
            say(f"raised {said}")
        os._exit(1)
    os._exit(0)
