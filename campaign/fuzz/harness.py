"""Hostile inputs for one parser: made out of a corpus by a seed, and what none of them may do."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec


class Target(msgspec.Struct, kw_only=True):
    """One parser."""

    name: str
    corpus: Sequence[bytes]
    parse: Callable[[bytes], None]
    typed: tuple[type[BaseException], ...]
    """Anything else that it raises is a finding."""
    words: Sequence[bytes] = ()
    """Pieces that mean something to it."""
    share: float = 1.0
    """Of the inputs: for what is slow by its nature."""


JSON_WORDS = (
    *(b'"', b"[", b"]", b"{", b"}", b"null", b"true", b"1e999", b"-1"),
    *(b"[[[[", b'"\\ud800"', b"NaN"),
)
"""Pieces that mean something to whoever reads JSON."""
_BYTES_MAX = 1 << 14
_CORPUS_MAX = 400
_NUMBERS = (
    *(0, 1, 2, 3, 4, 40, 41, 64, 127, 255, 256, 4095, 4096, 4097, 0xFFFF, 1 << 20, 1 << 24),
    *(0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, 1 << 53, (1 << 63) - 1, (1 << 64) - 1),
)


class Mutator:
    """Makes inputs, and keeps those that reached what none had reached before."""

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], seed: str) -> None:
        self.corpus = list(corpus)
        self._words = [*words, b"\0", b"\xff", b"\n", b"\r\n"]
        self._dice = random.Random(seed)
        self._lines: set[tuple[str, int]] = set()

    def next(self) -> bytes:
        """An input: one of the corpus, changed in a few places."""
        data = bytearray(self._dice.choice(self.corpus))
        for _ in range(self._dice.choice((1, 1, 2, 3, 6))):
            self._dice.choice(_CHANGES)(self, data)
        return bytes(data[:_BYTES_MAX])

    def traced(self, call: Callable[[bytes], None], data: bytes) -> None:
        """Make a call; keep the input if it reached a line of kvtier's that is new."""
        before = len(self._lines)
        sys.settrace(self._enter)
        try:
            call(data)
        finally:
            sys.settrace(None)
            if len(self._lines) > before and len(self.corpus) < _CORPUS_MAX:
                self.corpus.append(data)

    @property
    def lines(self) -> int:
        """How many lines have been reached."""
        return len(self._lines)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        return self._line if "/kvtier/" in name or "/backends/" in name else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    # -- changes

    def _at(self, data: bytearray) -> int:
        """Often near the beginning, where headers are."""
        end = len(data) if self._dice.random() < 0.5 else min(len(data), 128)
        return self._dice.randrange(end + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[min(self._at(data), len(data) - 1)] ^= 1 << self._dice.randrange(8)

    def _overwrite(self, data: bytearray) -> None:
        at = self._at(data)
        data[at : at + 4] = self._dice.randbytes(self._dice.randint(1, 4))

    def _number(self, data: bytearray) -> None:
        form = self._dice.choice(("<B", "<H", "<I", "<Q", ">I"))
        size = struct.calcsize(form)
        value = self._dice.choice(_NUMBERS) & ((1 << 8 * size) - 1)
        at = self._at(data)
        data[at : at + size] = struct.pack(form, value)

    def _digits(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = str(self._dice.choice((*_NUMBERS, -1, 1e308, "0" * 5000))).encode()

    def _word(self, data: bytearray) -> None:
        at = self._at(data)
        data[at : at + self._dice.choice((0, 0, 1, 8))] = self._dice.choice(self._words)

    def _remove(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self._dice.choice((1, 2, 8, 64, 1 << 14))]

    def _repeat(self, data: bytearray) -> None:
        at = self._at(data)
        piece = bytes(data[at : at + self._dice.choice((1, 4, 64))])
        data[at:at] = piece * self._dice.choice((1, 2, 64, 1000))

    def _join(self, data: bytearray) -> None:
        other = self._dice.choice(self.corpus)
        data[self._at(data) :] = other[self._dice.randrange(len(other) + 1) :]


_CHANGES = (
    *(Mutator._flip, Mutator._overwrite, Mutator._number, Mutator._digits),
    *(Mutator._word, Mutator._remove, Mutator._repeat, Mutator._join),
)


SECONDS_MAX = 1.0
"""Of the thread's own time: the machine may be busy with something else."""
KIB_MAX = 64 << 10
Typed = tuple[type[BaseException], ...]
_TOUCHING = frozenset(
    {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}
    | {"os.truncate", "os.chmod", "os.listdir", "os.scandir", "subprocess.Popen", "os.system"}
    | {"socket.connect", "os.exec", "os.posix_spawn", "os.fork"}
)


class TooMuch(AssertionError):
    """An input took too long, too much memory, or touched what it must not."""


class Bounds:
    """Watches calls, one at a time, in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._watching = False
        self._touched = ""
        sys.addaudithook(self._heard)

    def begin(self) -> None:
        """Forget what took much memory before: the kernel tells of the most that there was."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def call(self, parse: Callable[[bytes], None], data: bytes, typed: Typed) -> bool:
        """Parse an input: whether it was taken. Raises TooMuch, and what is not typed."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.thread_time()
        self._touched, self._watching = "", True
        taken = True
        try:
            parse(data)
        except typed:
            taken = False
        finally:
            self._watching = False
        seconds = time.thread_time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if seconds > SECONDS_MAX:
            raise TooMuch(f"it took {seconds:.1f} s")
        if grown > KIB_MAX:
            raise TooMuch(f"it took {grown >> 10} MiB")
        if self._touched:
            raise TooMuch(f"it touched {self._touched}")
        return taken

    def _heard(self, event: str, args: tuple[object, ...]) -> None:
        if not self._watching or event not in _TOUCHING:
            return
        path = args[0] if args else ""
        if event in ("open", "os.truncate") and not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is open already
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else event
        if text.startswith("/proc/self/fd/"):  # a name in a folder that is open
            text = str(Path(text).parent.resolve())
        mine = text.startswith((self._folder, sys.prefix, sys.base_prefix))
        mine = mine or (bool(text.strip(".")) and "/" not in text)  # likewise
        if not mine and not text.endswith((".py", ".pyc")):  # an import, at a first use
            self._touched = f"{event} {text}"
