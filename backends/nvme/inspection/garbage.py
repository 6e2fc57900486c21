"""What lies in an NVMe tier's folder that nobody will ask for again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from kvtier.backends.nvme.folder.files import (
    DATA_SUFFIX,
    TABLE_SUFFIX,
    halves,
    homes,
    is_newer,
    length,
    marks,
    remove_bare_home,
    remove_slab,
    slab_files,
    unfinished,
    used_at,
)
from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.backends.nvme.folder.retaining_slabs import retaining
from kvtier.backends.nvme.inspection.offline_locks import has_live_owner, has_owner_now
from kvtier.core.slab.slab_files import Slab
from kvtier.inspect.contents import Garbage, size_below
from kvtier.inspect.inspector import left_behind
from kvtier.system.disk import Disk, is_locked


def find_garbage(
    root: Path,
    slabs: Sequence[Slab],
    over: int,
    idle_s: float | None,
    troubled: Callable[[], AbstractContextManager[None]],
) -> Iterator[Garbage]:
    """What goes of a folder whose slabs take so many bytes more than they may. What cannot be
    looked at is `troubled`, and hides nothing else."""
    going: set[Path] = set()
    for each in _but_slabs(root, idle_s, troubled):
        yield each
        path = Path(each.where)
        going.add(path)
        if root in path.parents:
            over -= each.bytes
    yield from _over_budget(root, slabs, over, going)


def _but_slabs(
    root: Path, idle_s: float | None, troubled: Callable[[], AbstractContextManager[None]]
) -> Iterator[Garbage]:
    yield from left_behind(root)
    rights = os.R_OK | os.W_OK | os.X_OK
    ours: list[Path] = []
    for home in sorted(homes(root)):
        with troubled():
            if not os.access(home, rights):
                raise PermissionError(errno.EACCES, "no right to remove anything here", str(home))
            ours.append(home)
    for home in ours:
        with troubled():
            yield from _left_by_the_dead(root, home)
    for home in ours:
        with troubled():
            if _idle_for(home, idle_s):
                yield Garbage(
                    "namespace that nobody used for so long",
                    str(home),
                    size_below(home),
                    partial(_remove_idle_home, root, home, idle_s),
                )


def _left_by_the_dead(root: Path, home: Path) -> Iterator[Garbage]:
    for path in sorted(marks(home)):
        if not is_locked(path):
            yield _file(root, path, "mark of a dead owner", partial(_is_free, path))
    for path, maker in sorted(unfinished(home)):
        if not is_locked(maker):
            what = "file that a dead process was making"
            yield _file(root, path, what, partial(_is_free, maker))
    for path in sorted(halves(home)):
        if path.suffix == DATA_SUFFIX:
            what, other = "slab without a table", path.with_suffix(TABLE_SUFFIX)
        else:
            what, other = "table without a slab", path.with_suffix(DATA_SUFFIX)
        yield _file(root, path, what, partial(_is_missing, other))


def _is_free(path: Path) -> bool:
    return not is_locked(path)


def _is_missing(path: Path) -> bool:
    return not path.exists()


def _file(root: Path, path: Path, what: str, still: Callable[[], bool]) -> Garbage:
    """A file that goes, under the folder's lock, if it is still garbage then."""

    def remove_file() -> bool:
        with folder_locked(root):
            if not still():
                return False
            path.unlink(missing_ok=True)
            return True

    return Garbage(what, str(path), length(path), remove_file)


def _idle_for(home: Path, idle_s: float | None) -> bool:
    if idle_s is None:
        return False
    try:
        if has_live_owner(home):
            return False
        times = [path.stat().st_mtime for path in slab_files(home, TABLE_SUFFIX)]
        return time.time() - max(times, default=home.stat().st_mtime) > idle_s
    except FileNotFoundError:  # as is who removes it just now
        return False


def _remove_idle_home(root: Path, home: Path, idle_s: float | None) -> bool:
    used = home.exists() and not _idle_for(home, idle_s)
    return not used and remove_home(root, home)


def remove_home(root: Path, home: Path) -> bool:
    """Remove a namespace's folder and what kvtier made in it, if it is still there; False if
    somebody uses it. Slabs of a newer version stay."""
    with folder_locked(root):
        if has_live_owner(home):
            return False
        kept = {path.stem for path in slab_files(home, TABLE_SUFFIX) if is_newer(path)}
        made = [path for path, _ in unfinished(home)]
        tables, data = slab_files(home, TABLE_SUFFIX), slab_files(home, DATA_SUFFIX)
        for path in (*tables, *data, *made):  # tables first: without one a slab is nothing
            if path.stem not in kept:
                path.unlink(missing_ok=True)
        if not kept:
            remove_bare_home(home)
    return True


def _over_budget(
    root: Path, slabs: Sequence[Slab], over: int, going: set[Path]
) -> Iterator[Garbage]:
    """The slabs of nobody that were written longest ago, until the rest is within the budget; what
    is retained goes last."""
    free = [slab for slab in slabs if not slab.in_use and slab.table.parent not in going]
    kept: set[Path] = set()
    for home in {slab.table.parent for slab in free} if over > 0 else ():
        kept |= retaining(home, [slab.table for slab in free if slab.table.parent == home])
    for slab in sorted(free, key=lambda slab: (slab.table in kept, used_at(slab.table))):
        if over <= 0:
            return
        over -= slab.size
        what = "slab beyond the capacity, written longest ago"
        yield Garbage(what, str(slab.data), slab.size, partial(_remove_slab, root, slab))


def _remove_slab(root: Path, slab: Slab) -> bool:
    with folder_locked(root):
        if has_owner_now(slab.table):
            return False
        remove_slab(Disk(), slab.table)
        return True
