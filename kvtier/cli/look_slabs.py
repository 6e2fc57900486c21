"""CPU regions and NVMe folders, read as docs/reference/format.md says."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from kvtier.backends.cpu import CpuSettings
from kvtier.backends.cpu.region import SUFFIX, read_header
from kvtier.backends.nvme import NvmeSettings
from kvtier.backends.nvme.folder.files import DATA_SUFFIX, TABLE_SUFFIX, used_bytes
from kvtier.cli.console import said_of
from kvtier.cli.holdings import (
    BENCH_MARK,
    NAMESPACE_ID,
    Locked,
    Place,
    Slab,
    count_parts,
    locked_files,
    read_file,
    read_namespace,
    standing,
)
from kvtier.config import StackConfig
from kvtier.core.slab.layout import OWNER, OWNER_AT, TABLE_AT, SlabHeader
from kvtier.core.system.disk import Disk
from kvtier.errors import FormatError, NewerFormat
from kvtier.types import NAMESPACE_BYTES_MAX

_SLAB_ID = re.compile(r"[0-9a-f]{8}")
_NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""What is there is no file of ours; all else says that a file cannot be read just now."""


def look_at_regions(tier: int, config: StackConfig) -> Place:
    """The regions of a CPU tier: of the engine that the stack names, and of its namesakes."""
    settings = config.tiers[tier]
    assert isinstance(settings, CpuSettings)
    folder = Path(settings.path)
    disk = Disk()
    place = Place(tier=tier, kind="cpu", where=str(folder), free=disk.free_bytes(folder))
    capacity = settings.capacity.resolve(disk.total_bytes(folder))
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        place.troubles.append(_trouble(folder, error))
        place.unseen = True
        return place
    locked = locked_files()
    named = _names_of(f"kvtier-{os.getuid()}-{settings.name}-", config.name)
    for path in paths:
        if region := named.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                _look_at_region(place, path, region[1], locked)
    place.capacity = capacity * max(1, len(place.slabs))
    count_parts(place)
    return place


def _names_of(prefix: str, name: str) -> re.Pattern[str]:
    """The files of an engine's region and of its namesakes': of data-parallel ranks, which have
    their number, and of those that found the name in use and got another."""
    engine = rf"({re.escape(name)}(?:-dp[0-9]{{1,5}})?(?:~[0-9]{{1,3}})?)"
    return re.compile(re.escape(prefix) + engine + re.escape(SUFFIX))


def _look_at_region(place: Place, path: Path, engine: str, locked: Locked) -> None:
    place.used += path.stat().st_size
    used = locked.has(path) or locked.has(path.with_suffix(".owner"))
    try:
        header = _region_header(path)
    except (FormatError, OSError) as error:
        _note(place, path, error)
        return
    place.slabs.append(Slab(table=path, data=path, header=header, in_use=used, engine=engine))


def _region_header(path: Path) -> SlabHeader:
    read_file(path, 0)  # raises for what is not an ordinary file, and would make `open` wait
    with path.open("rb") as file:
        return read_header(file.fileno())


def look_at_folder(tier: int, config: StackConfig) -> Place:
    """An NVMe folder with all namespaces in it."""
    settings = config.tiers[tier]
    assert isinstance(settings, NvmeSettings)
    root = Path(settings.path)
    disk = Disk()
    place = Place(
        tier=tier,
        kind="nvme",
        where=str(root),
        capacity=settings.capacity.resolve(disk.total_bytes(standing(root))),
        free=disk.free_bytes(standing(root)),
    )
    if not root.is_dir():
        return place
    locked = locked_files()
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        place.troubles.append(_trouble(root, error))
        place.unseen = True
        return place
    place.used = used_bytes(root)
    for name in names:
        home = root / name
        if NAMESPACE_ID.fullmatch(name) and home.is_dir() and not home.is_symlink():
            _look_at_home(place, home, locked)
        elif name != "lock" and not name.startswith(BENCH_MARK):
            place.strangers.append(name)
    count_parts(place)
    return place


def _look_at_home(place: Place, home: Path, locked: Locked) -> None:
    try:
        text = read_file(home / "namespace.json", NAMESPACE_BYTES_MAX)
        namespace = read_namespace(text, home.name)
        names = sorted(path.name for path in home.iterdir())
    except OSError as error:
        if home.exists():  # else it was removed since it was listed
            place.troubles.append(_trouble(home, error))
        return
    if namespace is not None:
        place.namespaces[home.name] = namespace
    before = len(place.slabs)
    for name in names:
        path = home / name
        if path.suffix != TABLE_SUFFIX or not _SLAB_ID.fullmatch(path.stem):
            continue
        try:
            place.slabs.append(_slab(path, locked))
        except FileNotFoundError:
            continue  # removed since it was listed
        except (FormatError, OSError) as error:
            _note(place, path, error)
    if namespace is None:
        rest = f"kvtier clear {home.name[:12]} --tier {place.tier} removes its blocks here"
        if len(place.slabs) == before:  # `clear` knows only what has blocks, or is described
            rest = f"{home} can be removed"
        place.troubles.append(
            f"{home / 'namespace.json'} does not describe this namespace: the next engine that "
            f"serves it writes it anew, and {rest}"
        )


def _slab(path: Path, locked: Locked) -> Slab:
    page = read_file(path, TABLE_AT)
    header = SlabHeader.unpack(page)
    if header.namespace.hex() != path.parent.name or f"{header.slab_id:08x}" != path.stem:
        raise FormatError("it belongs to another slab or namespace")
    data = path.with_suffix(DATA_SUFFIX)
    if path.stat().st_size < header.table_bytes:
        raise FormatError("it is cut short")
    if data.stat().st_size < header.data_end:
        raise FormatError(f"{data.name} is cut short")
    (owner,) = OWNER.unpack_from(page, OWNER_AT)
    in_use = locked.has(path.parent / "owners" / f"{owner:08x}")
    return Slab(table=path, data=data, header=header, in_use=in_use, engine=f"{owner:08x}")


def is_broken(kind: str, path: Path) -> bool:
    """Whether a table is not as it must be: asked once more before it is removed for that."""
    try:
        if kind == "cpu":
            _region_header(path)
        else:
            _slab(path, Locked(set(), set()))
    except (NewerFormat, OSError):
        return False
    except FormatError:
        return True
    return False


def _note(place: Place, path: Path, error: FormatError | OSError) -> None:
    place.troubles.append(_trouble(path, error))
    if isinstance(error, FormatError) and not isinstance(error, NewerFormat):
        place.broken.append(path)


def _trouble(path: Path, error: FormatError | OSError) -> str:
    if isinstance(error, NewerFormat):
        return f"{path}: {error}; it is left alone: update kvtier to read it"
    if isinstance(error, FormatError):
        return f"{path}: {error}; kvtier verify --repair removes it"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: {error.strerror}; run this as its owner"
    if isinstance(error, FileNotFoundError):
        return f"{path} has no namespace.json; it is left alone: remove it if it is nobody's"
    if error.errno in _NO_FILE:
        return f"{path}: {error.strerror}; it is left alone: remove it if it is nobody's"
    return said_of(error)
