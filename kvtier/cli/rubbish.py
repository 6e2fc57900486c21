"""What a stack's media hold that nobody will ask for again: found first, then removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvtier.backends.cpu import CpuSettings
from kvtier.backends.cpu.region import SUFFIX, in_use, leftovers, own_files, remove
from kvtier.backends.nvme.folder.files import (
    DATA_SUFFIX,
    TABLE_SUFFIX,
    halves,
    is_newer,
    marks,
    remove_bare_home,
    remove_slab,
    slab_files,
    unfinished,
    used_at,
)
from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.cli.console import said_of
from kvtier.cli.hold import folder_held, has_live_owner, has_owner_now
from kvtier.cli.holdings import BENCH_MARK, NAMESPACE_ID, Place, Slab
from kvtier.config import StackConfig
from kvtier.core.settings import TierSettings, WritePolicy
from kvtier.core.system.disk import Disk, is_locked
from kvtier.errors import KVTierError, MediumError

if TYPE_CHECKING:
    from kvtier.backends.object import ObjectSettings
    from kvtier.backends.object.stores.store import Store

_MAKING = ".making"
_BENCH_S = 600.0
"""Measuring claims its folder within this time; younger ones may be about to."""


class Rubbish(msgspec.Struct):
    """Something to be removed. `remove` looks once more whether it still is, and says so."""

    what: str
    where: str
    bytes: int
    remove: Callable[[], bool]


def find(config: StackConfig, places: list[Place], idle_s: float | None) -> Iterator[Rubbish]:
    """All rubbish of these places, of what is idle for `idle_s` seconds too."""
    seen: set[Path] = set()
    for place in places:
        if place.unseen:  # why is said already
            continue
        yield from _as_far_as(place, _in_place(config.tiers[place.tier], place, idle_s, seen))


def _in_place(
    settings: TierSettings, place: Place, idle_s: float | None, seen: set[Path]
) -> Iterator[Rubbish]:
    if isinstance(settings, CpuSettings):
        yield from _of_regions(settings, place, idle_s)
    elif place.kind == "nvme" and Path(place.where).is_dir():
        only_read = settings.write is WritePolicy.NEVER  # what others may keep there is theirs
        yield from _of_folder(place, None if only_read else place.capacity, idle_s, seen)
    elif place.kind == "object":
        yield from _of_store(settings, place, idle_s, seen)


def _as_far_as(place: Place, found: Iterator[Rubbish]) -> Iterator[Rubbish]:
    """What cannot be looked at is a trouble, and keeps nothing behind it from being found."""
    try:
        yield from found
    except FileNotFoundError:  # removed since it was listed
        return
    except (KVTierError, OSError) as error:
        place.troubles.append(said_of(error))


# -- CPU regions -----------------------------------------------------------------------------


def _of_regions(settings: CpuSettings, place: Place, idle_s: float | None) -> Iterator[Rubbish]:
    folder = Path(settings.path)
    left = leftovers(folder, time.time())
    for path in left:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            size = path.stat().st_size
            what = "region that nobody will come back to"
            yield Rubbish(what, str(path), size, partial(_remove_left, folder, path))
    own = [slab.data for slab in place.slabs if slab.data not in left]
    for path in own:  # regions of other stacks may lie beside them, and were not asked about
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            size = path.stat().st_size
            if _idle_region(path, idle_s):
                what = "region that nobody used for so long"
                yield Rubbish(what, str(path), size, partial(_remove_idle, path, idle_s))
    for path in own_files(folder, f"kvtier-{os.getuid()}-*{_MAKING}"):
        yield from _unless_used(path, "region that was never finished")
    for path in own_files(folder, f"kvtier-{os.getuid()}-*.owner"):
        if not path.with_suffix(SUFFIX).exists():
            yield from _unless_used(path, "lock without its region")


def _remove_left(folder: Path, path: Path) -> bool:
    return path in leftovers(folder, time.time()) and remove(path)


def _idle_region(path: Path, idle_s: float | None) -> bool:
    if idle_s is None or in_use(path):
        return False
    return time.time() - path.stat().st_mtime > idle_s


def _remove_idle(path: Path, idle_s: float | None) -> bool:
    try:
        return _idle_region(path, idle_s) and remove(path)
    except FileNotFoundError:  # as is who removes it just now
        return True


def _unless_used(path: Path, what: str) -> Iterator[Rubbish]:
    region = path.with_suffix(SUFFIX)

    def remove_file() -> bool:
        if not region.exists():  # under the owner's lock: an engine may be about to make it
            return remove(region)
        if path.suffix != _MAKING or in_use(region):
            return False
        path.unlink(missing_ok=True)
        return True

    if not in_use(region):
        with contextlib.suppress(FileNotFoundError):
            yield Rubbish(what, str(path), path.stat().st_size, remove_file)


# -- NVMe folders ----------------------------------------------------------------------------


def _of_folder(
    place: Place, capacity: int | None, idle_s: float | None, seen: set[Path]
) -> Iterator[Rubbish]:
    root = Path(place.where)
    over = 0 if capacity is None else place.used - capacity
    going: set[Path] = set()
    for each in _in_folder(place, root, idle_s, seen):
        yield each
        path = Path(each.where)
        going.add(path)
        if root in path.parents:
            over -= each.bytes
    yield from _over_budget(place, root, over, going)


def _of_benches(root: Path, seen: set[Path]) -> Iterator[Rubbish]:
    """What measurements left in a tier's folder or beside it; `seen` are folders in which that was
    looked for already, for another tier."""
    for folder in {root, root.parent} - seen:
        seen.add(folder)
        for path in sorted(folder.glob(f"{BENCH_MARK}*")):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                if not _bench_lives(path):
                    what = "folder of a measurement that was killed"
                    yield Rubbish(what, str(path), _size_of(path), partial(_remove_bench, path))


def _in_folder(
    place: Place, root: Path, idle_s: float | None, seen: set[Path]
) -> Iterator[Rubbish]:
    yield from _of_benches(root, seen)
    homes = [path for path in sorted(root.iterdir()) if _is_home(path)]
    for home in homes:
        yield from _as_far_as(place, _left_by_the_dead(root, home))
    for home in homes:
        yield from _as_far_as(place, _idle_home(root, home, idle_s))


def _idle_home(root: Path, home: Path, idle_s: float | None) -> Iterator[Rubbish]:
    if _idle_for(home, idle_s):
        yield Rubbish(
            "namespace that nobody used for so long",
            str(home),
            _size_of(home),
            partial(_remove_idle_home, root, home, idle_s),
        )


def _is_home(path: Path) -> bool:
    """Whether this is a namespace's folder in which we may remove something."""
    named = NAMESPACE_ID.fullmatch(path.name) is not None
    real = path.is_dir() and not path.is_symlink()
    return named and real and os.access(path, os.R_OK | os.W_OK | os.X_OK)


