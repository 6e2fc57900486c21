"""A parser with its corpus, and the errors that it may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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


MakeTargets = Callable[[Path], list[Target]]
"""Makes targets; files of theirs lie in this folder."""
