"""What an NVMe tier retains: its list lies in the folder, and beside it what people pin.

Both are read and written by the keeper's thread, but for the start. Each engine has a list under
its name; all engines of a namespace heed what is pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from kvtier.backends.nvme.folder.files import list_files, list_path, pins_path
from kvtier.backends.nvme.housekeeping.keeper import Keeper
from kvtier.backends.nvme.single_thread import SerializedTier
from kvtier.core.retained import kept_file
from kvtier.core.retained.kept_list import KeptList
from kvtier.core.retained.retained_blocks import BLOCKS_MAX
from kvtier.errors import FormatError
from kvtier.types import BlockKey

LISTS_MAX = 64
"""The oldest lists beyond are removed: of engines whose names nobody uses any more."""


class RetainingNvmeTier(SerializedTier):
    """Keeps its list in the folder, and heeds what is pinned there."""

    engine = "default"
    """The name under which the list is kept."""
    _keeper: Keeper
    _kept: KeptList | None = None
    _heeds_pins = False
    _read: dict[BlockKey, float] | None = None
    """Read by the keeper's thread, to be taken in by the tier's own."""
    _read_stamp: tuple[int, int, int] | None = None

    def retain_at_most(self, blocks: int) -> None:
        keeper, folder = self._keeper, self._keeper.folder
        with self.mutex:
            super().retain_at_most(blocks)
            if not blocks or keeper.limits.discard:
                return
            path = list_path(folder.home, self.engine)
            self._kept = KeptList(self.retained, path, folder.namespace.digest, folder.disk)
            self._kept.begin()
            self._begin_with_pins()
        for old in list_files(folder.home)[:-LISTS_MAX]:
            with contextlib.suppress(OSError):
                folder.disk.unlink(old)
        keeper.at_end = self._write_at_end

    def retain_as_others(self) -> None:
        """Retain what engines of the namespace have, and what is pinned, for who fills the folder
        in their place: it has no list of its own."""
        keeper, folder = self._keeper, self._keeper.folder
        with self.mutex:
            super().retain_at_most(BLOCKS_MAX)
            for path in list_files(folder.home):
                try:
                    self.retained.restore(kept_file.read(path, folder.namespace.digest))
                except (FormatError, OSError) as error:
                    keeper.warn_once(f"{path} does not say what is retained: {error}")
            self._begin_with_pins()

    def _begin_with_pins(self) -> None:
        self._heeds_pins = True
        self._look_at_pins()
        self._take_pins()

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        with self.mutex:
            return super().retain(keys, session, until)

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        with self.mutex:
            super().release(session, keys, all=all)

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        with self.mutex:
            return super().retained_for(session)

    def tick(self) -> None:
        super().tick()
        self._take_pins()

    def _take_pins(self) -> None:
        pins, self._read = self._read, None
        if pins is not None:
            self.retained.pin(pins)
            self._let_go_of_ended()

    # -- the keeper's thread ---------------------------------------------------------------

    def take_in_if_idle(self) -> None:
        if self._kept is not None:
            self._kept.write()
        if self._heeds_pins:
            self._look_at_pins()
        super().take_in_if_idle()

    def _write_at_end(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def _look_at_pins(self) -> None:
        """Read what is pinned if that has changed; what cannot be read changes nothing."""
        folder = self._keeper.folder
        path = pins_path(folder.home)
        seen = _stamp(path)
        if seen == self._read_stamp:
            return
        self._read_stamp = seen
        try:
            self._read = kept_file.read_pins(path, folder.namespace.digest)
        except (FormatError, OSError) as error:
            self._keeper.warn_once(f"{path} does not say what is pinned: {error}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size