def _left_by_the_dead(root: Path, home: Path) -> Iterator[Rubbish]:
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


def _file(root: Path, path: Path, what: str, still: Callable[[], bool]) -> Rubbish:
    """A file that goes, under the folder's lock, if it is still rubbish then."""

    def remove_file() -> bool:
        with folder_locked(root):
            if not still():
                return False
            path.unlink(missing_ok=True)
            return True

    with contextlib.suppress(FileNotFoundError):
        return Rubbish(what, str(path), path.stat().st_size, remove_file)
    return Rubbish(what, str(path), 0, remove_file)


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


def _over_budget(place: Place, root: Path, over: int, going: set[Path]) -> Iterator[Rubbish]:
    """The slabs of nobody that were written longest ago, until the rest is within the budget."""
    slabs = [slab for slab in place.slabs if not slab.in_use and slab.table.parent not in going]
    for slab in sorted(slabs, key=lambda slab: used_at(slab.table)):
        if over <= 0:
            return
        over -= slab.bytes
        yield Rubbish(
            "slab beyond the capacity, written longest ago",
            str(slab.data),
            slab.bytes,
            partial(_remove_slab, root, slab),
        )


def _remove_slab(root: Path, slab: Slab) -> bool:
    with folder_locked(root):
        if has_owner_now(slab.table):
            return False
        remove_slab(Disk(), slab.table)
        return True


def _bench_lives(path: Path) -> bool:
    young = time.time() - path.stat().st_mtime < _BENCH_S
    return young or folder_held(path)


def _remove_bench(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # somebody else has just removed it
        if _bench_lives(path):
            return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


# -- object stores ---------------------------------------------------------------------------


def _of_store(
    settings: TierSettings, place: Place, idle_s: float | None, seen: set[Path]
) -> Iterator[Rubbish]:
    """Idle namespaces, blocks too old or over the budget, what told of blocks that went, and what
    was only written to try the store."""
    from kvtier.backends.object import ObjectSettings
    from kvtier.cli.look_objects import local_folder, remove_idle
    from kvtier.cli.trials import left_behind, remove_left

    assert isinstance(settings, ObjectSettings)
    going: set[str] = set()
    for part in place.parts:
        last = max(part.newest or 0.0, place.served.get(part.namespace, 0.0))
        if idle_s is None or time.time() - last <= idle_s:
            continue
        going.add(part.namespace)
        yield Rubbish(
            "namespace that nobody used for so long",
            _below(place, part.namespace),
            part.bytes,
            partial(remove_idle, settings, part.namespace, idle_s),
        )
    folder = local_folder(settings.url)
    if folder is not None:
        yield from _of_benches(folder, seen)
    made = folder is None or folder.exists()  # opening the store would make it
    if made and not place.troubles:
        for name, size in left_behind(settings).items():
            what = "what a measurement or a doctor left that was killed"
            yield Rubbish(what, _below(place, name), size, partial(remove_left, settings, name))
        yield from _surveyed(settings, place, going)


def _below(place: Place, namespace: str) -> str:
    return f"{place.where.rstrip('/')}/{namespace}"


def _surveyed(settings: ObjectSettings, place: Place, going: set[str]) -> Iterator[Rubbish]:
    from kvtier.backends.object import capacity_of
    from kvtier.backends.object.housekeeping import gc
    from kvtier.cli.look_objects import opened_store

    capacity = capacity_of(settings)
    age_s = None if settings.age_max is None else settings.age_max.seconds
    if settings.write is WritePolicy.NEVER:  # how much others keep, and for how long, is up to them
        capacity, age_s = sys.maxsize, None

    def survey(store: Store) -> gc.Survey:
        return gc.survey(store, capacity, age_s, time.time(), going)

    def collect() -> bool:
        with opened_store(settings) as store:
            found = survey(store)
            gone, _ = gc.collect(store, found)
        if kept := len(found.garbage) - gone:
            raise MediumError(f"the store kept {kept} of {len(found.garbage)} blocks: try again")
        return True

    def remove_empty(namespace: str) -> bool:
        with opened_store(settings) as store:
            return gc.remove_empty_namespace(store, namespace, time.time())

    with opened_store(settings) as store:
        found = survey(store)
    if found.garbage:
        what = f"{len(found.garbage)} blocks that are too old or over the budget"
        yield Rubbish(what, place.where, found.garbage_bytes, collect)
    for namespace, size in found.empty_namespaces.items():
        what = "what told of a namespace without blocks"
        yield Rubbish(what, _below(place, namespace), size, partial(remove_empty, namespace))
