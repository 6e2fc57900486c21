"""What a keeper knows of the slabs in its folder, and how it finds out what has changed there."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvtier.errors import FormatError, MediumError, NewerFormat
from kvtier.slab import layout
from kvtier.slab.files import SlabFile
from kvtier.slab.folder import SlabFolder
from kvtier.types import BlockKey

logger = logging.getLogger(__name__)


class SlabUpdate(msgspec.Struct):
    """Something about a slab that the tier does not know yet."""

    slab: SlabFile
    mine: bool = False
    gone: bool = False
    remove: bool | None = None
    """Whether a slab of ours, which is too much, should be deleted or go to a neighbour."""
    table: bytes | None = None
    """Everything that the slab holds, where it becomes ours with its blocks."""
    changes: tuple[list[int], list[BlockKey]] | None = None
    """What changed in another's slab: slots, and the key of each (empty if it holds none)."""
    written: list[int] | None = None
    """Entries of these slots have been written down."""


def changes(old: bytes, new: bytes, slots: int) -> tuple[list[int], list[BlockKey]]:
    """The slots whose entries differ between two states of a table, with their present keys."""
    entries = layout.read_entries(new, slots)
    held = np.zeros(slots, bool)
    held[layout.committed(entries)] = True
    if len(old) == len(new):
        words = (
            np.frombuffer(table, np.uint64, slots * 8, layout.TABLE_AT) for table in (old, new)
        )
        before, after = (table.reshape(slots, 8) for table in words)
        different = before != after
        different[:, layout.USES_AT // 8] = False  # used, and otherwise the same
        rows = np.flatnonzero(different.any(axis=1))
    else:
        rows = np.flatnonzero(held)
    keys = layout.keys_of(entries[rows])
    here = held[rows].tolist()
    return rows.tolist(), [
        key if present else BlockKey(b"") for key, present in zip(keys, here, strict=True)
    ]


_AWAY_S = 3600.0
"""A trouble that comes back after so long is said again."""


class Problems:
    """Logs each problem of a folder once, and again only if it comes back after a long time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._said_at: dict[str, float] = {}
        self.last = ""

    @contextlib.contextmanager
    def tolerated(
        self, kind: type[Exception] | tuple[type[Exception], ...] = OSError
    ) -> Iterator[None]:
        """Report an error instead of raising it: one strange file must not stop all other work."""
        try:
            yield
        except kind as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log an error of the folder; with a trace if it is none of the disk's."""
        problem = getattr(error, "strerror", 0) or str(error) or type(error).__name__
        self.last = str(problem)
        trace = None if isinstance(error, (OSError, MediumError)) else error
        self.warn_once(f"{self._root}: {problem}", trace)

    def warn_once(self, message: str, trace: Exception | None = None) -> None:
        """Log a message unless it was logged lately."""
        before, self._said_at[message] = self._said_at.get(message, -_AWAY_S), time.monotonic()
        if self._said_at[message] - before > _AWAY_S:
            logger.warning("%s", message, exc_info=trace)


_RECENT_NS = 100_000_000
"""File times are coarse: a table written this recently is read again even if it looks unchanged."""


class Known(msgspec.Struct):
    """A slab as the keeper last saw it."""

    slab: SlabFile
    mine: bool
    changed_ns: int = 0
    table: bytes = b""


class SlabWatch:
    """Re-reads the tables of others' slabs that changed, and reports the changes as updates."""

    def __init__(self, folder: SlabFolder, updates: deque[SlabUpdate], problems: Problems) -> None:
        self._folder = folder
        self._updates = updates
        self._problems = problems
        self.known: dict[int, Known] = {}
        self.broken: set[int] = set()
        """Slabs whose tables could not be understood."""

    def look(self) -> None:
        """Learn of all changes since the last look."""
        present = self._folder.slab_ids()
        self.broken &= present
        for slab_id in [slab_id for slab_id in self.known if slab_id not in present]:
            known = self.known.pop(slab_id)
            self._updates.append(SlabUpdate(known.slab, gone=True))
        for slab_id in present:
            self._look_at(slab_id)

    def _look_at(self, slab_id: int) -> None:
        known = self.known.get(slab_id)
        if known is not None and known.mine:
            return
        now = time.time_ns()  # not later: what changes after the look may bear the same time
        try:
            changed = self._folder.changed_ns(slab_id)
            if known is not None and known.changed_ns == changed:
                return
            slab, table = self._folder.read_table(slab_id)
        except NewerFormat as error:
            self._problems.warn_once(f"slab {slab_id:08x} is left alone: {error}")
            return
        except FormatError as error:
            if not self._folder.table_path(slab_id).exists():
                return  # it is being removed
            self.broken.add(slab_id)
            self._problems.warn_once(f"slab {slab_id:08x} is broken: {error}")
            return
        except FileNotFoundError:
            return
        except OSError as error:  # one strange file must not stop the work on all others
            self._problems.warn_once(f"slab {slab_id:08x} cannot be read: {error.strerror}")
            return
        if not self._folder.alive(slab.owner):
            # to be adopted, and learnt from then; if by another, what is known already counts
            self.known[slab_id] = Known(slab, False, table=known.table if known else b"")
            return
        if now - _RECENT_NS < changed < time.time_ns() + _RECENT_NS:  # later: a clock was wrong
            changed = 0
        slots, keys = changes(known.table if known else b"", table, slab.header.slots)
        self.known[slab_id] = Known(slab, False, changed, table)
        if slots or known is None:
            self._updates.append(SlabUpdate(slab, changes=(slots, keys)))
