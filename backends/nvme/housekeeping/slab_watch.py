"""What a keeper knows of the slabs in its folder, and how it finds out what has changed there."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from kvtier.backends.nvme.folder.folder import NvmeFolder
from kvtier.backends.nvme.folder.slab_file import SlabFile
from kvtier.backends.nvme.housekeeping.problems import Problems
from kvtier.backends.nvme.housekeeping.updates import SlabUpdate, changes
from kvtier.errors import FormatError, NewerFormat

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

    def __init__(self, folder: NvmeFolder, updates: deque[SlabUpdate], problems: Problems) -> None:
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
        if abs(now - changed) < _RECENT_NS:  # one of the future is a clock's that was wrong
            changed = 0
        slots, keys = changes(known.table if known else b"", table, slab.header.slots)
        self.known[slab_id] = Known(slab, False, changed, table)
        if slots or known is None:
            self._updates.append(SlabUpdate(slab, changes=(slots, keys)))
