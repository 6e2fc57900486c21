"""Inputs out of a corpus: cut, joined, flipped, repeated and overwritten, by a seed."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

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
