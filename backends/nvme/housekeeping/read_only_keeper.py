"""A folder that may only be read: a read-only mount, or another's folder.

Nothing is locked, claimed or written there, so nobody knows of its readers. Nor need they know who
lives: all slabs count as another's, whose owner may write to them at any moment, and every block is
proved when it is loaded.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvtier.backends.nvme.folder.folder import NvmeFolder
from kvtier.backends.nvme.folder.namespace_diff import differs_in
from kvtier.backends.nvme.folder.slab_file import NOBODY
from kvtier.backends.nvme.housekeeping.keeper import Keeper
from kvtier.errors import MediumError
from kvtier.settings import WritePolicy

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Most such folders never change. Where somebody writes beside us, it is known so much later."""
_LOOK_SHARE = 10


def only_reads(path: Path, write: WritePolicy) -> bool:
    """Whether a tier of these settings has no more than its reading to do in this folder."""
    return write is WritePolicy.NEVER and path.is_dir() and not os.access(path, os.W_OK | os.X_OK)


class ReadOnlyFolder(NvmeFolder):
    """One namespace's part of a folder in which nothing is ever written."""

    settled_ns = 1 << 63
    """Never: it may be another machine's, and not say when something has come."""

    def establish(self) -> None:
        """Say what is in the way; raises MediumError where blocks are that cannot be read."""
        if not self.home.is_dir():
            facts = differs_in(self.root, self.namespace)
            logger.warning(
                "%s is only read, and has nothing of this model%s",
                self.root,
                f" as it is now; what it has does not fit: {facts}" if facts else "",
            )
        elif not os.access(self.home, os.R_OK | os.X_OK):
            raise MediumError(f"no right to read {self.home}: run this as its owner, or allow it")

    def claim(self) -> tuple[int, int]:
        return NOBODY, -1

    def alive(self, owner: int) -> bool:
        """Nobody can tell here. Whom nobody succeeds must not be waited for: they all are."""
        return True


class ReadOnlyKeeper(Keeper):
    """A keeper that only looks."""

    def pause(self) -> float:
        return max(_LOOK_S, _LOOK_SHARE * self._look_took)

    def _round(self, thorough: bool) -> None:
        self._look()

    def flush(self) -> None:
        """Nothing is written down."""

    def _end(self) -> None:
        """Nothing is to be let go of."""
